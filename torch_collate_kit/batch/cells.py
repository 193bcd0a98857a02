"""What every cell of some rows holds: a token, an image, padding; and which cells are trained."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from torch_collate_kit.batch.fields import IGNORE_INDEX
from torch_collate_kit.ragged import Ragged, span_indices

if TYPE_CHECKING:
    from torch_collate_kit.batch.batch import Batch

__all__ = ["Cells", "Kind", "cells_of", "example_numbers", "examples_per_row"]


class Kind(IntEnum):
    """What a cell holds."""

    TOKEN = 0
    IMAGE = 1
    FILLER = 2
    GAP = 3
    PAD = 4


class Cells(NamedTuple):
    """The cells of R rows, W wide; arrays in host memory."""

    kinds: np.ndarray
    """uint8 [R, W]: TOKEN, IMAGE (a placeholder), FILLER (a token of no example), GAP or PAD.

    Fillers are the tokens of rows that fill up a batch, and of dummy images.
    """
    segments: np.ndarray
    """int64 [R, W]: the segment of the row that a token belongs to; -1 where there is none."""
    trained: np.ndarray | None
    """bool [R, W]; None where that is not known without waiting for a device."""


def examples_per_row(batch: Batch) -> np.ndarray | None:
    """int64 [R], the sub-sequences of each row, which are its first segments.

    None of a Batch that was built by hand without ``row_metadata["example_indices"]``.
    """
    indices = batch.row_metadata.get("example_indices")
    if isinstance(indices, Ragged):
        return indices.lengths
    if batch.placement is None:
        return None
    lengths = batch.placement.segments["lengths"]
    before = np.append(0, np.cumsum(lengths.flat_values > 0))
    return np.diff(before[lengths.offsets - lengths.offsets[0]])


def example_numbers(batch: Batch) -> np.ndarray | None:
    """``row_metadata["example_indices"]`` of all rows, one after the other; None if not known."""
    indices = batch.row_metadata.get("example_indices")
    if not isinstance(indices, Ragged) or not _is_readable(indices.values):
        return None
    return np.asarray(indices.flat_values)


def cells_of(batch: Batch) -> Cells | None:
    """The cells of all rows; makes no dense field and waits for no device.

    None of a Batch built from dense tensors without ``input_ids`` ``[R, W]`` in host memory.

    >>> import torch
    >>> from torch_collate_kit.batch import Batch
    >>> cells_of(Batch({"input_ids": torch.tensor([[5, 6]])})).segments.tolist()
    [[0, 0]]
    """
    cells = _of_dense(batch) if batch.placement is None else _of_columns(batch)
    if cells is None:
        return None
    return cells._replace(trained=_trained(batch, cells.kinds.shape))


def _of_columns(batch: Batch) -> Cells:
    placement: Any = batch.placement
    num_rows, width = len(batch), placement.width
    rows, numbers, first, lengths = _segments(batch)
    kinds = np.full(num_rows * width, Kind.PAD, dtype=np.uint8)
    if placement.is_packed:
        ends = np.append(first[1:], num_rows * width)  # segments cover their rows
        kinds[span_indices(first + lengths, (ends - first - lengths) * (lengths > 0))] = Kind.GAP
    cells = span_indices(first, lengths)
    counts: Any = examples_per_row(batch)
    kinds[cells] = np.repeat(np.where(numbers < counts[rows], Kind.TOKEN, Kind.FILLER), lengths)
    ids: Any = batch.column("input_ids")
    vision = placement.vision
    if vision is not None and vision.image_token_id is not None and _is_readable(ids):
        images = cells[ids.numpy() == vision.image_token_id]
        kinds[images[kinds[images] == Kind.TOKEN]] = Kind.IMAGE
    segments = np.full(num_rows * width, -1, dtype=np.int64)
    segments[cells] = np.repeat(numbers, lengths)
    return Cells(kinds.reshape(num_rows, width), segments.reshape(num_rows, width), None)


def _segments(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Row, number in it, first cell over all rows and tokens of each segment: int64 [Q]."""
    placement: Any = batch.placement
    starts, lengths = (placement.segments[name] for name in ("starts", "lengths"))
    rows = np.repeat(np.arange(len(starts)), starts.lengths)
    numbers = np.arange(len(rows)) - (starts.offsets - starts.offsets[0])[rows]
    first = rows * placement.width + starts.flat_values
    return rows, numbers, first, lengths.flat_values.astype(np.int64)


def _of_dense(batch: Batch) -> Cells | None:
    given: dict[str, Any] = batch._stored().given
    ids: Any = given.get("input_ids")
    if not _is_readable(ids) or ids.ndim != 2:
        return None
    is_token = np.ones(ids.shape, dtype=bool)
    mask: Any = given.get("attention_mask")
    if _is_readable(mask) and mask.shape == ids.shape:
        is_token = (mask != 0).numpy()
    kinds = np.where(is_token, Kind.TOKEN, Kind.PAD).astype(np.uint8)
    segments = np.zeros(ids.shape, dtype=np.int64)
    boundaries, counts = given.get("cu_seq_lens"), examples_per_row(batch)
    for row in range(len(batch)):
        if isinstance(boundaries, Ragged) and _is_readable(boundaries.values):
            edges = np.asarray(boundaries[row])
            segments[row] = np.searchsorted(edges[1:], np.arange(ids.shape[1]), side="right")
            has_tokens = np.isin(segments[row], segments[row][is_token[row]])
            kinds[row][has_tokens & ~is_token[row]] = Kind.GAP
        if counts is not None:
            kinds[row][is_token[row] & (segments[row] >= counts[row])] = Kind.FILLER
    return Cells(kinds, np.where(is_token, segments, -1), None)


def _trained(batch: Batch, shape: tuple[int, ...]) -> np.ndarray | None:
    """Cells that ``loss_mask`` weights, or those of ``labels`` where there is no mask."""
    columns = batch._stored().columns
    given: dict[str, Any] = batch._stored().given
    trained = np.zeros(shape, dtype=bool)
    if columns is None or "loss_mask" in given:
        name = "loss_mask" if "loss_mask" in given else "labels"
        values: Any = given.get(name)
        if not _is_readable(values) or values.ndim != 2 or values.shape[1] > shape[1]:
            return None
        ignored = 0 if name == "loss_mask" else IGNORE_INDEX
        trained[:, shape[1] - values.shape[1] :] = (values.detach() != ignored).numpy()
        return trained
    name = "labels" if "labels" in columns.values else "loss_weights"
    column = columns.values.get(name)
    if column is None or not _is_readable(column.values):
        return None
    _, _, first, lengths = _segments(batch)
    count = str(columns.specs[name].count)
    counted = columns.placement.segments[count].flat_values.astype(np.int64)
    cells = span_indices(first + lengths - counted, counted)
    is_trained = column.flat_values != (IGNORE_INDEX if name == "labels" else 0)
    trained.reshape(-1)[cells] = is_trained.numpy()
    return trained


def _is_readable(values: Any) -> bool:
    """A tensor or an array in host memory."""
    return isinstance(values, np.ndarray) or (
        isinstance(values, Tensor) and values.device.type == "cpu"
    )
