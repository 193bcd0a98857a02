"""What every cell of some rows holds: a token, an image, padding; and which cells are trained."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from torch_collate_kit.batch.columns import Columns
from torch_collate_kit.batch.fields import IGNORE_INDEX
from torch_collate_kit.batch.storage import Storage
from torch_collate_kit.ragged import Ragged, span_indices

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


def examples_per_row(stored: Storage) -> np.ndarray | None:
    """int64 [R], the sub-sequences of each row, which are its first segments.

    None of a Batch that was built by hand without ``row_metadata["example_indices"]``.
    """
    indices = stored.row_metadata.get("example_indices")
    if isinstance(indices, Ragged):
        return indices.lengths
    if stored.columns is None:
        return None
    placement = stored.columns.placement
    has_tokens = placement.segments["lengths"].values > 0
    return np.bincount(placement.rows()[has_tokens], minlength=stored.num_rows)


def example_numbers(stored: Storage) -> np.ndarray | None:
    """``row_metadata["example_indices"]`` of all rows, one after the other; None if not known."""
    indices = stored.row_metadata.get("example_indices")
    if not isinstance(indices, Ragged) or not _is_readable(indices.values):
        return None
    return np.asarray(indices.values)


def cells_of(stored: Storage) -> Cells | None:
    """The cells of all rows; makes no dense field and waits for no device.

    None of a Batch built from dense tensors without ``input_ids`` ``[R, W]`` in host memory.

    >>> import torch
    >>> cells_of(Storage(None, {"input_ids": torch.tensor([[5, 6]])})).segments.tolist()
    [[0, 0]]
    """
    columns, counts = stored.columns, examples_per_row(stored)
    if columns is not None:
        kinds, segments = _of_columns(columns, counts)
    elif (found := _of_dense(stored.given, counts)) is not None:
        kinds, segments = found
    else:
        return None
    if columns is None or "loss_mask" in stored.given:
        return Cells(kinds, segments, _trained_by_fields(stored.given, kinds.shape))
    return Cells(kinds, segments, _trained_by_columns(columns, kinds.shape))


def _of_columns(columns: Columns, counts: Any) -> tuple[np.ndarray, np.ndarray]:
    """Kinds and segments; ``counts`` are the examples of each row."""
    placement, shape = columns.placement, (columns.num_rows, columns.placement.width)
    kinds = np.full(shape[0] * shape[1], Kind.PAD, dtype=np.uint8)
    numbers, lengths = placement.numbers(), placement.segments["lengths"].values.astype(np.int64)
    if placement.is_packed:
        first = placement.first_cells()
        sizes = np.diff(first, append=len(kinds))  # segments cover their rows
        kinds[span_indices(first + lengths, (sizes - lengths) * (lengths > 0))] = Kind.GAP
    cells = placement.cells("lengths")
    is_own = numbers < counts[placement.rows()]
    kinds[cells] = np.repeat(np.where(is_own, Kind.TOKEN, Kind.FILLER), lengths)
    ids, vision = columns.values["input_ids"].values, placement.vision
    if vision is not None and vision.image_token_id is not None and _is_readable(ids):
        images = cells[ids.numpy() == vision.image_token_id]
        kinds[images[kinds[images] == Kind.TOKEN]] = Kind.IMAGE
    segments = np.full(len(kinds), -1, dtype=np.int64)
    segments[cells] = np.repeat(numbers, lengths)
    return kinds.reshape(shape), segments.reshape(shape)


def _of_dense(given: dict[str, Any], counts: Any) -> tuple[np.ndarray, np.ndarray] | None:
    ids: Any = given.get("input_ids")
    if not _is_readable(ids) or ids.ndim != 2:
        return None
    is_token = np.ones(ids.shape, dtype=bool)
    mask: Any = given.get("attention_mask")
    if _is_readable(mask) and mask.shape == ids.shape:
        is_token = (mask != 0).numpy()
    kinds = np.where(is_token, Kind.TOKEN, Kind.PAD).astype(np.uint8)
    segments = np.zeros(ids.shape, dtype=np.int64)
    boundaries = given.get("cu_seq_lens")
    for row in range(len(ids)):
        if isinstance(boundaries, Ragged) and _is_readable(boundaries.values):
            edges = np.asarray(boundaries[row])
            segments[row] = np.searchsorted(edges[1:], np.arange(ids.shape[1]), side="right")
            has_tokens = np.isin(segments[row], segments[row][is_token[row]])
            kinds[row][has_tokens & ~is_token[row]] = Kind.GAP
        if counts is not None:
            kinds[row][is_token[row] & (segments[row] >= counts[row])] = Kind.FILLER
    return kinds, np.where(is_token, segments, -1)


def _trained_by_fields(given: dict[str, Any], shape: tuple[int, ...]) -> np.ndarray | None:
    """Cells that ``loss_mask`` weights, or those of ``labels`` where there is no mask."""
    name, ignored = ("loss_mask", 0) if "loss_mask" in given else ("labels", IGNORE_INDEX)
    values: Any = given.get(name)
    if not _is_readable(values) or values.ndim != 2 or values.shape[1] > shape[1]:
        return None
    trained = np.zeros(shape, dtype=bool)
    trained[:, shape[1] - values.shape[1] :] = (values.detach() != ignored).numpy()
    return trained


def _trained_by_columns(columns: Columns, shape: tuple[int, ...]) -> np.ndarray | None:
    if not _is_readable(columns.values[columns.target].values):
        return None
    trained = np.zeros(shape, dtype=bool)
    cells = columns.placement.cells(str(columns.specs[columns.target].count))
    trained.reshape(-1)[cells] = columns.is_trained().numpy()
    return trained


def _is_readable(values: Any) -> bool:
    """A tensor or an array in host memory."""
    return isinstance(values, np.ndarray) or (
        isinstance(values, Tensor) and values.device.type == "cpu"
    )
