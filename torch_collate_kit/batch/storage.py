"""The content of a batch at rest: columns, dense fields given, metadata; and all in one buffer."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from torch_collate_kit.batch.fields import (
    IGNORE_INDEX,
    Field,
    FieldSpec,
    cat_rows,
    equal_values,
    is_per_row,
)
from torch_collate_kit.batch.placement import Placement, sums_per_row
from torch_collate_kit.ragged import Ragged, unchecked

_ALIGNMENT = 64  # bytes: a cache line, and enough for every vector load
_HUGE_PAGE = 1 << 21
_LARGE = 1 << 20
Key = tuple[str, str]  # "given", "columns" or "segments", and a name there


def fresh_bytes(size: int) -> np.ndarray:
    """Return an unfilled array, uint8 [size]; from 1 MB on it begins where a page of 2 MB may.

    NumPy requests such pages, for arrays of 4 MB and more. To touch fresh memory in pages of 4 KB
    takes up to ten times as long as to fill it. The bytes around the array are never touched, so
    they take addresses, and memory only up to the end of its last page.
    """
    if size < _LARGE:
        return np.empty(size, dtype=np.uint8)
    array = np.empty(size + 2 * _HUGE_PAGE, dtype=np.uint8)
    first = -array.ctypes.data % _HUGE_PAGE
    return array[first : first + size]


class FieldSlot(NamedTuple):
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


def slots_of(fields: Mapping[Key, Tensor | Ragged]) -> dict[Key, FieldSlot]:
    """Return the places of the fields in one buffer, one after the other in their order."""
    slots: dict[Key, FieldSlot] = {}
    end = 0
    for key, value in fields.items():
        tensor = tensor_of(value)
        offsets = value.offsets if isinstance(value, Ragged) else None
        slots[key] = FieldSlot(_aligned(end), tuple(tensor.shape), tensor.dtype, offsets)
        end = _stop(slots[key])
    return slots


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _stop(slot: FieldSlot) -> int:
    return slot.start + math.prod(slot.shape) * slot.dtype.itemsize


def gather(
    fields: Mapping[Key, Tensor | Ragged], *, pin: bool = False, share: bool = False
) -> tuple[Tensor, dict[Key, FieldSlot]]:
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


def _write(storage: Any, places: Sequence[tuple[Tensor, FieldSlot]]) -> None:
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


def carve(buffer: Tensor, slots: Mapping[Key, FieldSlot]) -> dict[Key, Tensor | Ragged]:
    """Return the fields, as views of the buffer."""
    fields: dict[Key, Tensor | Ragged] = {}
    for key, slot in slots.items():
        values = _view(buffer, slot)
        fields[key] = values if slot.offsets is None else Ragged(values, slot.offsets)
    return fields


def _view(buffer: Tensor, slot: FieldSlot) -> Tensor:
    return buffer[slot.start : _stop(slot)].view(slot.dtype).view(slot.shape)


@dataclass(frozen=True)
class Columns:
    """The columns of a batch on their device, and where their entries lie; false if it has none.

    ``values`` maps a name to its column, a Ragged, ``specs`` to what it has one entry of.
    ``loss_weights`` (without them ``labels``) is what the loss mask follows from.
    ``segments`` is the placement again, as Ragged tensors on the device, and
    ``num_segments`` int32 [R].
    """

    values: dict[str, Any]
    specs: dict[str, FieldSpec]
    names: tuple[str, ...]
    """The fields of the batch, in their order."""
    placement: Placement
    segments: dict[str, Any]

    @classmethod
    def of(
        cls,
        values: dict[str, Ragged],
        specs: dict[str, FieldSpec],
        names: tuple[str, ...],
        placement: Placement,
        device: torch.device | None = None,
    ) -> Columns:
        """Return columns on ``device`` (None: the host), with the segments of ``placement``."""

        def moved(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(device, non_blocking=True)

        host = placement.segments
        segments: dict[str, Any] = {
            name: unchecked(moved(column.values), column.offsets) for name, column in host.items()
        }
        segments["num_segments"] = moved(host["starts"].lengths.astype(np.int32))
        return cls(values, specs, names, placement, segments)

    @classmethod
    def none(cls) -> Columns:
        """Return the columns of a batch that was built from dense tensors: none."""
        return cls({}, {}, (), Placement(0, 0, 0, False, {}), {})

    def __bool__(self) -> bool:
        return bool(self.names)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.segments["num_segments"])

    def change(
        self,
        column: Callable[[str, Ragged], Ragged],
        counts: Callable[[str, Any], Any],
        **placement: Any,
    ) -> Columns:
        """Return a copy with every column and every count per segment changed."""
        on_host = {name: counts(name, column) for name, column in self.placement.segments.items()}
        return replace(
            self,
            values={name: column(name, values) for name, values in self.values.items()},
            segments={name: counts(name, column) for name, column in self.segments.items()},
            placement=replace(self.placement, segments=on_host, **placement),
        )

    @classmethod
    def cat(cls, columns: Sequence[Columns]) -> Columns:
        """Return the rows of all ``columns``; none where they are of different kinds."""
        first, placements = columns[0], [part.placement for part in columns]
        if any(part.values.keys() != first.values.keys() for part in columns):
            return cls.none()
        names, types = first.placement.segments, max(p.num_token_types for p in placements)
        on_host = {k: cat_rows([p.segments[k] for p in placements]) for k in names}
        return replace(
            first,
            values={k: cat_rows([part.values[k] for part in columns]) for k in first.values},
            segments={k: cat_rows([part.segments[k] for part in columns]) for k in first.segments},
            placement=replace(first.placement, segments=on_host, num_token_types=types),
        )

    def filled(self, values: dict[str, Any], segments: dict[str, Any]) -> Columns:
        """Return a copy with these tensors, which the placement shares in host memory."""
        if not self:
            return self
        if segments["num_segments"].device.type == "cpu":
            pairs = [
                (k, column, column.values.numpy())
                for k, column in segments.items()
                if k != "num_segments"
            ]
        else:  # copies, or they would keep the memory alive that the batch was moved out of
            pairs = [
                (k, column, column.values.copy()) for k, column in self.placement.segments.items()
            ]
        on_host = {k: unchecked(values, column.offsets) for k, column, values in pairs}
        placement = replace(self.placement, segments=on_host)
        return replace(self, values=values, segments=segments, placement=placement)

    def in_full(self) -> dict[str, Any]:
        """Return the columns in the dtypes of their dense fields, and where they lie."""
        columns = {
            name: Ragged(column.values.to(self.specs[name].dtype), column.offsets)
            for name, column in self.values.items()
        }
        sizes = {k: value for k, value in vars(self.placement).items() if k != "segments"}
        return columns | {"placement": {**self.placement.segments, **sizes}}

    @property
    def target(self) -> str:
        """The column that the loss fields follow from."""
        return "loss_weights" if "loss_weights" in self.values else "labels"

    def is_trained(self) -> Tensor:
        """Return whether each entry of the target is trained, bool."""
        values: Tensor = self.values[self.target].values
        if values.dtype == torch.bool:
            return values
        return values != (IGNORE_INDEX if self.target == "labels" else 0)

    def num_trained(self) -> np.ndarray:
        """Return the loss tokens of each row, int64 [R]; reads the device."""
        return sums_per_row(self.is_trained().cpu().numpy(), self.values[self.target].offsets)


_SMALL = 2048  # bytes
_ARRAYS: Key = ("arrays", "")
_MORE_MEMORY = (
    "where shared memory is full, give the container more of it (docker run --shm-size=8g), or "
    "take fewer workers, a lower prefetch_factor or smaller batches"
)
_PLAIN_METADATA = "take what pickle refuses out of row_metadata and metadata"


@dataclass(frozen=True)
class Storage:
    """Columns (none unless a collator made the batch), dense fields as they are, metadata."""

    columns: Columns
    given: dict[str, Field]
    row_metadata: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    buffer: tuple[Tensor, dict[Key, FieldSlot]] | None = field(default=None, compare=False)
    """The buffer that holds all tensors of a batch that was moved or sent, and their places."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        if self.columns:
            return self.columns.num_rows
        return len(next(iter(self.given.values())))

    @property
    def names(self) -> dict[str, None]:
        """Names of the fields, in their order."""
        return dict.fromkeys((*self.columns.names, *self.given))

    def check(self) -> None:
        """Check that fields and row metadata have one entry per row."""
        if not self.names:
            raise ValueError("a Batch needs at least one field, got none; rows are counted there")
        if "cu_seq_lens" in self.given and "max_segment_length" not in self.row_metadata:
            raise ValueError(
                "a packed batch (it has cu_seq_lens) was rebuilt without its metadata, as "
                "transformers.Trainer and DataLoader(batch_size=None) do, and would reach a model "
                "with a mask that lets its examples see each other; for Trainer pass "
                "collate.for_trainer(), for the DataLoader a collate_fn that changes nothing"
            )
        for key, value in self.row_metadata.items():
            if not is_per_row(value):
                raise TypeError(
                    f"row_metadata[{key!r}] must be a list, ndarray, tensor or Ragged with one "
                    f"entry per row, got {type(value).__name__}; what belongs to the whole batch "
                    "goes into metadata"
                )
        per_row = {f"row_metadata[{k!r}]": v for k, v in self.row_metadata.items()}
        for name, value in (self.given | per_row).items():
            if len(value) != self.num_rows:
                first = next(iter(self.names))
                raise ValueError(f"{name} has {len(value)} rows, but {first} has {self.num_rows}")

    def with_given(self, fields: dict[str, Field]) -> Storage:
        """Return a copy with fields added or replaced."""
        return replace(self, given={**self.given, **fields}, buffer=None) if fields else self

    def change(self, change_rows: Callable[[Any], Any]) -> Storage:
        """Return a copy with other rows; ``change_rows`` maps anything with one entry per row."""

        def changed(_: str, value: Any) -> Any:
            return change_rows(value)

        return Storage(
            self.columns.change(changed, changed),
            {name: change_rows(value) for name, value in self.given.items()},
            {key: change_rows(value) for key, value in self.row_metadata.items()},
            self.metadata,
        )

    def equals(self, other: Storage) -> bool | None:
        """Return whether all is equal; None where equal fields may be stored in other forms."""
        pairs = [
            (storage.row_metadata, storage.metadata, dict(storage.names))
            for storage in (self, other)
        ]
        if not all(map(equal_values, *pairs)):
            return False
        mine, theirs = self.contents(), other.contents()
        if equal_values(mine, theirs):
            return True
        if mine["given"] or theirs["given"]:
            return None
        return False if mine["columns"].keys() == theirs["columns"].keys() else None

    def items(self) -> dict[Key, Field]:
        """Return everything that is stored on the device, by its kind and name."""
        columns = self.columns
        kinds = {"given": self.given, "columns": columns.values, "segments": columns.segments}
        return {
            (kind, name): value for kind, values in kinds.items() for name, value in values.items()
        }

    def contents(self) -> dict[str, Any]:
        """Return the dense fields as they are, and the columns in the dtypes of dense fields."""
        columns = {"columns": self.columns.in_full()} if self.columns else {}
        return {"given": self.given, **columns}

    @property
    def nbytes(self) -> int:
        """Number of bytes stored on the device."""
        return sum(tensor_of(value).nbytes for value in self.items().values())

    def row_shapes(self) -> dict[str, list[int]]:
        """Return the row shapes of the fields whose shape differs from batch to batch."""
        shapes: dict[str, list[int]] = {}
        if self.columns:
            placement = self.columns.placement
            width = placement.tree_width or placement.width
            shapes = {"input_ids": [width], "loss_mask": [placement.response_length]}
        tensors = {k: v for k, v in self.given.items() if isinstance(v, Tensor)}
        return shapes | {name: list(tensor.shape[1:]) for name, tensor in tensors.items()}

    def num_tokens(self, count: str = "lengths") -> np.ndarray | None:
        """Return the tokens (or ``"responses"``) of each row, int64 [R]; None if not known."""
        counts = self.columns.placement.segments.get(count)
        return None if counts is None else sums_per_row(counts.values, counts.offsets)

    def with_divisor(self, divisor: int) -> Storage:
        """Return a copy whose ``loss_mask`` is divided by ``divisor``, when it is made or now."""
        before = self.metadata.get("loss_mask_divisor", 1)
        mask: Any = self.given.get("loss_mask")
        storage = replace(self, metadata={**self.metadata, "loss_mask_divisor": divisor})
        return storage.with_given({} if mask is None else {"loss_mask": mask * (before / divisor)})

    def in_one_buffer(self, *, pin: bool = False) -> tuple[Tensor, dict[Key, FieldSlot]]:
        """Return the content in one buffer, and its places there; copied unless it is in one."""
        return gather(self.items(), pin=pin) if self.buffer is None else self.buffer

    def moved(self, device: torch.device, *, non_blocking: bool) -> Storage | None:
        """Return a copy in one buffer on ``device``; None if all of it is there."""
        stored = [tensor_of(value) for value in self.items().values()]
        if all(tensor.device == device for tensor in stored):
            return None
        pin = non_blocking and all(tensor.is_pinned() for tensor in stored if len(tensor))
        buffer, slots = self.in_one_buffer(pin=pin)  # rows of a pinned batch stay pinned
        return self._carved(buffer.to(device, non_blocking=non_blocking), slots)

    def pinned(self) -> Storage | None:
        """Return a copy in page-locked memory; None if some of it is not in host memory."""
        if any(tensor_of(value).device.type != "cpu" for value in self.items().values()):
            return None
        buffer, slots = self.in_one_buffer()
        return self._carved(buffer.pin_memory(), slots)

    def _carved(self, buffer: Tensor, slots: dict[Key, FieldSlot]) -> Storage:
        return _rebuilt(buffer, slots, self.columns, self.row_metadata, self.metadata)

    def __reduce__(self) -> tuple[Any, ...]:
        on_host = all(tensor_of(value).device.type == "cpu" for value in self.items().values())
        columns = replace(self.columns, values={}, segments={})
        if on_host:  # the placement is in the buffer
            columns = replace(columns, placement=replace(columns.placement, segments={}))
        others = columns, _owned(self.row_metadata), self.metadata
        if on_host and get_worker_info() is not None:  # its batches go to another process
            try:
                return self._sent(others)
            except Exception as error:  # which a worker would print, and send nothing
                is_memory = isinstance(error, OSError | RuntimeError)
                way_out = _MORE_MEMORY if is_memory else _PLAIN_METADATA
                return _not_sent, (self.nbytes, f"{type(error).__name__}: {error}", way_out)
        return _rebuilt, (*self.in_one_buffer(), *others)

    def _sent(self, others: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the parts in shared memory, with arrays of the metadata and offsets.

        A pipe holds 64 KB. What does not fit waits there for the reader, and then the worker copies
        its next batch while the reader waits to get the memory of this one: 3 ms of 12 MB.
        """
        arrays: list[memoryview] = []

        def is_small(array: pickle.PickleBuffer) -> bool:  # it stays in the message, then
            if len(content := array.raw()) < _SMALL:
                return True
            arrays.append(content)
            return False

        items = self.items()
        parts = slots_of(items), *others
        message = pickle.dumps(parts, protocol=5, buffer_callback=is_small)
        joined = torch.from_numpy(np.frombuffer(bytearray().join(arrays), dtype=np.uint8))
        buffer, slots = gather({**items, _ARRAYS: joined}, share=True)
        stops = slots[_ARRAYS].start + np.cumsum([0, *map(len, arrays)])
        return _received, (buffer, stops.tolist(), message)


def _received(buffer: Tensor, stops: list[int], message: bytes) -> Storage:
    content = buffer.numpy()
    arrays = [content[a:b].copy() for a, b in pairwise(stops)]  # they may outlive the batch
    return _rebuilt(buffer, *pickle.loads(message, buffers=arrays))


def _owned(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy whose tensors own their storage: a view would ship a whole batch."""
    return {
        k: v.clone() if isinstance(v, Tensor) and v.nbytes < v.untyped_storage().nbytes() else v
        for k, v in values.items()
    }


def _not_sent(nbytes: int, error: str, way_out: str) -> Any:
    """Raise, where the batch is received."""
    raise RuntimeError(
        f"a DataLoader worker could not send a batch of {nbytes:,} bytes: {error}; {way_out}"
    )


def _rebuilt(
    buffer: Tensor,
    slots: dict[Key, FieldSlot],
    columns: Columns,
    row_metadata: dict[str, Any],
    metadata: dict[str, Any],
) -> Storage:
    parts: dict[str, dict[str, Any]] = {"given": {}, "columns": {}, "segments": {}}
    for (kind, name), value in carve(buffer, slots).items():
        parts[kind][name] = value
    columns = columns.filled(parts["columns"], parts["segments"])
    return Storage(columns, parts["given"], row_metadata, metadata, (buffer, slots))
