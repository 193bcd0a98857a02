"""Several tensors and ragged fields in one buffer: one allocation, one handle, one copy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.ragged import Ragged

_ALIGNMENT = 64  # bytes: a cache line, and enough for every vector load
_HUGE_PAGE = 1 << 21
_LARGE = 1 << 20
Key = tuple[str, str]  # "given", "columns" or "segments", and a name there


def fresh_bytes(size: int) -> np.ndarray:
    """Return an unfilled array, uint8 [size]; from 1 MB on it begins where a page of 2 MB may.

    NumPy asks for such pages, for arrays of 4 MB and more. To touch fresh memory in pages of 4 KB
    takes up to ten times as long as to fill it. The bytes around the array are never touched, so
    they take addresses, and memory only up to the end of its last page.
    """
    if size < _LARGE:
        return np.empty(size, dtype=np.uint8)
    array = np.empty(size + 2 * _HUGE_PAGE, dtype=np.uint8)
    first = -array.ctypes.data % _HUGE_PAGE
    return array[first : first + size]


def put_spans(
    dense: Tensor, values: Tensor, cells: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> None:
    """Copy ``values[start:start + length]``, or one value, into spans of a tensor in host memory.

    A copy per span takes a third of the time of an index per token, and between memoryviews three
    quarters of that between arrays.
    """
    if len(values) == 1:
        values, starts = values.repeat_interleave(int(lengths.max()), 0), 0 * starts
    size, flat = values[:1].nbytes, (dense, values.contiguous().view(-1))
    room, source = (of.view(torch.uint8).numpy().data for of in flat)
    bounds = [(size * of).tolist() for of in (cells, cells + lengths, starts, starts + lengths)]
    for begin, end, start, stop in zip(*bounds, strict=True):
        room[begin:end] = source[start:stop]


class Slot(NamedTuple):
    """Place of a field in the buffer; ``offsets`` is set for a ragged field."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: np.ndarray | None


def tensor_of(field: Tensor | Ragged) -> Tensor:
    """Return a tensor field, or the values of a ragged one as a tensor."""
    return field if isinstance(field, Tensor) else torch.as_tensor(field.values)


def version_of(field: Tensor | Ragged) -> int:
    """Return a number that grows with changes in place; 0 for an inference tensor."""
    tensor = tensor_of(field)
    return 0 if tensor.is_inference() else tensor._version


def slots_of(fields: Mapping[Key, Tensor | Ragged]) -> dict[Key, Slot]:
    """Return the places of the fields in one buffer, one after the other in their order."""
    slots: dict[Key, Slot] = {}
    end = 0
    for key, field in fields.items():
        tensor = tensor_of(field)
        offsets = field.offsets if isinstance(field, Ragged) else None
        slots[key] = Slot(_aligned(end), tuple(tensor.shape), tensor.dtype, offsets)
        end = _stop(slots[key])
    return slots


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _stop(slot: Slot) -> int:
    return slot.start + math.prod(slot.shape) * slot.dtype.itemsize


def gather(
    fields: Mapping[Key, Tensor | Ragged], *, pin: bool = False, share: bool = False
) -> tuple[Tensor, dict[Key, Slot]]:
    """Return a new uint8 buffer with the bytes of all fields, and their places there."""
    slots = slots_of(fields)
    sources = [tensor_of(field) for field in fields.values()]
    places = list(zip(sources, slots.values(), strict=True))
    # torch.load reads a storage as its widest dtype
    size, device = _aligned(max(map(_stop, slots.values()))), sources[0].device
    if share and device.type == "cpu" and size:  # no memory at all cannot be shared
        untyped_storage: Any = torch.UntypedStorage
        storage = untyped_storage._new_shared(size)  # as default_collate does in a worker
        buffer = torch.empty(0, dtype=torch.uint8).set_(storage)
        processes: Any = torch.multiprocessing
        if processes.get_sharing_strategy() == "file_descriptor":
            _write(storage, places)
            return buffer, slots
    else:
        buffer = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pin)
    for source, slot in places:
        _view(buffer, slot).copy_(source.detach())
    return buffer, slots


def _write(storage: Any, places: Sequence[tuple[Tensor, Slot]]) -> None:
    """Write the sources to the file that a shared storage is.

    Torch shares it as it is, and would copy any other memory. Written through its addresses, the
    new memory would take a page fault per 4 KB (10 MB: 6 ms), as the file it does not (3.5 ms).
    """
    descriptor, _ = storage._share_fd_cpu_()  # stays the storage's
    with open(descriptor, "wb", closefd=False) as file:
        for source, slot in places:
            file.seek(slot.start)
            file.write(_bytes_of(source))


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes in the order of the elements; no copy if the tensor is contiguous."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    storage = torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage())
    first = plain.storage_offset() * plain.itemsize  # view() refuses one element of stride 0
    return storage[first : first + plain.nbytes].numpy().data


def carve(buffer: Tensor, slots: Mapping[Key, Slot]) -> dict[Key, Tensor | Ragged]:
    """Return the fields, as views of the buffer."""
    fields: dict[Key, Tensor | Ragged] = {}
    for key, slot in slots.items():
        values = _view(buffer, slot)
        fields[key] = values if slot.offsets is None else Ragged(values, slot.offsets)
    return fields


def _view(buffer: Tensor, slot: Slot) -> Tensor:
    return buffer[slot.start : _stop(slot)].view(slot.dtype).view(slot.shape)
