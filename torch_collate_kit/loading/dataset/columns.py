"""Columns of Arrow or NumPy chunks, read in place: numbers, texts, and the arrays of images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_collate_kit.errors import DataError
from torch_collate_kit.loading.dataset.list_columns import ListColumn, NestedColumn, null_error
from torch_collate_kit.ragged import Nested, Ragged
from torch_collate_kit.reading.keys import KNOWN
from torch_collate_kit.vision.families import IMAGE_FIELDS

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]


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


AnyColumn = ListColumn | NestedColumn | NumberColumn | ArrayColumn | TextColumn


def column_of(name: str, column: Any) -> AnyColumn:
    """Return the column for a Ragged, a Nested, an ndarray, strings or an Arrow column."""
    if name in IMAGE_FIELDS:
        return ArrayColumn(name, column)
    if isinstance(column, list):
        return TextColumn(name, column)
    if isinstance(column, Ragged):
        return ListColumn(name, column.values.dtype, [column])
    if isinstance(column, Nested):
        return NestedColumn(name, column.rows.values.dtype, [column])
    if isinstance(column, np.ndarray):
        return NumberColumn(name, column.dtype, column)
    import pyarrow as pa
    from pyarrow.types import (
        is_boolean,
        is_floating,
        is_integer,
        is_large_string,
        is_null,
        is_string,
    )

    if name not in KNOWN and (is_string(column.type) or is_large_string(column.type)):
        return TextColumn(name, column)
    list_types = pa.ListType | pa.LargeListType | pa.FixedSizeListType
    is_list = isinstance(column.type, list_types)
    kind = column.type.value_type if is_list else column.type
    is_nested = isinstance(kind, list_types)
    kind = kind.value_type if is_nested else kind
    if not (is_null(kind) or is_integer(kind) or is_floating(kind) or is_boolean(kind)):
        raise DataError(
            f"column {name} has the Arrow type {column.type}; a column holds one list of numbers "
            "per row, or of several segments a list of such lists, one number, or one string: cast "
            "it, or leave it out with columns="
        )
    # null is what Arrow infers when every list is empty
    dtype = np.int64 if is_null(kind) else kind.to_pandas_dtype()
    if is_nested:
        return NestedColumn(name, dtype, column.chunks)
    return ListColumn(name, dtype, column.chunks) if is_list else NumberColumn(name, dtype, column)


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
