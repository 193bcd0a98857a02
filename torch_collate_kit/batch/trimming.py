"""Narrower rows: padding on one side that no row needs is cut off."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit.batch.batch import Batch
from torch_collate_kit.batch.fields import Field
from torch_collate_kit.batch.placement import Placement
from torch_collate_kit.batch.storage import Storage
from torch_collate_kit.ragged import Ragged

__all__ = ["cells_per_row", "trimmed"]


def cells_per_row(batch: Batch) -> np.ndarray | None:
    """int64 [R], the cells that each row alone would be trimmed to; None without ``input_ids``.

    Packed rows, and those of a Batch that was built from dense tensors, keep their width.

    >>> import torch
    >>> cells_per_row(Batch({"input_ids": torch.zeros(2, 5, dtype=torch.int64)}))
    array([5, 5])
    """
    storage = batch.stored()
    if storage.columns is not None and not storage.columns.placement.is_packed:
        return storage.columns.placement.segments["lengths"].values.astype(np.int64)
    shape = storage.row_shapes().get("input_ids")
    return None if shape is None else np.full(len(batch), shape[0], dtype=np.int64)


def trimmed(batch: Batch, *, multiple_of: int = 1) -> Batch:
    """The same rows without the padding, left or right, that none of them needs.

    The width is that of the longest row, rounded up to ``multiple_of``, which divides the width
    that they have; ``metadata["response_length"]`` that of the longest response. Columns are
    shared, integers say where they lie now. Fields that are stored as they are (given, or changed
    in place) are cut where their rows are as wide as the rows or as the responses: views.
    """
    storage = batch.stored()
    columns = storage.columns
    if columns is None or columns.placement.is_packed:
        return batch
    before = columns.placement
    starts, lengths, responses = (
        before.segments[name].values for name in ("starts", "lengths", "responses")
    )
    width = -(-int(lengths.max()) // multiple_of) * multiple_of
    is_left_padded = bool((starts + lengths == before.width).all())
    first = before.width - width if is_left_padded else 0
    stop = first + width
    kept = before.response_length - (before.width - stop)  # columns of [R, A], up to there
    begins = (starts + lengths - responses)[responses > 0]
    longest = stop - int(begins.min(initial=stop - 1))
    if "loss_mask" in storage.given:  # it may train more than the responses
        longest = width
    response_length = max(0, min(longest, kept, width - 1))  # nothing predicts the first cell

    def moved(name: str, of: Any) -> Any:
        return Ragged(of.values - first, of.offsets) if name == "starts" else of

    cells, of_responses = slice(first, stop), slice(kept - response_length, kept)
    sizes = {"width": width, "response_length": response_length}
    storage = Storage(
        columns.change(lambda _, column: column, moved, **sizes),
        {k: _cut(k, field, before, cells, of_responses) for k, field in storage.given.items()},
        storage.row_metadata,
        {**storage.metadata, "response_length": response_length},
    )
    return Batch.of_storage(storage)


def _cut(name: str, field: Field, before: Placement, cells: slice, of_responses: slice) -> Field:
    if not isinstance(field, Tensor) or field.ndim < 2:
        return field
    if name == "mrope_position_ids":  # [R, 4, W]
        return field[..., cells]
    if field.shape[1] == before.width:
        return field[:, cells]
    return field[:, of_responses] if field.shape[1] == before.response_length else field
