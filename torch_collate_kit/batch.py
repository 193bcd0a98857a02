"""Batch: rows-first named tensors and ragged fields in one buffer, and metadata beside them."""

from __future__ import annotations

import math
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from operator import index
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit._added_rows import IGNORE_INDEX, clear_added_rows
from torch_collate_kit._attention_inputs import (
    block_mask,
    flat_cu_seq_lens,
    is_varlen,
    refuse_unknown_mask,
    segments_of_cells,
)
from torch_collate_kit._host_memory import host_bytes
from torch_collate_kit._joining import check_joinable
from torch_collate_kit._rows import cat, equal, is_per_row, take
from torch_collate_kit.packing._checks import checked_bool, checked_int
from torch_collate_kit.ragged import Ragged, row_indices

__all__ = ["IGNORE_INDEX", "Batch"]

_FIELD_ALIGNMENT = 64  # bytes: a cache line, and enough for every vector load
_IMAGE_FIELDS = ("pixel_values", "image_grid_thw")

Field = Tensor | Ragged


class _Slot(NamedTuple):
    """Where a field lies in the buffer; ``offsets`` is set for a ragged field."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: np.ndarray | None


class Batch(Mapping[str, Field]):
    """A training batch: named fields with rows first, plus ``metadata``.

    Fields are tensors ``[R, ...]`` or :class:`Ragged` with ``R`` rows. ``len(batch)`` is ``R``.
    ``batch["input_ids"]`` is a field, ``batch[2:5]`` a Batch of these rows (views). Which fields a
    collator gives, their dtypes and what pads hold is written down in docs/contract.md.

    ``metadata`` values that are a list, ndarray, tensor or Ragged have one entry a row and are
    sliced with the rows; all others (numbers, strings, tuples, dicts) belong to the batch as it was
    collated and stay, so that ``metadata["num_loss_tokens"]`` remains the divisor of the loss.

    A collator's batch is one allocation of which the fields are views: moving, pinning and sending
    it from a DataLoader worker is one copy each. A Batch built from loose tensors, or a slice, is
    gathered into one buffer when it is moved or pickled.

    Raises:
        ValueError: fields or row metadata that disagree in the number of rows.

    >>> batch = Batch({"input_ids": torch.tensor([[1, 2], [3, 4]])}, {"uids": ["a", "b"]})
    >>> len(batch), batch[1:]["input_ids"].tolist(), batch[1:].metadata
    (2, [[3, 4]], {'uids': ['b']})
    """

    def __init__(
        self, fields: Mapping[str, Field], metadata: Mapping[str, Any] | None = None
    ) -> None:
        if not fields:
            raise ValueError("a Batch needs at least one field, got none; rows are counted there")
        for name, field in fields.items():
            if not isinstance(field, Ragged) and (not isinstance(field, Tensor) or not field.ndim):
                raise TypeError(
                    f"field {name} must be a tensor with rows first or a Ragged, got "
                    f"{type(field).__name__}; what belongs to the whole batch goes into metadata"
                )
        self._fields = dict(fields)
        self.metadata: dict[str, Any] = dict(metadata or {})
        if "cu_seq_lens" in self._fields and "max_segment_length" not in self.metadata:
            raise ValueError(
                "a packed batch (it has cu_seq_lens) was rebuilt without its metadata, as "
                "transformers.Trainer and DataLoader(batch_size=None) do, and would reach a model "
                "with a mask that lets its examples see each other; for Trainer make the collator "
                "with model_inputs=True, for the DataLoader pass a collate_fn that changes nothing"
            )
        self._num_rows = len(next(iter(self._fields.values())))
        self._buffer: Tensor | None = None
        self._slots: dict[str, _Slot] = {}
        per_row = {f"metadata[{k!r}]": v for k, v in self.metadata.items() if is_per_row(v)}
        for name, value in (self._fields | per_row).items():
            if len(value) != self._num_rows:
                raise ValueError(
                    f"{name} has {len(value)} rows, but {next(iter(self._fields))} has "
                    f"{self._num_rows}; metadata of the whole batch goes into a tuple or a dict"
                )

    @classmethod
    def allocate(
        cls,
        specs: Mapping[str, tuple[tuple[Any, ...] | np.ndarray, torch.dtype]],
        metadata: Mapping[str, Any] | None = None,
        *,
        like: Tensor | None = None,
    ) -> Batch:
        """A Batch of uninitialised fields carved from one new buffer, by default in host memory.

        ``like``: on the device of this tensor, and page-locked if it is.

        ``specs`` maps a name to ``(shape, dtype)``, or for a ragged field to ``(offsets, dtype)``;
        with offsets for its first dimension a shape is that of a ragged field of ``[T, ...]``.

        >>> specs = {"a": ((2, 3), torch.int64), "b": (np.array([0, 1, 4]), torch.int32)}
        >>> batch = Batch.allocate(specs)
        >>> batch["a"].shape, batch["b"].lengths.tolist()
        (torch.Size([2, 3]), [1, 3])
        """
        slots, end = {}, 0
        for name, (shape, dtype) in specs.items():
            first, *rest = (shape,) if isinstance(shape, np.ndarray) else shape
            offsets = first if isinstance(first, np.ndarray) else None
            dims = tuple(map(index, (first if offsets is None else offsets[-1], *rest)))
            start = -(-end // _FIELD_ALIGNMENT) * _FIELD_ALIGNMENT
            slots[name] = _Slot(start, dims, dtype, offsets)
            end = start + math.prod(dims) * dtype.itemsize
        # torch.load refuses a storage whose size is no multiple of the saved view's item size
        end = -(-end // _FIELD_ALIGNMENT) * _FIELD_ALIGNMENT
        device = torch.device("cpu") if like is None else like.device
        pin_memory = like is not None and device.type == "cpu" and like.is_pinned()
        if device.type == "cpu" and not pin_memory:
            buffer = host_bytes(end)
        else:
            buffer = torch.empty(end, dtype=torch.uint8, device=device, pin_memory=pin_memory)
        return cls._carve(buffer, slots, metadata)

    @classmethod
    def _carve(
        cls, buffer: Tensor, slots: Mapping[str, _Slot], metadata: Mapping[str, Any] | None
    ) -> Batch:
        fields: dict[str, Field] = {}
        for name, (start, shape, dtype, offsets) in slots.items():
            stop = start + math.prod(shape) * dtype.itemsize
            values = buffer[start:stop].view(dtype).view(shape)
            fields[name] = values if offsets is None else Ragged(values, offsets)
        batch = cls(fields, metadata)
        batch._buffer, batch._slots = buffer, dict(slots)
        return batch

    def _tensors(self) -> Iterator[Tensor]:
        for field in self._fields.values():
            yield torch.as_tensor(field.values) if isinstance(field, Ragged) else field

    def _in_one_buffer(self) -> Batch:
        """This batch, or a copy gathered into one buffer where it is a slice or loose tensors."""
        if self._buffer is not None:
            return self
        specs: dict[str, tuple[Any, torch.dtype]] = {}
        for name, field in self._fields.items():
            if isinstance(field, Ragged):
                values = torch.as_tensor(field.values)
                shape = (field.offsets - field.offsets[0], *values.shape[1:])
                specs[name] = (shape, values.dtype)
            else:
                specs[name] = (tuple(field.shape), field.dtype)
        copy = Batch.allocate(specs, self.metadata, like=next(iter(self._tensors())))
        for name, field in self._fields.items():
            source = torch.as_tensor(field.flat_values) if isinstance(field, Ragged) else field
            target = copy[name]
            (target.values if isinstance(target, Ragged) else target).copy_(source)
        return copy

    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> Batch: ...
    def __getitem__(self, key: str | slice) -> Any:
        if isinstance(key, str):
            return self._fields[key]
        if not isinstance(key, slice):
            raise TypeError(
                f"a Batch is indexed by a field name or a slice of rows, got {key!r}; "
                "one row is batch[i:i + 1], rows in any order are batch.select(indices)"
            )
        start, stop, step = key.indices(len(self))
        if step < 1:
            raise ValueError(f"rows cannot be sliced with step {step}; use batch.select(indices)")
        rows = slice(start, stop, step)
        metadata = {k: v[rows] if is_per_row(v) else v for k, v in self.metadata.items()}
        return Batch({name: field[rows] for name, field in self._fields.items()}, metadata)

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return self._num_rows

    def __contains__(self, key: object) -> bool:
        return key in self._fields

    def keys(self) -> KeysView[str]:
        return self._fields.keys()

    def items(self) -> ItemsView[str, Field]:
        return self._fields.items()

    def values(self) -> ValuesView[Field]:
        return self._fields.values()

    def __eq__(self, other: object) -> bool:
        """The same fields with equal dtypes, shapes and values, and equal metadata."""
        if not isinstance(other, Batch):
            return NotImplemented
        same_names = self.keys() == other.keys() and self.metadata.keys() == other.metadata.keys()
        return (
            same_names
            and all(equal(field, other[name]) for name, field in self.items())
            and all(equal(value, other.metadata[k]) for k, value in self.metadata.items())
        )

    __hash__ = None  # type: ignore[assignment]

    def with_fields(self, **fields: Field) -> Batch:
        """The same rows with fields added or replaced; nothing is copied.

        >>> batch = Batch({"input_ids": torch.tensor([[5], [6]])})
        >>> list(batch.with_fields(advantages=torch.zeros(2, 1)))
        ['input_ids', 'advantages']
        """
        return Batch({**self._fields, **fields}, self.metadata)

    def chunk(self, num_chunks: int) -> list[Batch]:
        """The rows in ``num_chunks`` equal runs (views): chunk ``r`` is rank ``r``'s part.

        Raises:
            ValueError: rows that do not divide.

        >>> [c["x"].tolist() for c in Batch({"x": torch.arange(4)}).chunk(2)]
        [[0, 1], [2, 3]]
        """
        num_chunks = index(num_chunks)
        if num_chunks < 1 or len(self) % num_chunks:
            raise ValueError(
                f"{len(self)} rows do not divide into {num_chunks} equal chunks; "
                "add zero-loss rows with batch.pad_rows(multiple_of=...)"
            )
        size = len(self) // num_chunks
        return [self[i * size : (i + 1) * size] for i in range(num_chunks)]

    def select(self, indices: Sequence[int] | np.ndarray | Tensor) -> Batch:
        """The named rows, in that order and as often as named: a copy.

        >>> Batch({"x": torch.arange(4)}).select([3, 0])["x"].tolist()
        [3, 0]
        """
        rows = row_indices(indices)
        if rows.ndim != 1 or ((rows < 0) | (rows >= len(self))).any():
            raise IndexError(f"rows {rows.tolist()} of a batch with {len(self)} rows")
        fields = {name: take(field, rows) for name, field in self._fields.items()}
        return Batch(
            fields, {k: take(v, rows) if is_per_row(v) else v for k, v in self.metadata.items()}
        )

    @classmethod
    def cat(cls, batches: Sequence[Batch], metadata: Mapping[str, Any] | None = None) -> Batch:
        """The rows of all batches, one after the other: a copy.

        Row metadata is concatenated; batch metadata must agree, ``metadata`` overrides it.

        Raises:
            ValueError: no batches, other fields, other widths, or metadata that disagrees.

        >>> Batch.cat(Batch({"x": torch.arange(4)}).chunk(2))["x"].tolist()
        [0, 1, 2, 3]
        """
        if not batches:
            raise ValueError("Batch.cat needs at least one batch, got none")
        first, merged = batches[0], dict(metadata or {})
        check_joinable(batches, overrides=merged)
        for key, value in first.metadata.items():
            per_row = is_per_row(value)
            merged.setdefault(key, cat([b.metadata[key] for b in batches]) if per_row else value)
        return cls({name: cat([b[name] for b in batches]) for name in first}, merged)

    def pad_rows(self, *, multiple_of: int) -> Batch:
        """Rows added at the end until ``multiple_of`` divides them: a copy, or self if it does.

        An added row repeats row 0, so that every model can run it, with zero loss, and without
        sub-sequences: labels -100; loss_mask, response_mask, rewards, advantages, returns, and
        every floating-point field of the shape of a mask 0; ``router_padding_mask`` True and
        ``rollout_expert_indices`` what pads hold; ``sub_seq_lengths`` and ragged metadata
        empty; metadata ``is_last_step`` True, a trajectory of its own that no other row continues.
        Other metadata, ``uids`` and ``trajectory_ids`` too, repeats row 0's.
        ``metadata["num_dummy_rows"]`` counts them.

        >>> batch = Batch({"input_ids": torch.tensor([[5]]), "loss_mask": torch.tensor([[1.0]])})
        >>> padded = batch.pad_rows(multiple_of=2)
        >>> padded["input_ids"].tolist(), padded["loss_mask"].tolist(), padded.metadata
        ([[5], [5]], [[1.0], [0.0]], {'num_dummy_rows': 1})
        """
        added = -len(self) % checked_int("multiple_of", multiple_of)
        if not added:
            return self
        padded = self.select([*range(len(self)), *[0] * added])
        clear_added_rows(padded._fields, padded.metadata, self, added)
        padded.metadata["num_dummy_rows"] = self.metadata.get("num_dummy_rows", 0) + added
        return padded

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Batch:
        """The batch on ``device``, by one copy of its buffer; offsets and metadata stay.

        ``non_blocking=True`` overlaps with compute only from pinned memory.
        """
        if isinstance(device, torch.dtype):
            raise TypeError(f"Batch.to takes a device, got {device}; fields keep their dtypes")
        whole = self._in_one_buffer()
        assert whole._buffer is not None
        buffer = whole._buffer.to(device, non_blocking=non_blocking)
        if buffer is whole._buffer:
            return whole
        return self._carve(buffer, whole._slots, self.metadata)

    def pin_memory(self) -> Batch:
        """The batch in page-locked host memory, by one copy; DataLoader calls it to pin."""
        whole = self._in_one_buffer()
        assert whole._buffer is not None
        return self._carve(whole._buffer.pin_memory(), whole._slots, self.metadata)

    def model_inputs(
        self,
        attention: str = "torch_varlen",
        *,
        labels: bool = True,
        mask: Literal["block"] | None = None,
        sliding_window: int | None = None,
    ) -> dict[str, Any]:
        """What ``model(**inputs)`` of a transformers model needs: views, in a plain dict.

        ``input_ids``, ``position_ids`` and ``use_cache=False``, and ``labels`` where the batch has
        them, unless ``labels=False``, which spares the model a loss of its own beside yours. With
        images, ``pixel_values`` and ``image_grid_thw`` of all rows in place of ``position_ids``,
        which the model makes of the grids. A padded batch adds ``attention_mask``. A packed batch
        never adds that 2-D mask, since it makes transformers ignore the segments; for varlen
        ``attention`` it adds ``cu_seq_lens_q/k`` (int32, flat over the rows) and
        ``max_length_q/k`` (Python ints), for "sdpa" and "eager" the restarting position ids do the
        work.

        ``mask="block"`` is for packed rows of models whose mask does not see the position ids
        (docs/contract.md names them; :func:`check_isolation` tells): ``attention_mask`` is then a
        causal mask ``[R, 1, W, W]`` of a block per segment, made for "sdpa" or "eager" on the
        device of the batch. It replaces the masks of the model, so for one with sliding-window
        layers (gpt-oss) pass ``sliding_window=model.config.sliding_window``: then it is a dict of
        a mask for each kind of layer.

        Raises:
            ValueError: an unknown ``attention`` or ``mask``, or one without the other it needs;
                more cells than int32 boundaries count.
        """
        checked_bool("labels", labels)
        varlen = is_varlen(attention)
        refuse_unknown_mask(attention, mask, sliding_window)
        # a vision model makes positions of its own, by the grids of the images
        names = ("input_ids", *(() if "pixel_values" in self else ("position_ids",)))
        inputs: dict[str, Any] = {name: self._fields[name] for name in names}
        if labels and "labels" in self:
            inputs["labels"] = self._fields["labels"]
        inputs |= {name: self[name].flat_values for name in _IMAGE_FIELDS if name in self}
        inputs["use_cache"] = False
        if "cu_seq_lens" not in self:
            inputs["attention_mask"] = self._fields["attention_mask"]
        elif varlen or mask is not None:
            shape = inputs["input_ids"].shape
            flat = flat_cu_seq_lens(self["cu_seq_lens"], shape[1])
            if mask is not None:
                cells = segments_of_cells(flat, shape)
                inputs["attention_mask"] = block_mask(cells, attention, window=sliding_window)
                return inputs
            inputs["cu_seq_lens_q"] = inputs["cu_seq_lens_k"] = flat
            longest = max(self.metadata["max_segment_length"], default=0)
            inputs["max_length_q"] = inputs["max_length_k"] = longest
        return inputs

    def __reduce__(self) -> tuple[Any, ...]:
        whole = self._in_one_buffer()
        return _rebuild, (whole._buffer, whole._slots, _owned(self.metadata))

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{name}: {field!r}" if isinstance(field, Ragged) else f"{name}: {list(field.shape)}"
            for name, field in self._fields.items()
        )
        return f"Batch({len(self)} rows; {fields})"


def _rebuild(buffer: Tensor, slots: dict[str, _Slot], metadata: dict[str, Any]) -> Batch:
    return Batch._carve(buffer, slots, metadata)


def _owned(metadata: dict[str, Any]) -> dict[str, Any]:
    """Metadata whose tensors own their storage: a view would ship the rows of the whole batch."""
    return {
        k: v.clone() if isinstance(v, Tensor) and v.nbytes < v.untyped_storage().nbytes() else v
        for k, v in metadata.items()
    }
