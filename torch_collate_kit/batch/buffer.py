"""Several tensors and ragged fields in one buffer: one allocation, one handle, one copy."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.ragged import Ragged

__all__ = ["Slot", "carve", "fresh_bytes", "gather"]

_ALIGNMENT = 64  # bytes: a cache line, and enough for every vector load
_HUGE_PAGE = 1 << 21
_LARGE = 1 << 20
Key = TypeVar("Key", bound=Hashable)


def fresh_bytes(size: int) -> np.ndarray:
    """uint8 [size], not filled; from 1 MB on it begins where a page of 2 MB may.

    NumPy asks for such pages, for arrays of 4 MB and more. To touch fresh memory in pages of 4 KB
    takes up to ten times as long as to fill it. The bytes around the array are never touched, so
    they take addresses, and memory only up to the end of its last page.
    """
    if size < _LARGE:
        return np.empty(size, dtype=np.uint8)
    array = np.empty(size + 2 * _HUGE_PAGE, dtype=np.uint8)
    first = -array.ctypes.data % _HUGE_PAGE
    return array[first : first + size]


class Slot(NamedTuple):
    """Where a field lies in the buffer; ``offsets`` is set for a ragged field."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: np.ndarray | None


def gather(
    fields: Mapping[Key, Tensor | Ragged], *, pin: bool = False
) -> tuple[Tensor, dict[Key, Slot]]:
    """A new uint8 buffer with the bytes of all fields, on the device of the first, and where.

    With ``pin`` in page-locked memory.
    """
    slots: dict[Key, Slot] = {}
    sources: list[Tensor] = []
    end = 0
    for key, field in fields.items():
        offsets = None
        if isinstance(field, Ragged):
            offsets, source = field.offsets, torch.as_tensor(field.values)
        else:
            source = field
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        slots[key] = Slot(start, tuple(source.shape), source.dtype, offsets)
        sources.append(source)
        end = start + math.prod(source.shape) * source.dtype.itemsize
    size = -(-end // _ALIGNMENT) * _ALIGNMENT  # torch.load reads a storage as its widest dtype
    buffer = torch.empty(size, dtype=torch.uint8, device=sources[0].device, pin_memory=pin)
    for source, slot in zip(sources, slots.values(), strict=True):
        _view(buffer, slot).copy_(source.detach())
    return buffer, slots


def carve(buffer: Tensor, slots: Mapping[Key, Slot]) -> dict[Key, Tensor | Ragged]:
    """The fields, as views of the buffer."""
    fields: dict[Key, Tensor | Ragged] = {}
    for key, slot in slots.items():
        values = _view(buffer, slot)
        fields[key] = values if slot.offsets is None else Ragged(values, slot.offsets)
    return fields


def _view(buffer: Tensor, slot: Slot) -> Tensor:
    stop = slot.start + math.prod(slot.shape) * slot.dtype.itemsize
    return buffer[slot.start : stop].view(slot.dtype).view(slot.shape)
