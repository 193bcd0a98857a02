"""The rows of several batches as one: what they must share for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_collate_kit.batch.columns import Columns
from torch_collate_kit.batch.fields import Field
from torch_collate_kit.batch.rows import cat, equal
from torch_collate_kit.batch.storage import Storage
from torch_collate_kit.ragged import Ragged

__all__ = ["joined"]


def joined(
    parts: Sequence[Storage], fields: Sequence[Mapping[str, Field]], overrides: dict[str, Any]
) -> Storage:
    """All rows of all parts; ``fields`` of each part are read where only another one stores them.

    Raises:
        ValueError: fields, widths or metadata disagree, and nothing overrides them.
    """
    if not parts:
        raise ValueError("Batch.cat needs at least one batch, got none")
    first = parts[0]
    for i, part in enumerate(parts):
        _check_fields(i, part, first)
        _check_metadata(i, part, first, overrides)
    if "num_loss_tokens" not in overrides:
        _check_one_collation(parts)
    columns = Columns.cat([part.columns for part in parts])
    stored = {name for part in parts for name in part.given}
    names = [name for name in first.names if columns is None or name in stored]
    return Storage(
        columns,
        {name: cat([of[name] for of in fields]) for name in names},
        {key: cat([part.row_metadata[key] for part in parts]) for key in first.row_metadata},
        {**first.metadata, **overrides},
    )


def _check_fields(index: int, part: Storage, first: Storage) -> None:
    if part.names.keys() != first.names.keys():
        raise ValueError(
            f"batch {index} has fields {list(part.names)}, batch 0 has {list(first.names)}"
        )
    if part.columns is not None and first.columns is not None:
        mine, theirs = first.columns.placement.vision, part.columns.placement.vision
        if mine != theirs:  # images become tokens, and pixels a dtype, in one way
            raise ValueError(
                f"batch {index} was collated with {theirs}, batch 0 with {mine}; collate both with "
                "the processor of one model, and one pixel_dtype"
            )
    shapes = part.row_shapes()
    for name, shape in first.row_shapes().items():
        if shapes.get(name, shape) != shape:
            raise ValueError(
                f"{name} of batch {index} has row shape {shapes[name]}, of batch 0 {shape}; "
                "collate them together, or with fixed_width=True"
            )


def _check_metadata(
    index: int, part: Storage, first: Storage, overrides: Mapping[str, Any]
) -> None:
    for kind in ("row_metadata", "metadata"):
        odd = getattr(first, kind).keys() ^ getattr(part, kind).keys()
        if odd:
            raise ValueError(f"only one of batch 0 and batch {index} has the {kind} {sorted(odd)}")
    pairs = {key: (value, part.metadata[key]) for key, value in first.metadata.items()}
    differ = {key: pair for key, pair in pairs.items() if not equal(*pair)}
    if "loss_mask_divisor" in differ:
        mine, theirs = differ["loss_mask_divisor"]
        raise ValueError(
            f"loss_mask_divisor is {mine} in batch 0 and {theirs} in batch {index}, so their masks "
            "are divided by different numbers; collate them together, or with normalize_loss=False"
        )
    found = [
        f"metadata[{k!r}] is {a!r}, {b!r}" for k, (a, b) in differ.items() if k not in overrides
    ]
    if found:
        raise ValueError(
            f"batches 0 and {index} disagree: {', '.join(found)}; pass metadata={{...}} with these "
            "keys to say what the whole shall have"
        )


def _check_one_collation(parts: Sequence[Storage]) -> None:
    """Parts of one batch name different examples; batches collated apart each begin at 0."""
    owner: dict[tuple[int, int], int] = {}
    for i, part in enumerate(parts):
        columns: list[Any] = [
            part.row_metadata.get(key) for key in ("example_indices", "example_starts")
        ]
        if not all(isinstance(column, Ragged) for column in columns):
            return
        for piece in zip(*(column.values.tolist() for column in columns), strict=True):
            if owner.setdefault(piece, i) != i:
                raise ValueError(
                    f"batches {owner[piece]} and {i} both have an example {piece[0]}: they were "
                    "collated apart, so their num_loss_tokens is not that of the whole; collate "
                    "them together, or pass metadata={'num_loss_tokens': ...}"
                )
