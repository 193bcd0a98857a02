"""Entries that are arrays of several dimensions, checked: what routes and images are read from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit.errors import DataError
from torch_collate_kit.reading.numbers import tensor_to_numpy
from torch_collate_kit.reading.raw import is_sequence

__all__ = ["as_array", "checked_arrays"]


def checked_arrays(
    name: str,
    entries: Mapping[int, Any],
    num_dims: int,
    kinds: str,
    shape: str,
    *,
    or_padded: bool = False,
) -> dict[int, np.ndarray]:
    """Entries by their example, as ndarrays of that many dimensions and one of these kinds.

    ``or_padded``: one dimension more is taken, too.
    """
    arrays: dict[int, np.ndarray] = {}
    for i, entry in entries.items():
        array = as_array(name, i, entry, shape)
        if array.ndim not in (num_dims, num_dims + or_padded) or array.dtype.kind not in kinds:
            raise DataError(
                f"example {i}: {name} has shape {array.shape} and dtype {array.dtype}; give {shape}"
            )
        first = next(iter(arrays), i)
        trailing = array.shape[array.ndim - num_dims + 1 :]
        other = arrays.get(first, array)
        if trailing != other.shape[other.ndim - num_dims + 1 :]:
            raise DataError(
                f"example {i}: {name} has shape {array.shape}, example {first} has "
                f"{arrays[first].shape}; only the first dimension may differ"
            )
        arrays[i] = array
    return arrays


def _is_masked(entry: Any) -> bool:
    parts = entry if is_sequence(entry) else [entry]
    return any(isinstance(part, np.ma.MaskedArray) for part in parts)


def as_array(name: str, index: int, entry: Any, shape: str) -> np.ndarray:
    if isinstance(entry, Tensor):
        return tensor_to_numpy(name, index, entry)
    if _is_masked(entry):
        raise DataError(
            f"example {index}: {name} is a masked array, whose mask would be lost; give "
            ".filled(value)"
        )
    if isinstance(entry, np.ndarray):
        return entry
    if not is_sequence(entry):
        kind = "None" if entry is None else type(entry).__name__
        raise DataError(f"example {index}: {name} is {kind}; give {shape}")
    if entry and all(isinstance(part, Tensor) for part in entry):
        entry = [tensor_to_numpy(name, index, part) for part in entry]
    try:
        return np.asarray(entry)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"example {index}: {name} is a list whose parts differ in shape or are no numbers; "
            f"give {shape}"
        ) from None
