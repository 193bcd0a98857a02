"""Host memory for batches and for what they are made of, used again when it is let go.

The first touch of fresh memory costs more than filling it (75 MB: 40 ms in small pages, 9 ms in
large ones, 4 ms where the memory was used before), and the C library gives much of it back to the
system at once. So the last blocks that were let go are kept here for the next batches.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["host_array", "host_bytes"]

_ALIGNMENT = 64  # bytes: a cache line, and enough for every vector load
_LEAST_KEPT = 1 << 18  # bytes; the C library keeps smaller blocks
_MAX_KEPT = 3  # times the largest block: two batches, and what one is made of
_kept: dict[int, np.ndarray] = {}  # by id, the oldest first; no lock: a finalizer may run anywhere


def host_bytes(num_bytes: int) -> Tensor:
    """Uninitialised bytes: uint8 [num_bytes], aligned to a cache line.

    Their memory is used again when no tensor or array looks at it any more.

    >>> host_bytes(100).shape
    torch.Size([100])
    """
    block = _kept_block(int(num_bytes) + _ALIGNMENT)
    start = -block.ctypes.data % _ALIGNMENT
    view = block[start : start + num_bytes]
    if block.nbytes >= _LEAST_KEPT:
        # The tensor's storage holds this very view. Arrays made of the view would not: NumPy lets
        # them hold the block.
        weakref.finalize(view, _give_back, block).atexit = False
    return torch.from_numpy(view)


def host_array(length: int, dtype: Any) -> np.ndarray:
    """The same as an uninitialised array [length]; a small one is any array."""
    if length * np.dtype(dtype).itemsize < _LEAST_KEPT:
        return np.empty(length, dtype=dtype)
    array: np.ndarray = host_bytes(length * np.dtype(dtype).itemsize).numpy().view(dtype)
    return array


def _kept_block(num_bytes: int) -> np.ndarray:
    """A block of that size or up to half more, kept or new. NumPy asks for large pages."""
    fits = {k: b.nbytes for k, b in list(_kept.items()) if num_bytes <= b.nbytes <= 1.5 * num_bytes}
    for key in sorted(fits, key=fits.__getitem__):
        block = _kept.pop(key, None)  # another thread may have been faster
        if block is not None:
            return block
    step = max(1, 1 << max(0, num_bytes.bit_length() - 4))  # an eighth at most: widths vary
    return np.empty(-(-num_bytes // step) * step, dtype=np.uint8)


def _give_back(block: np.ndarray) -> None:
    _kept[id(block)] = block
    sizes = {key: kept.nbytes for key, kept in list(_kept.items())}
    excess = sum(sizes.values()) - _MAX_KEPT * max(sizes.values())
    for key, size in sizes.items():
        if excess <= 0:
            break
        _kept.pop(key, None)
        excess -= size
