"""Batches compared, and joined by ``Batch.cat``: what they must share for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_collate_kit.batch.rows import cat, equal
from torch_collate_kit.batch.storage import Storage
from torch_collate_kit.ragged import Ragged

__all__ = ["equal_batches", "joined"]


def equal_batches(a: Any, b: Any) -> bool:
    """The same fields, with equal dtypes, shapes and values, and equal metadata."""
    if a.keys() != b.keys():
        return False
    if not (equal(a.row_metadata, b.row_metadata) and equal(a.metadata, b.metadata)):
        return False
    mine, theirs = a.contents(), b.contents()
    if equal(mine, theirs):
        return True
    given = bool(mine["given"] or theirs["given"])
    if not given and mine["columns"].keys() == theirs["columns"].keys():
        return False
    return all(equal(a[name], b[name]) for name in a)  # stored in other forms


def joined(
    batches: Sequence[Any], overrides: dict[str, Any]
) -> tuple[Storage, dict[str, Any], dict[str, Any]]:
    """The rows of all batches, their row metadata, and the metadata of the whole."""
    if not batches:
        raise ValueError("Batch.cat needs at least one batch, got none")
    _check_joinable(batches, overrides=overrides)
    first = batches[0]
    per_row = {
        key: cat([batch.row_metadata[key] for batch in batches]) for key in first.row_metadata
    }
    parts = [batch._stored() for batch in batches]
    storage = Storage.cat(parts, lambda i, name: batches[i][name])
    return storage, per_row, {**first.metadata, **overrides}


def _check_joinable(batches: Sequence[Any], *, overrides: Mapping[str, Any]) -> None:
    """ValueError where fields, widths or batch metadata disagree and nothing overrides them."""
    for i, batch in enumerate(batches):
        _check_pair(i, batch, batches[0], overrides)
    if "num_loss_tokens" not in overrides:
        _check_one_collation(batches)


def _check_pair(index: int, batch: Any, first: Any, overrides: Mapping[str, Any]) -> None:
    if batch.keys() != first.keys():
        raise ValueError(f"batch {index} has fields {list(batch)}, batch 0 has {list(first)}")
    _check_models(index, batch, first)
    theirs = batch._stored().row_shapes()
    for name, shape in first._stored().row_shapes().items():
        if name in theirs and theirs[name] != shape:
            raise ValueError(
                f"{name} of batch {index} has row shape {theirs[name]}, of batch 0 {shape}; "
                "collate them together, or with fixed_width=True"
            )
    for kind in ("row_metadata", "metadata"):
        keys = [getattr(part, kind).keys() for part in (first, batch)]
        if keys[0] != keys[1]:
            odd = sorted(keys[0] ^ keys[1])
            raise ValueError(f"only one of batch 0 and batch {index} has the {kind} {odd}")
    mine, others = first.metadata, batch.metadata
    differ = {k: (v, others[k]) for k, v in mine.items() if not equal(v, others[k])}
    if "loss_mask_divisor" in differ:
        raise ValueError(
            f"loss_mask_divisor is {differ['loss_mask_divisor'][0]} in batch 0 and "
            f"{differ['loss_mask_divisor'][1]} in batch {index}, so their masks are divided by "
            "different numbers; collate them together, or with normalize_loss=False"
        )
    differ = {k: pair for k, pair in differ.items() if k not in overrides}
    if differ:
        found = ", ".join(f"metadata[{k!r}] is {a!r}, {b!r}" for k, (a, b) in differ.items())
        raise ValueError(
            f"batches 0 and {index} disagree: {found}; pass metadata={{...}} with these keys to "
            "say what the whole shall have"
        )


def _check_models(index: int, batch: Any, first: Any) -> None:
    """Images become tokens, and pixels a dtype, in one way."""
    placements = [part.placement for part in (first, batch)]
    mine, theirs = (None if of is None else of.vision for of in placements)
    if None in placements or mine == theirs:
        return
    raise ValueError(
        f"batch {index} was collated with {theirs}, batch 0 with {mine}; collate both with the "
        "processor of one model, and one pixel_dtype"
    )


def _check_one_collation(batches: Sequence[Any]) -> None:
    """Parts of one batch name different examples; batches collated apart each begin at 0."""
    owner: dict[tuple[int, int], int] = {}
    for i, batch in enumerate(batches):
        columns = [batch.row_metadata.get(key) for key in ("example_indices", "example_starts")]
        if not all(isinstance(column, Ragged) for column in columns):
            return
        for piece in zip(*(column.flat_values.tolist() for column in columns), strict=True):
            if owner.setdefault(piece, i) != i:
                raise ValueError(
                    f"batches {owner[piece]} and {i} both have an example {piece[0]}: they were "
                    "collated apart, so their num_loss_tokens is not that of the whole; collate "
                    "them together, or pass metadata={'num_loss_tokens': ...}"
                )
