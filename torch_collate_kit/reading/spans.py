"""Spans of a column: entries of examples, taken in the order of a batch's rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from torch_collate_kit.ragged import Ragged, span_indices
from torch_collate_kit.reading.numbers import Numbers, Rows

__all__ = ["are_int32_ids", "first_bad", "in_pairs", "joined", "taken", "with_row"]

_INT32_MAX = np.iinfo(np.int32).max
_SHORT_SPAN = 128  # entries on average; below it an index gather is the faster one (measured)


def joined(column: Numbers) -> Ragged:
    """The column as one flat array, in the order of the examples."""
    if isinstance(column, Ragged):
        return column
    return Ragged(np.concatenate(column.arrays), column.offsets)


def with_row(column: Numbers, row: np.ndarray) -> Numbers:
    """The column with one more row, in the dtype of its numbers."""
    if isinstance(column, Rows):
        arrays = [*column.arrays, row.astype(column.arrays[0].dtype)]
        return Rows(arrays, np.append(column.offsets, column.offsets[-1] + len(row)))
    values = np.concatenate([column.flat_values, row.astype(column.values.dtype)])
    return Ragged.from_lengths(values, np.append(column.lengths, len(row)))


def in_pairs(first: Numbers, second: Numbers) -> Ragged:
    """Row i of the one column and row i of the other as one row: int32 where both fit, or int64."""
    is_narrow = all(isinstance(of, Ragged) and are_int32_ids(of.values) for of in (first, second))
    parts: list[Any] = [None] * (2 * len(first))
    parts[::2], parts[1::2] = _rows_of(first), _rows_of(second)
    dtype = np.int32 if is_narrow else np.int64
    values = np.concatenate(parts, dtype=dtype, casting="unsafe")
    return Ragged.from_lengths(values, first.lengths + second.lengths)


def _rows_of(column: Numbers) -> list[np.ndarray]:
    if isinstance(column, Rows):
        return column.arrays
    values = column.values
    return [values[start:stop] for start, stop in pairwise(column.offsets.tolist())]


def taken(
    column: Numbers,
    examples: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    dtype: Any = None,
) -> np.ndarray:
    """The entries ``starts`` to ``starts + lengths`` of the examples, one span after the other.

    Spans are joined, or where they are short gathered by an index, which costs more per entry and
    nothing per span. The result may be a view of the column. With ``dtype``, whose range the
    entries must be known to be in, it is a copy of that dtype, made in the same pass.
    """
    if not len(examples):
        values = column.values if isinstance(column, Ragged) else column.arrays[0]
        return values[:0].astype(dtype or values.dtype)
    if isinstance(column, Rows):
        chosen = [column.arrays[i] for i in examples.tolist()]
        if starts.any() or not np.array_equal(lengths, column.lengths[examples]):
            spans_of = zip(chosen, starts.tolist(), (starts + lengths).tolist(), strict=True)
            chosen = [array[start:stop] for array, start, stop in spans_of]
        return np.concatenate(chosen, dtype=dtype, casting="unsafe")
    values, first = column.values, column.offsets[:-1][examples] + starts
    total = int(lengths.sum())
    if (
        first[-1] + lengths[-1] - first[0] == total
        and (first[1:] == first[:-1] + lengths[:-1]).all()
    ):
        run = values[first[0] : first[0] + total]
        return run if dtype is None else run.astype(dtype)
    if total < _SHORT_SPAN * len(examples):
        return values[span_indices(first, lengths)].astype(dtype or values.dtype, copy=False)
    bounds = zip(first.tolist(), (first + lengths).tolist(), strict=True)
    return np.concatenate(
        [values[start:stop] for start, stop in bounds], dtype=dtype, casting="unsafe"
    )


def first_bad(
    is_bad: np.ndarray, examples: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> tuple[int, int]:
    """The first bad one of the entries of these spans: its example, and its place there."""
    entry = int(np.flatnonzero(is_bad)[0])
    ends = np.cumsum(lengths)
    span = int(np.searchsorted(ends, entry, side="right"))
    return int(examples[span]), entry - int(ends[span] - lengths[span]) + int(starts[span])


def are_int32_ids(values: np.ndarray) -> bool:
    """Whether all of a column are ids that int32 holds."""
    if values.dtype == np.int64:  # one pass for both ends
        return not (values.view(np.uint64) > _INT32_MAX).any()
    return not values.size or (int(values.min()) >= 0 and int(values.max()) <= _INT32_MAX)
