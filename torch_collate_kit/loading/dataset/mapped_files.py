"""Columns in files of bare numbers, mapped into memory by path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from torch_collate_kit.errors import DataError
from torch_collate_kit.loading.dataset.columns import ListColumn
from torch_collate_kit.ragged import unchecked


class TokenFiles:
    """Columns of files by path, dtype, first byte and offsets, which a worker maps again."""

    def __init__(self, columns: dict[str, Any], offsets: list[np.ndarray]) -> None:
        self.files: dict[str, Any] = {
            name: [tuple(file[:3]) for file in files] for name, files in columns.items()
        }
        self.offsets, self.column_names = offsets, list(columns)

    def select(self, names: Sequence[str]) -> TokenFiles:
        """Return the files of these columns alone."""
        return TokenFiles({name: self.files[name] for name in names}, self.offsets)

    def table(self) -> dict[str, ListColumn]:
        """Return the columns, mapped."""
        return {
            name: ListColumn(
                name,
                files[0][1],
                [
                    unchecked(mapped(path, dtype, first, int(offsets[-1])), offsets)
                    for (path, dtype, first), offsets in zip(files, self.offsets, strict=True)
                ],
            )
            for name, files in self.files.items()
        }


def mapped(path: str, dtype: np.dtype[Any], first: int, count: int | None = None) -> np.ndarray:
    """Return the tokens of a file from this byte on, mapped into memory."""
    try:
        size = os.path.getsize(path) - first
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if size <= 0 or size % dtype.itemsize or (count is not None and size != count * dtype.itemsize):
        wanted = "at least one token" if count is None else f"{count:,} tokens"
        raise DataError(
            f"{path}: has {size:,} bytes of tokens, and {wanted} of {dtype} ({dtype.itemsize} "
            "bytes each) are expected; it is damaged, or of another dtype"
        )
    return np.memmap(path, dtype, "r", first).view(np.ndarray)
