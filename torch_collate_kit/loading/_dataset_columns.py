"""Columns of Arrow or NumPy chunks, looked at where they lie; rows are found by integers alone.

The price is about 2.5 KB of Python objects a chunk and column: 20 GB in chunks of 1,000 rows take
some 50 MB.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]

__all__ = ["ListColumn", "NumberColumn", "column_of"]


class _Column:
    """A column in chunks. In the methods ``rows`` are of the column, ``named`` what errors say."""

    def __init__(self, name: str, dtype: Any, chunks: Iterable[Any]) -> None:
        self.name = name
        self.dtype = np.dtype(dtype)
        self.values: list[Any] = []
        self._suspects: dict[int, pa.Array] = {}  # chunks with a null somewhere
        counts = [0]
        for chunk in chunks:
            if len(chunk):  # Arrow may leave the buffers of an empty chunk out
                counts.append(len(chunk))
                self._add(chunk)
        self._starts = np.cumsum(counts)  # int64 [chunks + 1], the first row of each

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _add(self, chunk: Any) -> None:
        raise NotImplementedError

    def _places(self, rows: np.ndarray, named: np.ndarray) -> list[tuple[int, int]]:
        """Chunk and row in it, of every row; a null in one of them is an error."""
        chunks = np.searchsorted(self._starts, rows, side="right") - 1
        places = list(zip(chunks.tolist(), (rows - self._starts[chunks]).tolist(), strict=True))
        if self._suspects:
            for i, (chunk, row) in zip(named.tolist(), places, strict=True):
                if chunk in self._suspects and _has_null(self._suspects[chunk][row]):
                    raise _null_error(self.name, i)
        return places


class ListColumn(_Column):
    """A column of lists: per chunk the flat values, and where the rows start in them."""

    def __init__(self, name: str, dtype: Any, chunks: Iterable[Any]) -> None:
        self._offsets: list[Sequence[int]] = []
        super().__init__(name, dtype, chunks)

    def _add(self, chunk: Any) -> None:
        if isinstance(chunk, Ragged):
            self._offsets.append(_ints(chunk.offsets))
            self.values.append(_read_only(chunk.values))
            return
        # Not flatten(): with one null row it copies the whole chunk. `.values` ignores the slice,
        # and so do the offsets that belong to it.
        size = getattr(chunk.type, "list_size", None)
        if size is None:
            self._offsets.append(_ints(chunk.offsets.to_numpy()))
        elif size == 0:
            self._offsets.append([0] * (len(chunk) + 1))
        else:
            first, stop = chunk.offset, chunk.offset + len(chunk) + 1
            self._offsets.append(range(first * size, stop * size, size))
        if chunk.null_count or chunk.values.null_count:
            self._suspects[len(self.values)] = chunk
        self.values.append(_view(chunk.values))

    def lengths(self, rows: np.ndarray | None = None) -> np.ndarray:
        """int64, of all rows or of the given ones, from offsets alone; a null row is an error."""
        parts = [np.diff(np.asarray(offsets)) for offsets in self._offsets]
        lengths = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        for i, chunk in self._suspects.items():
            lengths[self._starts[i] + np.flatnonzero(chunk.is_null())] = -1
        lengths = lengths if rows is None else lengths[rows]
        if (lengths < 0).any():
            raise _null_error(self.name, int(np.flatnonzero(lengths < 0)[0]))
        return lengths

    def parts(self, rows: np.ndarray, named: np.ndarray) -> list[np.ndarray]:
        """The rows, as read-only views (bool: copies, Arrow has them in bits)."""
        values, offsets = self.values, self._offsets
        places = self._places(rows, named)
        return [values[c][offsets[c][r] : offsets[c][r + 1]] for c, r in places]

    def take(self, rows: np.ndarray, named: np.ndarray) -> Ragged:
        """The rows, copied one behind the other."""
        parts = self.parts(rows, named)
        flat = np.concatenate([np.empty(0, dtype=self.dtype), *parts])
        return Ragged.from_lengths(flat, [len(part) for part in parts])


class NumberColumn(_Column):
    """A column of one number a row: ``num_actions``, or the indices mapping of ``datasets``."""

    def __init__(self, name: str, dtype: Any, chunks: Iterable[Any]) -> None:
        super().__init__(name, np.int64 if np.dtype(dtype).kind in "iu" else dtype, chunks)

    def _add(self, chunk: Any) -> None:
        if isinstance(chunk, np.ndarray):
            self.values.append(chunk)
            return
        if chunk.null_count:
            self._suspects[len(self.values)] = chunk
        self.values.append(_view(chunk)[0 : len(chunk)])

    def all(self) -> np.ndarray:
        """Every row, nulls unchecked: a copy."""
        return np.concatenate([np.empty(0, dtype=self.dtype), *self.values]).astype(
            self.dtype, copy=False
        )

    def take(self, rows: np.ndarray, named: np.ndarray) -> np.ndarray:
        """The rows: a copy."""
        if len(self.values) == 1 and not self._suspects:
            return self.values[0][rows].astype(self.dtype, copy=False)
        places = self._places(rows, named)
        return np.array([self.values[c][r] for c, r in places], dtype=self.dtype)

    parts = take


class _Bits:
    """Booleans as Arrow keeps them, eight in a byte; a slice of it is a new bool array."""

    def __init__(self, packed: np.ndarray, offset: int) -> None:
        self._packed = packed
        self._offset = offset

    def __getitem__(self, cells: slice) -> np.ndarray:
        start, stop = cells.start + self._offset, cells.stop + self._offset
        first = start // 8
        bits = np.unpackbits(self._packed[first : -(-stop // 8)], bitorder="little")
        return bits[start - 8 * first : stop - 8 * first].view(np.bool_)


def column_of(name: str, column: Any) -> ListColumn | NumberColumn:
    """The column of a Ragged, an ndarray or an Arrow table: lists of numbers, or numbers."""
    if isinstance(column, Ragged):
        return ListColumn(name, column.values.dtype, [column])
    if isinstance(column, np.ndarray):
        return NumberColumn(name, column.dtype, [column])
    kind = column.type
    is_list = _is_list(kind)
    dtype = _dtype(kind.value_type if is_list else kind)
    if dtype is None:
        raise DataError(
            f"column {name} has the Arrow type {kind}; a column holds one flat list of numbers a "
            "row, or one number: cast it, or leave it out with columns="
        )
    return (ListColumn if is_list else NumberColumn)(name, dtype, column.chunks)


def _is_list(kind: pa.DataType) -> bool:
    from pyarrow import types

    kinds = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return any(is_kind(kind) for is_kind in kinds)


def _dtype(kind: pa.DataType) -> np.dtype[Any] | None:
    import pyarrow as pa

    if pa.types.is_null(kind):  # what Arrow infers when every list is empty
        return np.dtype(np.int64)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return np.dtype(kind.to_pandas_dtype())
    return None


def _view(values: pa.Array) -> Any:
    """A NumPy view of Arrow numbers; what lies under a null is anything."""
    import pyarrow as pa

    if pa.types.is_null(values.type):
        values = values.cast(pa.int64())
    data = values.buffers()[1]
    if data is None:  # nothing but empty lists
        return np.empty(0, dtype=values.type.to_pandas_dtype())
    if pa.types.is_boolean(values.type):
        return _Bits(np.frombuffer(data, dtype=np.uint8), values.offset)
    if values.null_count:
        parts = [None, data]
        values = pa.Array.from_buffers(values.type, len(values), parts, offset=values.offset)
    return values.to_numpy(zero_copy_only=True)


def _ints(offsets: np.ndarray) -> Any:
    """A memoryview gives Python ints, and cheaper than NumPy gives its scalars."""
    return offsets.data


def _read_only(values: np.ndarray) -> np.ndarray:
    view = values.view()
    view.flags.writeable = False
    return view


def _has_null(entry: pa.Scalar) -> bool:
    if not entry.is_valid:
        return True
    values = getattr(entry, "values", None)  # of a list
    return values is not None and values.null_count > 0


def _null_error(name: str, row: int) -> DataError:
    return DataError(
        f"row {row}: {name} is null or holds a null; drop the row, or fill it in before training"
    )
