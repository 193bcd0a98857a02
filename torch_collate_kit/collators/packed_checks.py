"""What ``PackedCollator`` refuses: rollouts, documents and models that its rows cannot hold."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from torch_collate_kit.batch.fields import PerExample
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing import PackingOptions
from torch_collate_kit.reading.entries import DeclaredFields, joined
from torch_collate_kit.reading.examples import ExampleColumns
from torch_collate_kit.reading.keys import TOGETHER, unknown_images
from torch_collate_kit.vision import VisionLayout


def check_ends(columns: ExampleColumns, eos_token_id: int) -> None:
    """Check that every document ends with the end token, which parts it from the next."""
    if columns.are_rollouts:
        raise DataError('strategy="wrapped" joins documents with input_ids, not rollouts')
    ids = joined(columns.input_ids)
    without = np.flatnonzero(ids.values[ids.offsets[1:] - 1] != eos_token_id)
    if len(without):
        i = int(without[0])
        raise DataError(
            f"example {i} ends with token {int(ids.values[ids.offsets[i + 1] - 1])}, not with "
            f"the end token {eos_token_id} of the tokenizer, which parts documents with "
            f'strategy="wrapped" ({len(without)} of {len(ids)} examples); append it to every '
            "document, as chat.tokenize_documents does"
        )


def refuse_parts(packing: PackingOptions, fields: DeclaredFields, keys: Collection[str]) -> None:
    """Refuse lists of segments that must not be parted, where trees larger than a row are cut.

    Raises:
        ValueError: they are sides of pairs, or have fields of a whole example.
    """
    if packing.overflow != "split":
        return
    way_out = 'pass overflow="raise" or "drop"'
    if TOGETHER in keys:
        raise ValueError(
            f"overflow='split' cuts examples between their segments, and the examples have "
            f"{TOGETHER}, as those of tokenize_preferences: the loss of a pair needs both sides; "
            f"{way_out}"
        )
    of_examples = [name for name, spec in fields.items() if isinstance(spec, PerExample)]
    if of_examples:
        raise ValueError(
            f"overflow='split' cuts examples between their segments, and {of_examples[0]} is of a "
            f"whole example (PerExample); make it a field per token, leave it out, or {way_out}"
        )


def check_rollouts(rollouts: ExampleColumns, packing: PackingOptions, *, has_vision: bool) -> None:
    """Check that rollouts fit in a row whole, and that their images are understood."""
    if rollouts.images is not None and not has_vision:
        raise unknown_images(f"example {min(rollouts.images.units)}")
    capacity, max_tokens = packing.capacity, packing.max_tokens
    too_long = np.flatnonzero(rollouts.lengths > capacity)
    if len(too_long) and packing.overflow != "drop":
        i = int(too_long[0])
        raise DataError(
            f"example {i} is a rollout of {rollouts.lengths[i]} tokens, more "
            f"than the {capacity} that fit in a row with max_tokens={max_tokens}, and a "
            'rollout is never cut; raise max_tokens, or pass overflow="drop"'
        )


def eos_token_id_of(tokenizer: Any) -> int:
    """Return the end token of a tokenizer, which must have one."""
    found = getattr(tokenizer, "eos_token_id", None)
    if not isinstance(found, int | np.integer):
        raise ValueError(
            f'strategy="wrapped" joins documents with the end token of the tokenizer, and '
            f"{type(tokenizer).__name__} has eos_token_id={found!r}; pass a tokenizer, no pad id"
        )
    return int(found)


def refuse_unpacked(vision: VisionLayout) -> None:
    """Refuse models whose examples cannot be packed exactly, or whose family is ambiguous."""
    if vision.family.not_packed:
        raise ValueError(
            f"examples of {vision.family_name} models are not packed: "
            f"{vision.family.not_packed}; use PaddedCollator"
        )
    if vision.shared_by:
        raise ValueError(
            "rows are packed by the rules of one model, and the processor is that of several: "
            f"{', '.join(vision.shared_by)}; pass the model's config: "
            "vision=VisionLayout.of(processor, model.config), or config=model.config to "
            "VisionLanguageCollator (PaddedCollator needs none)"
        )
