"""Raw columns of arrays: the expert routes and the images of rollouts, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.numbers import tensor_to_numpy
from torch_collate_kit.reading.raw import is_sequence

__all__ = ["IMAGES", "image_columns", "route_column"]

IMAGES = ("pixel_values", "image_grid_thw")
_MOST_EXPERTS = np.iinfo(np.int16).max


def route_column(column: Any, lengths: np.ndarray) -> Ragged:
    name = "rollout_expert_indices"
    shape = "integers [tokens, layers, top_k], an array [0, layers, top_k] where there are none"
    arrays = list(_arrays(name, dict(enumerate(column)), 3, "iu", shape).values())
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


def image_columns(raw: Mapping[str, Any]) -> dict[str, Ragged]:
    """Patches and grids of the images, in the dtype they have; None stands for no image."""
    if "pixel_values" not in raw:
        return {}
    pixels, grids = (list(raw[name]) for name in IMAGES)
    for i, (pixel, grid) in enumerate(zip(pixels, grids, strict=True)):
        if (pixel is None) != (grid is None):
            raise DataError(
                f"example {i} has one of {' and '.join(IMAGES)}; both are None without an image"
            )
    some = [i for i, pixel in enumerate(pixels) if pixel is not None]
    if not some:
        return {}
    shapes = "floats [patches, patch size]", "integers [images, 3]"
    pixels_of = _arrays(IMAGES[0], {i: pixels[i] for i in some}, 2, "f", shapes[0])
    grid_of = _arrays(IMAGES[1], {i: grids[i] for i in some}, 2, "iu", shapes[1])
    for i, grid in grid_of.items():
        if (grid < 1).any():
            raise DataError(
                f"example {i}: image_grid_thw has the size {grid.min()}, and sizes are 1 or more; "
                "give what the processor returned"
            )
        patches = int(grid.prod(axis=1).sum())
        if patches != len(pixels_of[i]) or grid.shape[1] != 3:
            raise DataError(
                f"example {i}: pixel_values has {len(pixels_of[i])} patches, image_grid_thw of "
                f"shape {grid.shape} describes {patches}; give what the processor returned"
            )
    columns = {}
    for name, given in zip(IMAGES, (pixels_of, grid_of), strict=True):
        lengths = [len(given.get(i, ())) for i in range(len(pixels))]
        columns[name] = Ragged.from_lengths(np.concatenate(list(given.values())), lengths)
    return columns


def _arrays(
    name: str, entries: Mapping[int, Any], num_dims: int, kinds: str, shape: str
) -> dict[int, np.ndarray]:
    """Entries by their example, as ndarrays of that many dimensions and one of these kinds."""
    arrays: dict[int, np.ndarray] = {}
    for i, entry in entries.items():
        array = _as_array(name, i, entry, shape)
        if array.ndim != num_dims or array.dtype.kind not in kinds:
            raise DataError(
                f"example {i}: {name} has shape {array.shape} and dtype {array.dtype}; give {shape}"
            )
        first = next(iter(arrays), i)
        if array.shape[1:] != arrays.get(first, array).shape[1:]:
            raise DataError(
                f"example {i}: {name} has shape {array.shape}, example {first} has "
                f"{arrays[first].shape}; only the first dimension may differ"
            )
        arrays[i] = array
    return arrays


def _is_masked(entry: Any) -> bool:
    parts = entry if is_sequence(entry) else [entry]
    return any(isinstance(part, np.ma.MaskedArray) for part in parts)


def _as_array(name: str, index: int, entry: Any, shape: str) -> np.ndarray:
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
