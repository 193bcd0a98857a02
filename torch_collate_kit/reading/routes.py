"""The expert routes of rollouts, checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.arrays import checked_arrays

__all__ = ["route_column"]

_MOST_EXPERTS = np.iinfo(np.int16).max


def route_column(column: Any, lengths: np.ndarray) -> Ragged:
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
