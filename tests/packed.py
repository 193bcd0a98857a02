"""A PackedCollator from any fields of PackingOptions and its own options, as keywords."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch_collate_kit import PackedCollator, PackingOptions

_NAMES = {field.name for field in fields(PackingOptions)}


def packed_collator(tokenizer: Any, **options: Any) -> PackedCollator:
    packing = {name: options.pop(name) for name in _NAMES & options.keys()}
    return PackedCollator(tokenizer, packing=PackingOptions(**packing), **options)
