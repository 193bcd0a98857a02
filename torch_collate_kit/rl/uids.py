"""Uids of rows: which prompt, or which trajectory, a row is of."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit.reading.grouping import id_column

__all__ = ["Uids", "checked_uids"]

Uids = Sequence[Hashable] | np.ndarray | Tensor


def checked_uids(uids: Any, num_rows: int | None = None, *, name: str = "uid") -> list[Hashable]:
    """``uids`` as a list of hashables that compare by value; a tensor's are its numbers.

    Raises:
        TypeError: a string, or nothing to iterate over.
        ValueError: not one-dimensional, or another number of them than ``num_rows``.
        DataError: a uid that cannot be hashed, or is None or NaN: such rows would be one prompt, or
            one each.

    >>> checked_uids(np.array([3, 3, 4]))
    [3, 3, 4]
    """
    if isinstance(uids, str | bytes) or not isinstance(uids, Iterable):
        raise TypeError(
            f"{name}s must be one {name} per row, got {uids!r} of type {type(uids).__name__}; pass "
            "a list"
        )
    if isinstance(uids, np.ndarray | Tensor) and uids.ndim != 1:
        raise ValueError(f"{name}s must be one {name} per row, got shape {list(uids.shape)}")
    keys = id_column(name, uids.tolist() if isinstance(uids, np.ndarray | Tensor) else uids, "row")
    if num_rows is not None and len(keys) != num_rows:
        raise ValueError(
            f"{name}s has {len(keys)} entries for {num_rows} rows; give one {name} per row"
        )
    return keys
