"""Columns of Arrow or NumPy chunks, read in place: numbers, texts, and the choice among all."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_collate_kit.errors import DataError
from torch_collate_kit.loading.dataset.arrays import ArrayColumn
from torch_collate_kit.loading.dataset.list_columns import (
    ListColumn,
    NestedColumn,
    VectorColumn,
    null_error,
)
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
