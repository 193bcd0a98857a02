"""Collators, samplers and streams from keywords: any field of PackingOptions, and their own."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch_collate_kit import (
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    PackingOptions,
    TokenizedDataset,
)

_PACKING = {field.name for field in fields(PackingOptions)}
_COLLATOR = {"fixed_width", "normalize_loss", "train_all", "fields", "vision"}


def split_options(options: dict[str, Any], tokenizer: Any = 0) -> tuple[PackedCollator, dict]:
    """Return the collator of the options that are its own, and the other options."""
    options = {k: v for k, v in options.items() if (k, v) != ("parallel", None)}
    packing = {name: value for name, value in options.items() if name in _PACKING}
    given = {name: value for name, value in options.items() if name in _COLLATOR}
    if packing:
        given["packing"] = PackingOptions(**packing)
    else:
        given["packing"] = options.get("packing")
    others = options.keys() - packing.keys() - given.keys()
    return PackedCollator(tokenizer, **given), {name: options[name] for name in others}


def packed_collator(tokenizer: Any, **options: Any) -> PackedCollator:
    collate, others = split_options(options, tokenizer)
    assert not others, others
    return collate


def packed_sampler(examples: Any, **options: Any) -> PackedBatchSampler:
    """``normalize_loss`` is by default whether the loss tokens are known."""
    is_known = isinstance(examples, TokenizedDataset) or options.get("num_loss_tokens") is not None
    collate, others = split_options({"normalize_loss": is_known, **options})
    return PackedBatchSampler(examples, collate, **others)


def packed_stream(source: Any, *, tokenizer: Any = 0, **options: Any) -> PackedIterableDataset:
    collate, others = split_options(options, tokenizer)
    return PackedIterableDataset(source, collate, **others)
