"""Narrower rows: padding on one side that no row needs is cut off."""

from __future__ import annotations

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
    starts, lengths = (before.segments[k].values for k in ("starts", "lengths"))
    width = -(-int(lengths.max()) // multiple_of) * multiple_of
    is_left_padded = bool((starts + lengths == before.width).all())
    first = before.width - width if is_left_padded else 0
    response_length = _response_length(before, first, first + width)
    if "loss_mask" in storage.given:  # it may train more than the responses
        kept = before.response_length - before.width + first + width
        response_length = max(0, min(kept, width - 1))
    return Batch.of_storage(
        Storage(
            columns.change(
                lambda _, column: column,
                lambda name, of: _begun_at(first, of) if name == "starts" else of,
                width=width,
                response_length=response_length,
            ),
            {
                name: field[..., first : first + width]  # [R, 4, W]
                if name == "mrope_position_ids" and isinstance(field, Tensor)
                else _cut(field, before, first, width, response_length)
                for name, field in storage.given.items()
            },
            storage.row_metadata,
            {**storage.metadata, "response_length": response_length},
        )
    )


def _response_length(placement: Placement, first: int, stop: int) -> int:
    """Of the cells ``first`` to ``stop``, the number from the first response token on.

    At most what remains of the old one, and one cell fewer than there are, as nothing predicts the
    first.
    """
    segments = {name: of.values for name, of in placement.segments.items()}
    responds = segments["responses"] > 0
    begins = (segments["starts"] + segments["lengths"] - segments["responses"])[responds]
    longest = stop - int(begins.min(initial=stop - 1))
    kept = placement.response_length - (placement.width - stop)
    return max(0, min(longest, kept, stop - first - 1))


def _begun_at(first: int, starts: Ragged) -> Ragged:
    return Ragged(starts.values - first, starts.offsets)


def _cut(field: Field, before: Placement, first: int, width: int, response_length: int) -> Field:
    if not isinstance(field, Tensor) or field.ndim < 2:
        return field
    if field.shape[1] == before.width:
        return field[:, first : first + width]
    if field.shape[1] == before.response_length:
        stop = before.response_length - (before.width - first - width)
        return field[:, stop - response_length : stop]
    return field
