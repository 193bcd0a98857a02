"""Columns of Arrow or NumPy chunks, read in place: lists, numbers, texts, arrays of processors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Nested, Ragged, span_indices, unchecked
from torch_collate_kit.reading.keys import KNOWN
from torch_collate_kit.vision.families import IMAGE_FIELDS

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

    def _places(self, rows: np.ndarray, named: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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
                    if not entry.is_valid or _has_null(entry.values, "flatten"):
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

    def __init__(self, name: str, dtype: Any, chunks: Any, *, of_vectors: bool = False) -> None:
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


class NumberColumn:
    """Column of one number per row, such as ``num_actions``."""

    def __init__(self, name: str, dtype: Any, column: np.ndarray | pa.ChunkedArray) -> None:
        self.name = name
        self._dtype = np.dtype(np.int64 if np.dtype(dtype).kind in "iu" else dtype)
        self._is_null: np.ndarray | None = None
        if not isinstance(column, np.ndarray):
            if column.null_count:
                import pyarrow as pa

                self._is_null = column.is_null().to_numpy()
                filler = np.dtype(dtype).type().item()
                column = column.cast(pa.from_numpy_dtype(dtype)).fill_null(filler)
            column = column.to_numpy()
        self._values = column

    def take(self, rows: np.ndarray, named: np.ndarray) -> np.ndarray:
        """Return the rows: a copy."""
        if self._is_null is not None and self._is_null[rows].any():
            raise null_error(self.name, int(named[self._is_null[rows].argmax()]))
        return self._values[rows].astype(self._dtype, copy=False)


class TextColumn:
    """Column of one string per row, such as a declared name."""

    def __init__(self, name: str, column: pa.ChunkedArray | list[str]) -> None:
        self.name, self._column = name, column

    def take(self, rows: np.ndarray, named: np.ndarray) -> list[str]:
        """Return the rows as Python strings."""
        texts = [self._column[row] for row in rows.tolist()]
        if isinstance(self._column, list):
            return texts
        texts = [text.as_py() for text in texts]
        if None in texts:
            raise null_error(self.name, int(named[texts.index(None)]))
        return texts


class ArrayColumn:
    """Column of nested lists or nulls; a null is an example without an image."""

    def __init__(self, name: str, column: pa.ChunkedArray | list[np.ndarray | None]) -> None:
        self.name = name
        self._chunks: list[Any] = [column]
        if not isinstance(column, list):  # datasets.Array2D and its kind extend lists
            self._chunks = [getattr(chunk, "storage", chunk) for chunk in column.chunks]
        self._starts = np.cumsum([0, *map(len, self._chunks)])

    def take(self, rows: np.ndarray, named: np.ndarray) -> list[np.ndarray | None]:
        """Return the rows, views where Arrow allows them."""
        chunks = np.searchsorted(self._starts, rows, side="right") - 1
        places = (chunks.tolist(), (rows - self._starts[chunks]).tolist(), named.tolist())
        return [
            held[row]
            if isinstance(held := self._chunks[chunk], list)
            else _to_numpy(self.name, i, held.slice(row, 1))
            for chunk, row, i in zip(*places, strict=True)
        ]

    def outer_lengths(self) -> np.ndarray:
        """Return int64 [N], the first dimension of every row, 0 for a null; reads no number."""
        parts = [np.empty(0, dtype=np.int64)]
        for chunk in self._chunks:
            if isinstance(chunk, list):
                parts.append(np.array([0 if row is None else len(row) for row in chunk]))
            elif chunk.null_count == len(chunk):  # its type may be null, without lengths
                parts.append(np.zeros(len(chunk), dtype=np.int64))
            else:
                lengths = chunk.value_lengths().fill_null(0)
                parts.append(lengths.to_numpy(zero_copy_only=False).astype(np.int64))
        return np.concatenate(parts)


def _to_numpy(name: str, row: int, lists: Any) -> np.ndarray | None:
    """Return one list of nested lists as an array."""
    if lists.null_count:
        return None
    shape: list[int] = []
    while hasattr(lists, "flatten") and hasattr(lists, "value_lengths"):
        lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
        if len(lengths) and (lengths != lengths[0]).any():
            raise DataError(
                f"row {row}: {name} holds lists of different lengths, {sorted({*lengths.tolist()})}"
                f" at dimension {len(shape)}; an image field is an array: store it as one"
            )
        shape.append(int(lengths[0]) if len(lengths) else 0)
        lists = lists.flatten()
    if lists.null_count:
        raise DataError(f"row {row}: {name} holds a null; drop the row, or process it again")
    array: np.ndarray = lists.to_numpy(zero_copy_only=False).reshape(shape)
    return array


AnyColumn = ListColumn | VectorColumn | NestedColumn | NumberColumn | ArrayColumn | TextColumn


def column_of(name: str, column: Any, *, of_segments: bool) -> AnyColumn:
    """Return the column for a Ragged, a Nested, an ndarray, strings or an Arrow column.

    Lists of lists are segments where ``input_ids`` are lists of them, else a vector per token.
    """
    if name in IMAGE_FIELDS:
        if of_segments:
            raise DataError(
                f"the source has {name} and examples of several segments, whose images columns do "
                "not hold; give the DataLoader the list of examples, or a dataset of your own"
            )
        return ArrayColumn(name, column)
    if isinstance(column, ListColumn):
        return column
    if isinstance(column, list):
        return TextColumn(name, column)
    if isinstance(column, Nested):
        values = column.rows.values
        return NestedColumn(name, values.dtype, [column], of_vectors=values.ndim > 1)
    if isinstance(column, Ragged):
        kind_of = ListColumn if column.values.ndim == 1 else VectorColumn
        return kind_of(name, column.values.dtype, [column])
    if isinstance(column, np.ndarray):
        return NumberColumn(name, column.dtype, column)
    import pyarrow as pa
    from pyarrow.types import is_boolean, is_floating, is_integer, is_null

    if name not in KNOWN and is_text(column.type):
        return TextColumn(name, column)
    depth, kind = 0, column.type
    while True:
        kind = getattr(kind, "storage_type", kind)  # datasets.Array2D is an extension
        if not isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType):
            break
        depth, kind = depth + 1, kind.value_type
    is_number = is_null(kind) or is_integer(kind) or is_floating(kind) or is_boolean(kind)
    most = 2 if name in KNOWN or not of_segments else 3
    if not is_number or depth > most or (depth == 2 and name in KNOWN and not of_segments):
        raise DataError(
            f"column {name} has the Arrow type {column.type} ({column[:1].to_pylist()!r:.60}); a "
            "column holds one list of numbers per row (or of vectors, for fields with a shape; or "
            "of several segments a list of such lists), one number, or one string: cast it, or "
            "leave it out with columns="
        )
    # null is what Arrow infers when every list is empty
    dtype = np.int64 if is_null(kind) else kind.to_pandas_dtype()
    if not depth:
        return NumberColumn(name, dtype, column)
    chunks = [getattr(chunk, "storage", chunk) for chunk in column.chunks]
    if of_segments and depth > 1:
        return NestedColumn(name, dtype, chunks, of_vectors=depth == 3)
    return (ListColumn if depth == 1 else VectorColumn)(name, dtype, chunks)


def plain(column: Any) -> Any:
    """Return an Arrow column without views and dictionaries, as polars and pandas write them."""
    if not hasattr(column, "chunks"):
        return column
    import pyarrow as pa

    return pa.chunked_array([*map(_plain, column.chunks or [column.combine_chunks()])])


def _plain(array: Any) -> Any:
    import pyarrow as pa

    kind = array.type
    if isinstance(kind, pa.DictionaryType):
        values = _plain(array.dictionary)
        return pa.DictionaryArray.from_arrays(array.indices, values).dictionary_decode()
    if kind == pa.string_view():
        return array.cast(pa.large_string())
    if not re.search("_view<|dictionary<", str(kind)) or not hasattr(array, "value_lengths"):
        return array
    counts = array.value_lengths().fill_null(0)  # no cast: pyarrow 26 returns wrong rows
    offsets = np.append(0, np.cumsum(counts.to_numpy(), dtype=np.int64))
    mask = array.is_null() if array.null_count else None
    return pa.LargeListArray.from_arrays(pa.array(offsets), _plain(array.flatten()), mask=mask)


def are_lists_of_segments(ids: Any) -> bool:
    """Return whether a column of ``input_ids`` has a list of segments in every row."""
    if isinstance(ids, Nested) or not hasattr(ids, "type"):
        return isinstance(ids, Nested)
    return str(ids.type).count("list<") > 1


def is_text(kind: Any) -> bool:
    """Return whether an Arrow type is of strings."""
    return str(kind) in ("string", "large_string")
