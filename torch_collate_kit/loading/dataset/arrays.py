"""Columns of the arrays that vision processors return, stored as nested lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_collate_kit.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]


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
