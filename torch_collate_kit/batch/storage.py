"""The content of a batch at rest: columns, dense fields given or changed, and metadata."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from torch_collate_kit.batch import rows
from torch_collate_kit.batch.buffer import Key, Slot, carve, gather, slots_of, tensor_of
from torch_collate_kit.batch.columns import Columns
from torch_collate_kit.batch.fields import Field
from torch_collate_kit.batch.placement import sums_per_row

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
    buffer: tuple[Tensor, dict[Key, Slot]] | None = field(default=None, compare=False)
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
            if not rows.is_per_row(value):
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
        pairs = [(of.row_metadata, of.metadata, dict(of.names)) for of in (self, other)]
        if not all(map(rows.equal, *pairs)):
            return False
        mine, theirs = self.contents(), other.contents()
        if rows.equal(mine, theirs):
            return True
        if mine["given"] or theirs["given"]:
            return None
        return False if mine["columns"].keys() == theirs["columns"].keys() else None

    def items(self) -> dict[Key, Field]:
        """Return everything that is stored on the device, by its kind and name."""
        columns = self.columns
        kinds = {"given": self.given, "columns": columns.values, "segments": columns.segments}
        return {(kind, name): value for kind, of in kinds.items() for name, value in of.items()}

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

    def num_loss_tokens(self) -> np.ndarray | None:
        """Return the trained cells of each row, int64 [R]; reads the device."""
        if self.columns and "loss_mask" not in self.given:
            return self.columns.num_trained()
        mask: Any = self.given.get("loss_mask")
        return None if mask is None else (mask != 0).flatten(1).sum(dim=1).cpu().numpy()

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

    def in_one_buffer(self, *, pin: bool = False) -> tuple[Tensor, dict[Key, Slot]]:
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

    def _carved(self, buffer: Tensor, slots: dict[Key, Slot]) -> Storage:
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
    slots: dict[Key, Slot],
    columns: Columns,
    row_metadata: dict[str, Any],
    metadata: dict[str, Any],
) -> Storage:
    parts: dict[str, dict[str, Any]] = {"given": {}, "columns": {}, "segments": {}}
    for (kind, name), value in carve(buffer, slots).items():
        parts[kind][name] = value
    columns = columns.filled(parts["columns"], parts["segments"])
    return Storage(columns, parts["given"], row_metadata, metadata, (buffer, slots))
