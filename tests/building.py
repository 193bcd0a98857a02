"""Collators, samplers and streams from keywords: any field of PackingOptions, and their own."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from torch_collate_kit import (
    Mixture,
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    PackingOptions,
    ParallelLayout,
    PrefetchingSampler,
    TokenizedDataset,
)

_PACKING = {field.name for field in fields(PackingOptions)}
_COLLATOR = {"fixed_width", "normalize_loss", "train_all", "fields", "vision", "targets"}


def split_options(
    options: dict[str, Any], tokenizer: Any = 0
) -> tuple[PackedCollator, dict[str, Any]]:
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


class ForTrainer:
    """Stand in for ``collate.for_trainer()``: a callable around a collator."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, examples: Any) -> dict[str, Any]:
        return self.collate(examples).model_inputs()


def packed_sampler(examples: Any, **options: Any) -> PackedBatchSampler:
    """``normalize_loss`` is by default whether the loss tokens are known."""
    is_known = isinstance(examples, TokenizedDataset) or options.get("num_loss_tokens") is not None
    collate, others = split_options({"normalize_loss": is_known, **options})
    return PackedBatchSampler(examples, collate, **others)


def packed_stream(
    source: Any, *, tokenizer: Any = 0, rows: int = 1, dp_size: int = 1, **options: Any
) -> PackedIterableDataset:
    """Return a stream of ``rows`` rows a batch: for one of ``dp_size`` ranks, or for all of them.

    It is for all, without a ``dp_rank``, where a parallel layout of several ranks is given.
    """
    parallel = options.get("parallel") or ParallelLayout()
    if dp_size > 1:
        options["parallel"] = replace(parallel, dp=dp_size)
    elif parallel.dp > 1:
        options.setdefault("dp_rank", "all")
    collate, others = split_options(options, tokenizer)
    return PackedIterableDataset(source, collate, batch_rows=rows * dp_size, **others)


def mixed_sampler(sources: Any, **options: Any) -> PrefetchingSampler:
    """Return a sampler of a mixture, whose epochs go on in one batch."""
    names = ("weights", "by", "schedule", "max_passes", "stop", "names")
    settings = {name: options.pop(name) for name in names if name in options}
    return PrefetchingSampler(Mixture(sources, **settings), **{"tail": "wrap", **options})
