"""Dense fields from columns: one torch implementation for the CPU and CUDA.

Every size is known in host memory, so nothing waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.batch.columns import Columns
from torch_collate_kit.batch.fields import (
    IGNORE_INDEX,
    Field,
    FieldSpec,
    PerExample,
    PerImage,
    PerResponseToken,
    PerToken,
)
from torch_collate_kit.ragged import Ragged

__all__ = ["cells_of_responses", "make_field"]


def make_field(
    name: str, columns: Columns, made: dict[str, Tensor], metadata: Mapping[str, Any]
) -> Field:
    """The dense field; ``made`` keeps what several fields need.

    ``metadata["loss_mask_divisor"]`` divides the loss mask.
    """
    with torch.inference_mode(False):  # or changes of the tensor could not be told
        maker = _Maker(columns, made)
        if name in columns.specs:
            return _own(name, columns.specs[name], maker, columns)
        return _DERIVED[name](maker, columns, metadata)


def cells_of_responses(columns: Columns, made: dict[str, Tensor]) -> Tensor:
    """int64 [n], the cell of every response token in ``[R, A]``; ``made`` keeps it."""
    with torch.inference_mode(False):
        return _Maker(columns, made).response_cells()


class _Maker:
    """Makes the dense fields of one batch; what several of them need is made once."""

    def __init__(self, columns: Columns, made: dict[str, Tensor]) -> None:
        self._columns, self._made = columns, made
        placement = columns.placement
        self.width, self.num_columns = placement.width, placement.response_length
        self.num_rows, self.pad_token_id = columns.num_rows, placement.pad_token_id
        self.is_packed = placement.is_packed

    def flat(self, column: str) -> Tensor:
        values: Tensor = self._columns.values[column].flat_values
        return values

    def has(self, column: str) -> bool:
        return column in self._columns.values

    def count_of(self, column: str) -> str:
        count = self._columns.count_of(column)
        assert count is not None
        return count

    def row_of_segment(self) -> Tensor:
        """int64 [Q]."""
        num_segments: Any = self._columns.segments["num_segments"]
        rows = torch.arange(self.num_rows, device=num_segments.device)
        total = len(self._columns.placement.segments["starts"].flat_values)
        return torch.repeat_interleave(rows, num_segments, output_size=total)

    def starts(self) -> Tensor:
        """int64 [Q], the first cell of each segment, counted over all rows."""
        starts = self._columns.segments["starts"].flat_values
        return starts + self.row_of_segment() * self.width

    def spans(self, count: str) -> tuple[Tensor, Tensor]:
        """int64 [Q]: where the counted tokens of each segment begin, and how many they are."""
        segments: Any = self._columns.segments
        number, starts = segments[count].flat_values, self.starts()
        if count == "responses":
            starts = starts + segments["lengths"].flat_values - number
        return starts, number

    def cells(self, count: str) -> Tensor:
        """int64, the cell over all rows of every counted token."""
        key = f"cells of {count}"
        if key not in self._made:
            starts, number = self.spans(count)
            total = int(self._columns.placement.segments[count].flat_values.sum())
            before = torch.cumsum(number, 0) - number
            self._made[key] = _counted_up(starts - before, before, total)
        return self._made[key]

    def response_cells(self) -> Tensor:
        """int64, the cell of every response token in ``[R, A]``."""
        key = "response cells"
        if key not in self._made:
            hidden = self.width - self.num_columns
            number: Any = self._columns.segments["responses"].flat_values
            shift = (self.row_of_segment() + 1) * hidden
            cells = self.cells("responses")
            per_token = torch.repeat_interleave(shift, number, output_size=len(cells))
            self._made[key] = cells - per_token
        return self._made[key]

    def in_cells(self, values: Tensor, count: str, pad: Any) -> Tensor:
        """Values per counted token as ``[R, W]``; a new tensor of their dtype."""
        dense = _full(self.num_rows * self.width, pad, like=values)
        return dense.scatter_(0, self.cells(count), values).view(self.num_rows, self.width)

    def in_response(self, values: Tensor, count: str, pad: Any) -> Tensor:
        """Values per counted token as ``[R, A]``, right-aligned; those further left are lost."""
        if count == "responses":
            dense = _full(self.num_rows * self.num_columns, pad, like=values)
            dense = dense.scatter_(0, self.response_cells(), values)
            return dense.view(self.num_rows, self.num_columns)
        return self.in_cells(values, count, pad)[:, self.width - self.num_columns :].contiguous()

    def weights(self) -> tuple[Tensor, str]:
        """The loss weights, of any dtype, and what has one."""
        if self.has("labels"):
            return self.flat("labels") != IGNORE_INDEX, "lengths"
        return self.flat("loss_weights"), self.count_of("loss_weights")


def _full(size: int, value: Any, *, like: Tensor) -> Tensor:
    """A new flat tensor.

    In host memory NumPy allocates it, since that asks for pages of 2 MB: touching fresh memory in
    pages of 4 KB takes up to eight times as long as filling it.
    """
    if like.device.type != "cpu" or not size:
        return like.new_full((size,), value)
    fresh = torch.from_numpy(np.empty(size * like.dtype.itemsize, dtype=np.uint8))
    return fresh.view(like.dtype).fill_(value)


def _counted_up(shifts: Tensor, starts: Tensor, size: int) -> Tensor:
    """``t + shifts[q]`` for all t below ``size``, where q is the last segment that begins by t.

    ``starts`` do not fall. A running sum needs no other array of that size.
    """
    steps = _full(size + 1, 1, like=shifts)  # segments without tokens may begin after the last one
    steps[:1] = 0
    steps.scatter_add_(0, starts, torch.diff(shifts, prepend=shifts.new_zeros(1)))
    return torch.cumsum(steps, 0, out=steps)[:size]


def _own(name: str, spec: FieldSpec, maker: _Maker, columns: Columns) -> Field:
    """A field that has a column of its own."""
    if isinstance(spec, PerExample | PerImage):
        column: Any = columns.values[name]
        return Ragged(column.flat_values.to(spec.dtype), column.offsets - column.offsets[0])
    values = maker.flat(name).to(spec.dtype)
    if isinstance(spec, PerToken):
        return maker.in_cells(values, "lengths", spec.pad)
    if isinstance(spec, PerResponseToken):
        return maker.in_response(values, "responses", spec.pad)
    top_k = values.shape[-1]
    shape = (maker.num_rows * maker.width, *values.shape[1:])
    experts = torch.arange(top_k, dtype=spec.dtype, device=values.device)
    dense = experts.expand(shape).clone().index_copy_(0, maker.cells("routed"), values)
    return dense.view(maker.num_rows, maker.width, *values.shape[1:])


def _input_ids(maker: _Maker, *_: Any) -> Tensor:
    return maker.in_cells(maker.flat("input_ids").long(), "lengths", maker.pad_token_id)


def _attention_mask(maker: _Maker, *_: Any) -> Field:
    starts, lengths = maker.spans("lengths")
    size = maker.num_rows * maker.width
    changes = _full(size + 1, 0, like=starts)  # 1 where tokens begin, -1 where they end
    ones = torch.ones_like(starts)
    changes.scatter_add_(0, starts, ones).scatter_add_(0, starts + lengths, -ones)
    return torch.cumsum(changes, 0, out=changes)[:size].view(maker.num_rows, maker.width)


def _position_ids(maker: _Maker, columns: Columns, _: Any) -> Field:
    if maker.is_packed:  # segments cover their rows
        starts, size = maker.starts(), maker.num_rows * maker.width
        return _counted_up(-starts, starts, size).view(maker.num_rows, maker.width)
    lengths: Any = columns.segments["lengths"].flat_values
    before = torch.cumsum(lengths, 0) - lengths
    positions = _counted_up(-before, before, len(maker.cells("lengths")))
    return maker.in_cells(positions, "lengths", 0)


def _labels(maker: _Maker, columns: Columns, _: Any) -> Field:
    if maker.has("labels"):
        return maker.in_cells(maker.flat("labels").long(), "lengths", IGNORE_INDEX)
    weights, count = maker.weights()
    ids = maker.flat("input_ids").long()
    if count != "lengths":
        ids = _input_ids(maker).view(-1).gather(0, maker.cells(count))
    return maker.in_cells(torch.where(weights != 0, ids, IGNORE_INDEX), count, IGNORE_INDEX)


def _loss_mask(maker: _Maker, columns: Columns, metadata: Mapping[str, Any]) -> Field:
    weights, count = maker.weights()
    mask = maker.in_response(weights.float(), count, 0)
    divisor = metadata.get("loss_mask_divisor", 1)
    # by a tensor: CUDA multiplies by the reciprocal of a number, which is off by a bit
    return mask if divisor == 1 else mask.div_(mask.new_full((), divisor))


def _response_mask(maker: _Maker, *_: Any) -> Field:
    cells = maker.response_cells()
    return maker.in_response(torch.ones_like(cells), "responses", 0)


def _router_padding_mask(maker: _Maker, *_: Any) -> Field:
    cells = maker.cells("routed")
    values = torch.zeros_like(cells, dtype=torch.bool)
    return maker.in_cells(values, "routed", True)


def _sub_seq_lengths(maker: _Maker, columns: Columns, _: Any) -> Field:
    per_row = columns.placement.segments["lengths"]
    lengths = per_row.flat_values
    before = np.append(0, np.cumsum(lengths > 0))
    device = columns.segments["num_segments"].device
    values = torch.from_numpy(lengths[lengths > 0].astype(np.int64))
    values = values.to(device, non_blocking=True)
    return Ragged(values, before[per_row.offsets - per_row.offsets[0]])


def _cu_seq_lens(maker: _Maker, columns: Columns, _: Any) -> Field:
    starts: Any = columns.segments["starts"].flat_values
    values = starts.new_full((len(starts) + maker.num_rows,), maker.width)
    places = maker.row_of_segment() + torch.arange(len(starts), device=starts.device)
    per_row = columns.placement.segments["starts"].offsets
    offsets = per_row - per_row[0] + np.arange(maker.num_rows + 1)
    return Ragged(values.scatter_(0, places, starts), offsets)


_DERIVED: dict[str, Callable[[_Maker, Columns, Mapping[str, Any]], Field]] = {
    "input_ids": _input_ids,
    "position_ids": _position_ids,
    "attention_mask": _attention_mask,
    "labels": _labels,
    "response_mask": _response_mask,
    "loss_mask": _loss_mask,
    "router_padding_mask": _router_padding_mask,
    "sub_seq_lengths": _sub_seq_lengths,
    "cu_seq_lens": _cu_seq_lens,
}
