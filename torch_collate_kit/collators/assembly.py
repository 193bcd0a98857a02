"""The first and the last steps of every collator: its options, and a Batch of placed columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np
import torch

from torch_collate_kit._checks import checked_choice
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.columns import Columns
from torch_collate_kit.batch.fields import PerExample, PerResponseToken, PerToken
from torch_collate_kit.batch.placement import (
    MAX_WIDTH,
    Pieces,
    Placement,
    padded,
    too_wide,
    whole_examples,
)
from torch_collate_kit.batch.storage import Storage
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import unchecked
from torch_collate_kit.reading.entries import DeclaredFields
from torch_collate_kit.reading.examples import ExampleColumns, PlacedColumns
from torch_collate_kit.vision import VisionLayout

__all__ = [
    "assemble",
    "checked_overflow",
    "lost_examples",
    "made_of_images",
    "one_per_row",
    "own_fields",
    "pad_token_id_of",
    "refuse_unpacked",
    "vision_of",
]

# Dtypes that torch computes with; of the others it has little more than the name.
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_DTYPES = (*_INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Padding(Protocol):
    """Options of a collator with one example per row."""

    pad_token_id: int
    pad_to_multiple_of: int | None
    max_length: int | None
    overflow: str
    normalize_loss: bool
    vision: VisionLayout | None


def checked_overflow(overflow: Any, choices: tuple[str, ...], max_length: int | None) -> str:
    """Return ``overflow``, one of ``choices``; it needs a ``max_length``."""
    checked_choice("overflow", overflow, choices)
    if overflow != "raise" and max_length is None:
        raise ValueError(
            f"overflow={overflow!r} is for examples longer than max_length, which is None; pass "
            "max_length, too"
        )
    return str(overflow)


def vision_of(tokenizer: Any, vision: VisionLayout | None) -> VisionLayout | None:
    """Return ``vision``, or the layout of a processor given in place of a tokenizer."""
    if vision is not None and not isinstance(vision, VisionLayout):
        raise TypeError(
            f"vision must be a VisionLayout, got {type(vision).__name__}; "
            "VisionLayout.of(processor, model.config)"
        )
    if vision is None and hasattr(tokenizer, "image_processor"):
        return VisionLayout.of(tokenizer)
    return vision


def refuse_unpacked(vision: VisionLayout | None) -> None:
    """Refuse models whose examples cannot be packed exactly, or whose family is ambiguous."""
    if vision is not None and vision.family.not_packed:
        raise ValueError(
            f"examples of {vision.family_name} models are not packed: "
            f"{vision.family.not_packed}; use PaddedCollator"
        )
    if vision is not None and vision.shared_by:
        raise ValueError(
            "rows are packed by the rules of one model, and the processor is that of several: "
            f"{', '.join(vision.shared_by)}; pass the model's config: "
            "vision=VisionLayout.of(processor, model.config), or config=model.config to "
            "VisionLanguageCollator (PaddedCollator needs none)"
        )


def made_of_images(vision: VisionLayout | None) -> tuple[str, ...]:
    """Return the names of the position and type fields that a vision-language model adds."""
    if vision is None:
        return ()
    types = vision.family.token_types if vision.family.positions != "model" else ""
    return (*(("mrope_position_ids",) if vision.has_mrope else ()), *((types,) if types else ()))


def own_fields(
    fields: DeclaredFields | None, names: tuple[str, ...], vision: VisionLayout | None
) -> DeclaredFields:
    """Return the declared fields, checked; ``names`` are taken by the collator."""
    if fields is None:
        return {}
    if not isinstance(fields, Mapping):
        raise TypeError(
            f"fields must map names to PerToken, PerResponseToken or PerExample, got {fields!r:.60}"
        )
    of_images = () if vision is None else (*made_of_images(vision), *vision.fields)
    taken_names = (*names, "loss_weights", *of_images)
    for name, spec in fields.items():
        _check_spec(name, spec)
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"fields names {name!r}, which is no name; use letters and _")
        if name in taken_names:
            raise ValueError(
                f"fields names {name!r}, which the collator reads or makes itself; rename yours"
            )
        pad = getattr(spec, "pad", 0)
        if torch.tensor(pad, dtype=torch.float64).to(spec.dtype).double().item() != pad:
            raise ValueError(f"fields[{name!r}] has pad={pad}, which {spec.dtype} does not hold")
    return dict(fields)


def _check_spec(name: str, spec: Any) -> None:
    if not isinstance(spec, PerToken | PerResponseToken | PerExample):
        raise TypeError(
            f"fields[{name!r}] must be a PerToken, PerResponseToken or PerExample, got "
            f"{spec!r:.60}; for instance PerToken(torch.float32)"
        )
    if not isinstance(spec.dtype, torch.dtype) or spec.dtype.is_complex:
        raise TypeError(
            f"fields[{name!r}] must have a torch dtype of real numbers, got {spec.dtype!r}"
        )
    if not isinstance(spec, PerExample) and spec.dtype not in _DTYPES:
        raise TypeError(
            f"fields[{name!r}] has {spec.dtype}, which torch does not place; "
            "give a signed integer, uint8, bool, or a float of 16 bits or more"
        )


def pad_token_id_of(tokenizer: Any) -> int:
    """Return the pad id of an int, a tokenizer or processor, or anything with ``pad_token_id``."""
    if hasattr(tokenizer, "image_processor") and hasattr(tokenizer, "tokenizer"):
        tokenizer = tokenizer.tokenizer
    if isinstance(tokenizer, int | np.integer) and not isinstance(tokenizer, bool):
        pad_token_id = int(tokenizer)
    elif not hasattr(tokenizer, "pad_token_id"):
        raise TypeError(
            "tokenizer must be an int pad id or have .pad_token_id, got "
            f"{type(tokenizer).__name__}; pass the tokenizer, or tokenizer.pad_token_id"
        )
    elif tokenizer.pad_token_id is None:
        raise ValueError(
            "the tokenizer has no pad token (pad_token_id is None); set one, for instance "
            "tokenizer.pad_token = tokenizer.eos_token, or pass the pad id as an int"
        )
    elif not isinstance(tokenizer.pad_token_id, int | np.integer):
        raise TypeError(f"pad_token_id must be an int, got {tokenizer.pad_token_id!r}")
    else:
        pad_token_id = int(tokenizer.pad_token_id)
    if pad_token_id < 0:
        raise ValueError(f"pad_token_id must be 0 or more, got {pad_token_id}; embeddings index it")
    return pad_token_id


def one_per_row(
    collator: Padding,
    examples: ExampleColumns,
    names: tuple[str, ...],
    padding_side: Literal["left", "right"],
) -> Batch:
    """Return the Batch with one example per row; ``names`` are its fields."""
    pieces, dropped, cut = _fit(examples, collator.max_length, collator.overflow)
    lengths, multiple = pieces.lengths, collator.pad_to_multiple_of or 1
    width = -(-int(lengths.max()) // multiple) * multiple
    if width > MAX_WIDTH:
        raise too_wide(
            width, f"shorten example {lengths.argmax()} when tokenizing, or filter it out"
        )
    placed = examples.place(pieces)
    # the widest run of cells from a row's first response token to its end
    pads = 0 if padding_side == "left" else width - lengths
    num_actions = placed.counts["responses"]
    longest = int(np.where(num_actions > 0, num_actions + pads, 0).max())
    segments = padded(placed.counts, width, padding_side=padding_side)
    per_example = examples.per_example
    if len(dropped):
        per_example = {k: [of[i] for i in pieces.examples] for k, of in per_example.items()}
    return assemble(
        placed,
        Placement(width, longest, collator.pad_token_id, False, segments, collator.vision),
        names,
        normalize_loss=collator.normalize_loss,
        row_metadata=per_example,
        metadata={"num_examples": len(examples.lengths), "num_dummy_rows": 0}
        | lost_examples(dropped, cut),
    )


def lost_examples(dropped: np.ndarray, cut: np.ndarray) -> dict[str, Any]:
    """Return batch metadata: the numbers of examples that were dropped and cut."""
    return {
        "num_dropped": len(dropped),
        "num_cut": len(cut),
        "dropped": tuple(dropped.tolist()),
        "cut": tuple(cut.tolist()),
    }


def _fit(
    examples: ExampleColumns, max_length: int | None, overflow: str
) -> tuple[Pieces, np.ndarray, np.ndarray]:
    """Return the pieces of at most ``max_length`` tokens; which examples are dropped, and cut."""
    lengths = examples.lengths
    whole, none = whole_examples(lengths), np.zeros(0, dtype=np.int64)
    if max_length is None or not len(too_long := np.flatnonzero(lengths > max_length)):
        return whole, none, none
    i = int(too_long[0])
    found = f"example {i} has {lengths[i]} tokens, more than max_length={max_length}"
    if overflow == "raise":
        others = f" ({len(too_long) - 1} more are too long)" if len(too_long) > 1 else ""
        ways = '"drop"' if examples.are_rollouts else '"truncate" or "drop"'
        raise DataError(f"{found}{others}; raise max_length, shorten it, or pass overflow={ways}")
    if overflow == "drop":
        if len(too_long) == len(lengths):
            raise DataError(
                f"{found}, and so has every other, so nothing of the batch is left; raise "
                "max_length"
            )
        kept = np.delete(whole.examples, too_long)
        return whole_examples(lengths[kept])._replace(examples=kept), too_long, none
    lengths = np.minimum(lengths, max_length)
    if examples.images is not None and examples.images.units:
        lengths = np.minimum(examples.images.cuts(max_length, None)[0], max_length)
        if not lengths.all():
            raise DataError(
                f"example {lengths.argmin()} begins with an image of more than max_length="
                f"{max_length} tokens, and an image is never cut; make the image smaller, or pass "
                'overflow="drop"'
            )
    return whole._replace(lengths=lengths), none, too_long


def assemble(
    placed: PlacedColumns,
    placement: Placement,
    names: tuple[str, ...],
    *,
    normalize_loss: bool,
    row_metadata: Mapping[str, Any],
    metadata: Mapping[str, Any],
    num_loss_tokens_elsewhere: int = 0,
) -> Batch:
    """Return the Batch of placed examples; ``names`` are its fields, ``metadata`` goes last."""
    pieces = placed.pieces
    specs = {**placed.specs, "input_ids": PerToken(torch.int64, placement.pad_token_id)}
    num_loss_tokens = int(placed.num_trained.sum()) + num_loss_tokens_elsewhere
    per_piece = {
        "example_indices": pieces.examples,
        "example_starts": pieces.starts,
        "num_actions": placed.counts["responses"],
        "num_trained": placed.num_trained,
    }
    row_offsets = pieces.row_offsets
    if "examples" in placed.counts:  # dummy images are none
        is_example = placed.counts["examples"] > 0
        per_piece = {key: values[is_example] for key, values in per_piece.items()}
        row_offsets = np.append(0, np.cumsum(is_example))[row_offsets]
    storage = Storage(
        Columns.of(placed.columns, specs, names, placement),
        {},
        {
            **{key: unchecked(values.copy(), row_offsets) for key, values in per_piece.items()},
            **row_metadata,
        },
        {
            "response_length": placement.response_length,
            "num_loss_tokens": num_loss_tokens,
            "loss_mask_divisor": max(1, num_loss_tokens) if normalize_loss else 1,
            "num_tokens": int(pieces.lengths.sum()),
            **metadata,
        },
    )
    return Batch.of_storage(storage, check=False)
