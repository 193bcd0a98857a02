"""Arrow columns of nested lists as ndarrays of several dimensions: the images of examples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_collate_kit.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]

__all__ = ["ArrayColumn"]


class ArrayColumn:
    """A column of arrays or nulls; a null is an example without an image.

    In the methods ``rows`` are rows of the column, and ``named`` is what errors call them.
    """

    def __init__(self, name: str, column: pa.ChunkedArray | list[np.ndarray | None]) -> None:
        self.name = name
        self._chunks: list[Any] = [column] if isinstance(column, list) else column.chunks
        self._starts = np.cumsum([0, *map(len, self._chunks)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def row(self, row: np.ndarray, named: np.ndarray) -> np.ndarray | None:
        """The one row, a view where Arrow allows one."""
        return self.take(row, named)[0]

    def take(self, rows: np.ndarray, named: np.ndarray) -> list[np.ndarray | None]:
        """The rows, views where Arrow allows them."""
        return [self._array(*at) for at in zip(rows.tolist(), named.tolist(), strict=True)]

    def outer_lengths(self) -> np.ndarray:
        """int64 [N], the first dimension of every row, 0 of a null; reads no number."""
        parts = [np.empty(0, dtype=np.int64)]
        for chunk in self._chunks:
            if isinstance(chunk, list):
                parts.append(np.array([0 if row is None else len(row) for row in chunk]))
            else:
                lengths = _storage(chunk).value_lengths().fill_null(0)
                parts.append(lengths.to_numpy(zero_copy_only=False).astype(np.int64))
        return np.concatenate(parts)

    def _array(self, row: int, named: int) -> np.ndarray | None:
        chunk = int(np.searchsorted(self._starts, row, side="right")) - 1
        held = self._chunks[chunk]
        place = row - int(self._starts[chunk])
        if isinstance(held, list):
            return held[place]
        return _to_numpy(self.name, named, _storage(held).slice(place, 1))


def _storage(chunk: Any) -> Any:
    """The lists of a chunk; datasets.Array2D and its kind are an extension of them."""
    return getattr(chunk, "storage", chunk)


def _to_numpy(name: str, row: int, lists: Any) -> np.ndarray | None:
    """One list of nested lists as an array."""
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
