"""The ragged type: rows of different lengths in one flat array, with offsets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.ma import MaskedArray
from torch import Tensor

__all__ = ["Nested", "Ragged"]

SHORT_SPAN = 100  # entries on average; below it an index gather is the faster one (measured)


def row_indices(indices: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
    """Return row numbers as int64; refuse booleans and floats, which would become integers."""
    picked = np.asarray(indices)
    if picked.size and picked.dtype.kind not in "iu":
        raise TypeError(
            f"row indices must be integers, got {picked.dtype}; for a mask pass mask.nonzero()"
        )
    return picked.astype(np.int64, copy=False)


def span_indices(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the indices of spans, ``starts[0], starts[0] + 1, ...``, in turn: int64 [T]."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def take_spans(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Copy ``values[start:start + length]`` of every span, one after the other.

    Spans are copied between memoryviews, which take three quarters of the time of joining ndarrays.
    Short ones are gathered by an index, which costs more per entry and nothing per span.
    """
    total, size = int(lengths.sum()), math.prod(values.shape[1:])
    if values.ndim > 1 and values.flags.c_contiguous and total * size >= SHORT_SPAN * len(starts):
        flat = take_spans(values.reshape(-1), starts * size, lengths * size)
        return flat.reshape(total, *values.shape[1:])
    has_view = values.ndim == 1 and values.dtype.kind in "biuf" and values.dtype.isnative
    if not has_view or total < SHORT_SPAN * len(starts):
        return values[span_indices(starts, lengths)]
    taken = np.empty(total, dtype=values.dtype)
    source, room, end = values.data, taken.data, 0
    for start, stop in zip(starts.tolist(), (starts + lengths).tolist(), strict=True):
        begin, end = end, end + stop - start
        room[begin:end] = source[start:stop]
    return taken


class Ragged:
    """Rows of different lengths: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``.

    ``values`` is an ndarray or tensor ``[T, ...]``, which is not copied. ``offsets`` is always a
    NumPy int64 array ``[N + 1]`` in host memory: it holds the shape of the data, and reading a
    shape must never wait for a device. Values that no row holds are left out, so offsets begin at
    0 and end at ``T``, also in a slice. Treat both as read-only.

    Rows and row slices are views; :meth:`take`, :meth:`cat` and :meth:`from_rows` copy.

    Raises:
        TypeError: values that are neither an ndarray nor a dense tensor; a masked array.
        ValueError: offsets that decrease or lie outside ``0..T``.

    >>> ragged = Ragged.from_rows([[1, 2, 3], [4], []])
    >>> ragged[0]
    array([1, 2, 3])
    >>> ragged.lengths.tolist(), len(ragged), ragged[1:].tolist()
    ([3, 1, 0], 3, [[4], []])
    """

    __slots__ = ("offsets", "values")

    def __init__(self, values: np.ndarray | Tensor, offsets: np.ndarray | Sequence[int]) -> None:
        if not isinstance(values, np.ndarray | Tensor):
            raise TypeError(
                f"values must be an ndarray or a tensor, got {type(values).__name__}; for rows "
                "that are lists use Ragged.from_rows"
            )
        if isinstance(values, MaskedArray):
            raise TypeError("values are a masked array, whose mask would be lost; pass .filled(0)")
        if isinstance(values, Tensor) and (values.layout is not torch.strided or values.is_nested):
            raise TypeError(
                f"values must be dense and flat, got a tensor of layout {values.layout}; pass "
                ".to_dense(), or .values() of a jagged tensor"
            )
        given = np.asarray(offsets)
        if given.ndim != 1 or len(given) == 0 or given.dtype.kind not in "iu":
            raise ValueError(
                f"offsets must be one-dimensional integers with one entry more than there are "
                f"rows, got {given.dtype} of shape {given.shape}; for one row pass [0, len(values)]"
            )
        checked = given.astype(np.int64, copy=False)
        first, last, size = int(checked[0]), int(checked[-1]), len(values)
        if first < 0 or last > size or (checked[1:] < checked[:-1]).any():
            raise ValueError(
                f"offsets must not decrease and must lie within 0..{size} (the values), got "
                f"{checked[:8].tolist()}{'...' if len(given) > 8 else ''}; they are the "
                "cumulative lengths with a leading 0"
            )
        self.values: Any = values if last - first == size else values[first:last]
        self.offsets = checked - first if first else checked

    @classmethod
    def from_rows(cls, rows: Iterable[Any], dtype: Any = None) -> Ragged:
        """Copy rows, lists, ndarrays or CPU tensors, into one flat NumPy array."""
        arrays = []
        for i, row in enumerate(rows):
            if isinstance(row, MaskedArray):
                raise TypeError(
                    f"row {i} is a masked array, whose mask would be lost; pass .compressed()"
                )
            arrays.append(np.asarray(row, dtype=dtype))
        filled = [array for array in arrays if len(array)]
        empty = np.empty(0, dtype=np.int64 if dtype is None else dtype)
        values = np.concatenate(filled) if filled else empty
        return cls.from_lengths(values, [len(array) for array in arrays])

    @classmethod
    def from_lengths(
        cls, values: np.ndarray | Tensor, lengths: np.ndarray | Sequence[int]
    ) -> Ragged:
        """Return a view of ``values`` as consecutive rows of the given lengths."""
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(values, offsets)

    @classmethod
    def cat(cls, parts: Sequence[Ragged]) -> Ragged:
        """Join the rows of all parts, one after the other; values are copied."""
        if not parts:
            raise ValueError("Ragged.cat needs at least one part, got none; pass a Ragged or more")
        flat = [part.values for part in parts]
        if len({values.shape[1:] for values in flat}) > 1:  # no entry, no shape
            flat = [values for values in flat if len(values)]
        values = torch.cat(flat) if isinstance(flat[0], Tensor) else np.concatenate(flat)
        return cls.from_lengths(values, np.concatenate([part.lengths for part in parts]))

    @property
    def lengths(self) -> np.ndarray:
        """Row lengths: int64 [N], a new array."""
        return self.offsets[1:] - self.offsets[:-1]  # ten times less overhead than np.diff

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return self.take(np.arange(start, stop, step))
            offsets = self.offsets[start : max(start, stop) + 1]
            return unchecked(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of a Ragged with {len(self)} rows")
        index = index % len(self)
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[Any]:
        offsets = self.offsets.tolist()
        return map(self.values.__getitem__, map(slice, offsets[:-1], offsets[1:]))

    def take(self, indices: Sequence[int] | np.ndarray) -> Ragged:
        """Copy the rows at ``indices``, in that order."""
        picked = row_indices(indices)
        lengths, starts = self.lengths[picked], self.offsets[:-1][picked]
        values = self.values
        if isinstance(values, np.ndarray):
            return Ragged.from_lengths(take_spans(values, starts, lengths), lengths)
        cells = torch.from_numpy(span_indices(starts, lengths))
        on_device = cells.to(values.device, non_blocking=True)
        return Ragged.from_lengths(values[on_device], lengths)

    def to(self, device: Any, *, non_blocking: bool = False) -> Ragged:
        """Return the same rows with tensor values on ``device``; offsets stay in host memory."""
        values = torch.as_tensor(self.values).to(device, non_blocking=non_blocking)
        return Ragged(values, self.offsets)

    def __reduce__(self) -> tuple[Any, ...]:
        values = self.values  # a slice must not pickle the values of other rows
        if isinstance(values, Tensor) and values.nbytes < values.untyped_storage().nbytes():
            values = values.clone()
        return Ragged, (values, self.offsets)

    def tolist(self) -> list[list[Any]]:
        """Return every row as a Python list."""
        return [row.tolist() for row in self]

    def __eq__(self, other: object) -> bool:
        """Compare row lengths and values; the dtype does not matter."""
        if not isinstance(other, Ragged):
            return NotImplemented
        if not np.array_equal(self.lengths, other.lengths):
            return False
        mine, theirs = torch.as_tensor(self.values), torch.as_tensor(other.values)
        return torch.equal(mine.cpu(), theirs.cpu())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, {len(self.values)} values, {self.values.dtype})"


class Nested:
    """Rows of rows: row ``i`` is the Ragged ``rows[offsets[i]:offsets[i + 1]]``.

    Such as the segments of every example. Row slices are views, :meth:`take` copies.

    >>> segments = Nested(Ragged.from_rows([[1, 2], [3], [4, 5]]), np.array([0, 2, 3]))
    >>> segments.tolist(), segments.take([1])[0].tolist()
    ([[[1, 2], [3]], [[4, 5]]], [[4, 5]])
    """

    __slots__ = ("offsets", "rows")

    def __init__(self, rows: Ragged, offsets: np.ndarray) -> None:
        self.rows, self.offsets = rows, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return self.take(np.arange(start, stop, step))
            offsets = self.offsets[start : max(start, stop) + 1]
            return Nested(self.rows[offsets[0] : offsets[-1]], offsets - offsets[0])
        index = range(len(self))[index]
        return self.rows[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    def take(self, indices: Sequence[int] | np.ndarray) -> Nested:
        """Copy the rows at ``indices``, in that order."""
        picked = row_indices(indices)
        counts = np.diff(self.offsets)[picked]
        rows = self.rows.take(span_indices(self.offsets[:-1][picked], counts))
        return Nested(rows, np.append(0, np.cumsum(counts)))

    def tolist(self) -> list[list[list[Any]]]:
        """Return every row as a Python list of lists."""
        return [row.tolist() for row in self]

    def __eq__(self, other: object) -> bool:
        """Compare the numbers of rows, their lengths and values."""
        if not isinstance(other, Nested):
            return NotImplemented
        return np.array_equal(self.offsets, other.offsets) and self.rows == other.rows

    def __repr__(self) -> str:
        return f"Nested({len(self)} rows of {len(self.rows)} rows)"


def unchecked(values: np.ndarray | Tensor, offsets: np.ndarray) -> Ragged:
    """Return a Ragged of offsets that are int64, begin at 0 and end at ``len(values)``: a view.

    The checks of ``Ragged(values, offsets)`` take as long as moving ten thousand tokens.
    """
    ragged = object.__new__(Ragged)
    ragged.values, ragged.offsets = values, offsets
    return ragged
