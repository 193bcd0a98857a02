"""Columns of lists, of numbers, vectors or segments, of Arrow or NumPy chunks, read in place."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Nested, Ragged, span_indices, unchecked

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]

# In their methods ``rows`` are rows of the column, and ``named`` is what errors call them.


class ListColumn:
    """Column of lists: per chunk the flat values, and where the rows start in them."""

    def __init__(self, name: str, dtype: Any, chunks: Iterable[Any]) -> None:
        self.name = name
        self.dtype = np.dtype(dtype)
        self._values: list[memoryview] = []
        self._offsets: list[memoryview] = []
        self._suspects: dict[int, pa.Array] = {}  # chunks with a null somewhere
        self._is_in_bits = False  # Arrow booleans, eight in a byte, of which offsets count bits
        counts = [0]
        for chunk in chunks:
            if len(chunk):  # Arrow may leave the buffers of an empty chunk out
                is_ragged = isinstance(chunk, Ragged)
                of = (chunk.offsets, chunk.values) if is_ragged else self._of_arrow(chunk)
                self._offsets.append(of[0].data)
                self._values.append(of[1].data.toreadonly())
                counts.append(len(chunk))
        self._starts = np.cumsum(counts)  # int64 [chunks + 1], the first row of each

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _of_arrow(self, chunk: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Return where the lists of a chunk start in the buffer of its values, and this buffer."""
        values = chunk.values  # not flatten(): with one null row it copies the whole chunk
        offsets = _outer_offsets(chunk)
        if chunk.null_count or _has_null(values, "values"):
            self._suspects[len(self._values)] = chunk
        self._is_in_bits = self.dtype == np.bool_
        dtype = np.dtype(np.uint8) if self._is_in_bits else self.dtype
        data = memoryview(values.buffers()[-1] or b"")  # None: only empty lists
        data = data[: len(data) // dtype.itemsize * dtype.itemsize]
        # not to_numpy(), since what lies under a null is arbitrary
        return offsets + values.offset if values.offset else offsets, np.frombuffer(data, dtype)

    def _places(
        self, rows: np.ndarray, named: np.ndarray, *, look_inside: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return chunk and row in it, for every row; a null row, or a null in one, is an error."""
        if len(self._offsets) == 1:
            chunks = np.zeros(len(rows), dtype=np.int64)
        else:
            chunks = np.searchsorted(self._starts, rows, side="right") - 1
            rows = rows - self._starts[chunks]
        if self._suspects:
            for i, chunk, row in zip(named.tolist(), chunks.tolist(), rows.tolist(), strict=True):
                if chunk in self._suspects:
                    entry = self._suspects[chunk][row]
                    if not entry.is_valid or (look_inside and _has_null(entry.values, "flatten")):
                        raise null_error(self.name, i)
        return chunks, rows

    def lengths(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Return int64 lengths of all or the given rows from offsets; a null row is an error."""
        lengths = self.lengths_or_null()
        lengths = lengths if rows is None else lengths[rows]
        if (lengths < 0).any():
            raise null_error(self.name, int(np.flatnonzero(lengths < 0)[0]))
        return lengths

    def lengths_or_null(self) -> np.ndarray:
        """Return int64 lengths of all rows from offsets, -1 of a null row."""
        parts = [np.diff(np.asarray(offsets)) for offsets in self._offsets]
        lengths = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        for i, chunk in self._suspects.items():
            lengths[self._starts[i] + np.flatnonzero(chunk.is_null())] = -1
        return lengths

    def row(self, row: np.ndarray, named: np.ndarray) -> np.ndarray:
        """Return the one row, a read-only view (of Arrow booleans a copy)."""
        if self._is_in_bits:
            return np.asarray(self.take(row, named).values)
        chunks, row = self._places(row, named)
        starts, stops = self._bounds(chunks, row)
        return np.frombuffer(self._values[chunks[0]][starts[0] : stops[0]], dtype=self.dtype)

    def lengths_at(self, rows: np.ndarray, named: np.ndarray) -> np.ndarray:
        """Return int64 lengths of the given rows alone; reads no token."""
        starts, stops = self._bounds(*self._places(rows, named, look_inside=False))
        return (stops - starts).astype(np.int64)

    def take(self, rows: np.ndarray, named: np.ndarray) -> Ragged:
        """Return the rows, copied end to end."""
        chunks, rows = self._places(rows, named)
        starts, stops = self._bounds(chunks, rows)
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(stops - starts, out=offsets[1:])
        return unchecked(self._copied(chunks, starts, stops), offsets)

    def _bounds(self, chunks: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where the rows start and stop in the values of their chunk."""
        if len(self._offsets) == 1:
            offsets = np.asarray(self._offsets[0])
            return offsets[rows], offsets[rows + 1]
        kind = self._offsets[0].format if self._offsets else "q"
        pairs = _joined(self._offsets, chunks, rows, rows + 2, kind).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def _copied(self, chunks: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Copy these spans of the values of chunks, one after the other."""
        if self._is_in_bits:
            return self._bools(chunks, starts, stops)
        return _joined(self._values, chunks, starts, stops, self.dtype)

    def _bools(self, chunks: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Copy the bytes that hold the rows, unpack them at once, and return the rows."""
        first, stop = starts >> 3, (stops + 7) >> 3
        packed = _joined(self._values, chunks, first, stop, np.uint8)
        bits = np.unpackbits(packed, bitorder="little").data
        shifts = 8 * (np.cumsum(stop - first) - stop)  # from the buffer to what was copied
        return _joined([bits], np.zeros_like(chunks), starts + shifts, stops + shifts, np.bool_)


class VectorColumn:
    """Column of lists of vectors, such as a teacher's top-k: all that is read have one size."""

    def __init__(self, name: str, dtype: Any, chunks: Iterable[Any]) -> None:
        self._shape: tuple[int, ...] | None = None  # of every vector; None: Arrow lists of any size
        self._edges: list[memoryview] = []  # of such lists: per chunk, where each starts
        self._first: list[int] = []  # per chunk, the place of its first number in its buffer
        flat = []
        for chunk in filter(len, chunks):
            if isinstance(chunk, Ragged):
                self._shape = chunk.values.shape[1:]
                flat.append(unchecked(chunk.values.reshape(-1), chunk.offsets))
                self._first.append(0)
                continue
            vectors = chunk.values
            if (size := getattr(vectors.type, "list_size", None)) is not None:
                self._shape = (size,)
            else:
                kind = np.int64 if str(vectors.type).startswith("large_list") else np.int32
                self._edges.append(np.frombuffer(vectors.buffers()[1] or bytes(8), kind).data)
            flat.append(chunk)
            self._first.append(vectors.values.offset)
        self._numbers = ListColumn(name, dtype, flat)  # whose rows are in vectors

    def take(self, rows: np.ndarray, named: np.ndarray) -> Ragged:
        """Return the rows, copied end to end: values ``[T, k]``."""
        chunks, rows = self._numbers._places(rows, named)
        starts, stops = self._numbers._bounds(chunks, rows)
        lengths, shape = (stops - starts).astype(np.int64), self._shape
        if shape is None:
            starts, stops, shape = self._even(chunks, starts, lengths, named)
        else:
            starts, stops = starts * math.prod(shape), stops * math.prod(shape)
        first = np.array(self._first, dtype=np.int64)[chunks]
        values = self._numbers._copied(chunks, starts + first, stops + first)
        return Ragged.from_lengths(values.reshape(-1, *shape), lengths)

    def _even(
        self, chunks: np.ndarray, starts: np.ndarray, lengths: np.ndarray, named: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, tuple[int]]:
        """Return where the numbers of rows start and stop, and the one shape of their vectors."""
        kind = self._edges[0].format if self._edges else "q"
        edges = _joined(self._edges, chunks, starts, starts + lengths + 1, kind).astype(np.int64)
        ends = np.cumsum(lengths + 1)
        sizes = np.delete(np.diff(edges), ends[:-1] - 1)  # but those from row to row
        size = int(sizes[0]) if len(sizes) else 1
        is_odd = (sizes != size) | (sizes == 0)
        if is_odd.any():
            token = int(is_odd.argmax())
            row = int(np.searchsorted(np.cumsum(lengths), token, side="right"))
            raise DataError(
                f"row {named[row]}: {self._numbers.name}[{token - lengths[:row].sum()}] has "
                f"{sizes[token]} numbers, the first token that was read has {size}; give every "
                "token the same number, at least one"
            )
        return edges[ends - lengths - 1], edges[ends - 1], (size,)


class NestedColumn:
    """Column of lists of segments: a column of all segments, and where those of a row begin."""

    def __init__(
        self, name: str, dtype: Any, chunks: Iterable[Any], *, of_vectors: bool = False
    ) -> None:
        self.name, self.dtype = name, np.dtype(dtype)
        inner, offsets, total = [], [np.zeros(1, dtype=np.int64)], 0
        nulls = []
        for chunk in chunks:
            if isinstance(chunk, Nested):
                rows, own = chunk.rows, chunk.offsets
            else:
                own = _outer_offsets(chunk).astype(np.int64)  # of all chunks they may be more
                rows = chunk.values.slice(own[0], own[-1] - own[0])
                if chunk.null_count:
                    first = sum(map(len, offsets)) - 1
                    nulls.append(first + np.flatnonzero(chunk.is_null()))
            inner.append(rows)
            offsets.append(own[1:] - own[0] + total)
            total += len(rows)
        self._inner = (VectorColumn if of_vectors else ListColumn)(name, dtype, inner)
        self._offsets: np.ndarray = np.concatenate(offsets)
        self._nulls = np.concatenate(nulls) if nulls else np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def lengths(self, rows: np.ndarray | None = None) -> Ragged:
        """Return int64 lengths of the inner lists of all or the given rows, from offsets."""
        assert isinstance(self._inner, ListColumn)  # of ids
        found = Ragged(self._inner.lengths_or_null(), self._offsets)
        null_segments = np.flatnonzero(found.values < 0)
        with_null = np.searchsorted(self._offsets, null_segments, side="right") - 1
        if len(nulls := np.append(self._nulls, with_null)):
            is_null = np.isin(np.arange(len(self)) if rows is None else rows, nulls)
            if is_null.any():
                raise null_error(self.name, int(is_null.argmax()))
        return found if rows is None else found.take(rows)

    def row(self, row: np.ndarray, named: np.ndarray) -> list[np.ndarray]:
        """Return the inner lists of one row."""
        return [*self.take(row, named).rows]

    def lengths_at(self, rows: np.ndarray, named: np.ndarray) -> Ragged:
        """Return int64 lengths of the inner lists of the given rows alone; reads no token."""
        assert isinstance(self._inner, ListColumn)
        inner, counts = self._inner_rows(rows, named)
        lengths = self._inner.lengths_at(inner, np.repeat(named, counts))
        return Ragged.from_lengths(lengths, counts)

    def take(self, rows: np.ndarray, named: np.ndarray) -> Nested:
        """Return the rows, copied end to end."""
        inner, counts = self._inner_rows(rows, named)
        taken = self._inner.take(inner, np.repeat(named, counts))
        return Nested(taken, np.append(0, np.cumsum(counts)))

    def _inner_rows(self, rows: np.ndarray, named: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        is_null = np.isin(rows, self._nulls)
        if is_null.any():
            raise null_error(self.name, int(named[is_null.argmax()]))
        counts = self._offsets[rows + 1] - self._offsets[rows]
        return span_indices(self._offsets[rows], counts), counts


def _outer_offsets(chunk: pa.Array) -> np.ndarray:
    """Return where the lists of a chunk begin in its values, which ignore that it is a slice."""
    width = getattr(chunk.type, "list_size", None)
    if width is None:
        return np.asarray(chunk.offsets.to_numpy())
    return np.arange(chunk.offset, chunk.offset + len(chunk) + 1) * width


def _joined(
    values: list[Any], chunks: np.ndarray, starts: np.ndarray, stops: np.ndarray, dtype: Any
) -> np.ndarray:
    """Join spans of ``values``: memoryviews take half the time of ndarrays."""
    # At most 128 at a time: with 700 of them alive the garbage collector would start, which in a
    # process with many objects takes longer than all the copying.
    one = len(values) == 1
    views = repeat(values[0], len(chunks)) if one else map(values.__getitem__, chunks.tolist())
    spans = zip(views, starts.tolist(), stops.tolist(), strict=True)
    if len(chunks) <= 256:  # one copy
        return np.frombuffer(bytearray().join([view[i:j] for view, i, j in spans]), dtype=dtype)
    joined = []
    while parts := [view[start:stop] for view, start, stop in islice(spans, 128)]:
        joined.append(b"".join(parts))
    return np.frombuffer(bytearray().join(joined), dtype=dtype)


def _has_null(values: Any, inner: str) -> bool:
    """Return whether numbers or vectors of numbers hold a null; ``inner`` leads to the numbers."""
    numbers = getattr(values, inner, values)
    return bool(values.null_count or (numbers() if callable(numbers) else numbers).null_count)


def null_error(name: str, row: int) -> DataError:
    """Return the error for a null in a row of a column."""
    return DataError(
        f"row {row}: {name} is null or holds a null; drop the row, or fill it in before training"
    )
