"""Values with one entry per row: list, array, tensor or Ragged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.ragged import Ragged


class PackedValues(tuple[Any, ...]):
    """One value per sub-sequence of a packed row.

    >>> PackedValues(["a", "b"])
    ('a', 'b')
    """

    __slots__ = ()


def is_per_row(value: Any) -> bool:
    """Return whether a metadata value has one entry per row."""
    if isinstance(value, np.ndarray | Tensor):
        return value.ndim > 0  # a scalar has no rows
    return isinstance(value, list | Ragged)


def equal(a: Any, b: Any) -> bool:
    """Return whether kind, dtype and values are the same."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())
    if isinstance(a, Ragged) and isinstance(b, Ragged):
        return torch.as_tensor(a.values).dtype == torch.as_tensor(b.values).dtype and a == b
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(value, b[key]) for key, value in a.items())
    return type(a) is type(b) and bool(a == b)


def take(value: Any, rows: np.ndarray) -> Any:
    """Return the named rows, in that order: a copy."""
    if isinstance(value, Ragged):
        return value.take(rows)
    if isinstance(value, Tensor):
        return value[torch.from_numpy(rows.copy()).to(value.device, non_blocking=True)]
    return value[rows] if isinstance(value, np.ndarray) else [value[i] for i in rows.tolist()]


def cat(values: Sequence[Any]) -> Any:
    """Return the rows of all values, one after the other: a copy."""
    first = values[0]
    if isinstance(first, Ragged):
        return Ragged.cat(values)
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    return [entry for value in values for entry in value]
