"""Entries that are arrays of several dimensions, checked: expert routes, and what images are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.numbers import tensor_to_numpy
from torch_collate_kit.reading.raw import is_sequence

__all__ = ["as_array", "checked_arrays", "route_column"]

_MOST_EXPERTS = np.iinfo(np.int16).max


def route_column(column: Any, lengths: np.ndarray) -> Ragged:
    """The expert routes of rollouts, uint8 or int16: of their first tokens; ``lengths`` int64 [N].

    Raises:
        DataError: other shapes, more routes than tokens, or experts that int16 does not hold.
    """
    name = "rollout_expert_indices"
    shape = "integers [tokens, layers, top_k], an array [0, layers, top_k] where there are none"
    arrays = list(checked_arrays(name, dict(enumerate(column)), 3, "iu", shape).values())
    if not all(arrays[0].shape[1:]):
        raise DataError(
            f"example 0: {name} has shape {arrays[0].shape}, so no layers or no experts; leave "
            "it out of every example"
        )
    counts = np.array([len(array) for array in arrays], dtype=np.int64)
    too_many = np.flatnonzero(counts > lengths)
    if len(too_many):
        i = int(too_many[0])
        raise DataError(
            f"example {i}: {name} has {counts[i]} tokens, the rollout has {lengths[i]}; give "
            "routes for all of them, or for the first ones"
        )
    flat = np.concatenate(arrays)
    if flat.size and not (flat.min() >= 0 and flat.max() <= _MOST_EXPERTS):
        bad = np.argwhere((flat < 0) | (flat > _MOST_EXPERTS))[0]
        i = int(np.searchsorted(np.cumsum(counts), bad[0], side="right"))
        raise DataError(
            f"example {i}: {name} has the expert {int(flat[tuple(bad)])}; experts are 0 to "
            f"{_MOST_EXPERTS}"
        )
    few = not flat.size or flat.max() < 256
    return Ragged.from_lengths(flat.astype(np.uint8 if few else np.int16), counts)


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


def as_array(name: str, index: int, entry: Any, shape: str) -> np.ndarray:
    if isinstance(entry, Tensor):
        return tensor_to_numpy(name, index, entry)
    parts = entry if is_sequence(entry) else [entry]
    if any(isinstance(part, np.ma.MaskedArray) for part in parts):
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
