"""Dense fields from columns: one torch implementation for the CPU and CUDA.

Every size is known in host memory, so nothing waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.batch.buffer import fresh_bytes
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
from torch_collate_kit.batch.mrope import mrope_positions
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
        self.num_rows = columns.num_rows
        self.is_packed = placement.is_packed
        self.device = columns.segments["num_segments"].device

    def flat(self, column: str) -> Tensor:
        values: Tensor = self._columns.values[column].values
        return values

    def per_segment(self, count: str) -> Tensor:
        """int32 [Q], as the placement has it."""
        counts: Tensor = self._columns.segments[count].values
        return counts

    def row_of_segment(self) -> Tensor:
        """int64 [Q]."""
        rows = torch.arange(self.num_rows, device=self.device)
        total = len(self._columns.placement.segments["starts"].values)
        num_segments = self._columns.segments["num_segments"]
        return torch.repeat_interleave(rows, num_segments, output_size=total)

    def starts(self) -> Tensor:
        """int64 [Q], the first cell of each segment, counted over all rows."""
        if "starts" not in self._made:
            first = self.row_of_segment() * self.width
            self._made["starts"] = self.per_segment("starts") + first
        return self._made["starts"]

    def cells(self, count: str) -> Tensor:
        """int64, the cell over all rows of every counted token."""
        return self._cells_of(count, lambda starts: starts)

    def response_cells(self) -> Tensor:
        """int64, the cell of every response token in ``[R, A]``."""
        hidden = self.width - self.num_columns
        return self._cells_of(
            "responses", lambda starts: starts - (self.row_of_segment() + 1) * hidden, "in [R, A]"
        )

    def _cells_of(
        self, count: str, moved: Callable[[Tensor], Tensor], where: str = "in [R, W]"
    ) -> Tensor:
        key = f"{count} {where}"
        if key not in self._made:
            number, starts = self.per_segment(count), self.starts()
            if count == "responses":
                starts = starts + self.per_segment("lengths") - number
            total = int(self._columns.placement.segments[count].values.sum())
            before = torch.cumsum(number, 0) - number
            self._made[key] = _counted_up(moved(starts) - before, before, total)
        return self._made[key]

    def in_cells(self, values: Tensor | int, count: str, pad: Any, dtype: torch.dtype) -> Tensor:
        """Values per counted token, or one for all of them, as ``[R, W]``; a new tensor."""
        dense = _full(self.num_rows * self.width, pad, dtype, self.device)
        return _put(dense, self.cells(count), values).view(self.num_rows, self.width)

    def in_response(self, values: Tensor | int, pad: Any, dtype: torch.dtype) -> Tensor:
        """Values per response token, or one for all of them, as ``[R, A]``; a new tensor."""
        dense = _full(self.num_rows * self.num_columns, pad, dtype, self.device)
        return _put(dense, self.response_cells(), values).view(self.num_rows, self.num_columns)


def _empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new flat tensor, not filled."""
    if device.type != "cpu" or not size:
        return torch.empty(size, dtype=dtype, device=device)
    return torch.from_numpy(fresh_bytes(size * dtype.itemsize)).view(dtype)


def _full(size: int, value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new flat tensor. In host memory zeros take no time until they are read or written."""
    if device.type == "cpu" and value == 0 and size:
        return torch.from_numpy(np.zeros(size * dtype.itemsize, dtype=np.uint8)).view(dtype)
    return _empty(size, dtype, device).fill_(value)


def _put(dense: Tensor, cells: Tensor, values: Tensor | int) -> Tensor:
    if isinstance(values, int):  # scatter_ takes four times as long with a number
        values = dense.new_full((1,), values).expand(len(cells))
    return dense.scatter_(0, cells, values)


def _copied(values: Tensor, dtype: torch.dtype) -> Tensor:
    """A new tensor with the same values in another dtype."""
    fresh = _empty(values.numel(), dtype, values.device)
    return fresh.view(values.shape).copy_(values)


def _as(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values if values.dtype == dtype else _copied(values, dtype)


def _counted_up(shifts: Tensor, starts: Tensor, size: int) -> Tensor:
    """``t + shifts[q]`` for all t below ``size``, where q is the last segment that begins by t.

    ``starts`` do not fall. A running sum needs no other array of that size.
    """
    # one more, for segments without tokens may begin after the last one
    steps = _full(size + 1, 1, shifts.dtype, shifts.device)
    steps[:1] = 0
    steps.scatter_add_(0, starts, torch.diff(shifts, prepend=shifts.new_zeros(1)))
    return torch.cumsum(steps, 0, out=steps)[:size]


def _own(name: str, spec: FieldSpec, maker: _Maker, columns: Columns) -> Field:
    """A field that has a column of its own."""
    if isinstance(spec, PerExample | PerImage):
        column: Any = columns.values[name]
        # a copy of grids: positions follow from them, so a change must not reach the column
        flat = column.values.to(spec.dtype, copy=name == "image_grid_thw")
        if isinstance(spec, PerImage) and spec.patch_shape is not None:
            flat = _with_frames(flat, *spec.patch_shape)
        return Ragged(flat, column.offsets)
    values = _as(maker.flat(name), spec.dtype)
    if isinstance(spec, PerToken):
        return maker.in_cells(values, "lengths", spec.pad, spec.dtype)
    if isinstance(spec, PerResponseToken):
        return maker.in_response(values, spec.pad, spec.dtype)
    top_k = values.shape[-1]
    shape = (maker.num_rows * maker.width, *values.shape[1:])
    experts = torch.arange(top_k, dtype=spec.dtype, device=values.device)
    dense = experts.expand(shape).clone().index_copy_(0, maker.cells("routed"), values)
    return dense.view(maker.num_rows, maker.width, *values.shape[1:])


def _with_frames(patches: Tensor, channels: int, frames: int, size: int) -> Tensor:
    """Flat patches of several frames, of which one is stored: ``[P, channels * frames * size]``."""
    dense = _empty(patches.numel() * frames, patches.dtype, patches.device)
    dense.view(-1, channels, frames, size).copy_(patches.view(-1, channels, 1, size))
    return dense.view(len(patches), channels * frames * size)


def _mrope_position_ids(maker: _Maker, columns: Columns, _: Any) -> Field:
    restarting: Any = _position_ids(maker)
    positions = restarting[:, None].repeat(1, 4, 1)
    grids, lengths = columns.values["image_grid_thw"].values, maker.per_segment("lengths")
    if not len(grids):
        return positions
    layout: Any = columns.placement.vision
    cells = maker.cells("lengths")
    rows = _as(maker.flat("input_ids"), torch.int64) == layout.image_token_id
    of_tokens = mrope_positions(rows, grids, lengths, layout.merge_size)
    first = (cells // maker.width) * (4 * maker.width) + cells % maker.width
    for k, values in enumerate(of_tokens, start=1):
        positions.view(-1).scatter_(0, first + k * maker.width, values)
    return positions


def _token_types(maker: _Maker, columns: Columns, _: Any) -> Field:
    layout: Any = columns.placement.vision
    is_image = maker.flat("input_ids") == layout.image_token_id
    return maker.in_cells(_as(is_image, torch.int64), "lengths", 0, torch.int64)


def _attention_mask(maker: _Maker, *_: Any) -> Field:
    return maker.in_cells(1, "lengths", 0, torch.int64)


def _position_ids(maker: _Maker, *_: Any) -> Field:
    if maker.is_packed:  # segments cover their rows
        starts, size = maker.starts(), maker.num_rows * maker.width
        return _counted_up(-starts, starts, size).view(maker.num_rows, maker.width)
    lengths = maker.per_segment("lengths")
    before = torch.cumsum(lengths, 0) - lengths
    positions = _counted_up(-before, before, len(maker.cells("lengths")))
    return maker.in_cells(positions, "lengths", 0, torch.int64)


def _labels(maker: _Maker, columns: Columns, _: Any) -> Field:
    weights, count = maker.flat("loss_weights"), columns.specs["loss_weights"].count
    trained = weights if weights.dtype == torch.bool else weights != 0
    ids = maker.flat("input_ids")
    if count == "responses":
        dense = maker.in_cells(_as(ids, torch.int64), "lengths", 0, torch.int64)
        ids = dense.view(-1).gather(0, maker.cells("responses"))
    labels = _empty(len(ids), torch.int64, ids.device)
    # torch.where(trained, ids, IGNORE_INDEX) takes three times as long on the CPU
    torch.sub(ids, IGNORE_INDEX, out=labels).mul_(trained).add_(IGNORE_INDEX)
    return maker.in_cells(labels, str(count), IGNORE_INDEX, torch.int64)


def _loss_mask(maker: _Maker, columns: Columns, metadata: Mapping[str, Any]) -> Field:
    if "labels" in columns.values:
        weights, count = maker.flat("labels") != IGNORE_INDEX, "lengths"
    else:
        weights = maker.flat("loss_weights")
        count = str(columns.specs["loss_weights"].count)
    if count == "responses":
        mask = maker.in_response(_as(weights, torch.float32), 0, torch.float32)
    else:
        dense = maker.in_cells(weights, "lengths", 0, weights.dtype)
        mask = _copied(dense[:, maker.width - maker.num_columns :], torch.float32)
    divisor = metadata.get("loss_mask_divisor", 1)
    # by a tensor: CUDA multiplies by the reciprocal of a number, which is off by a bit
    return mask if divisor == 1 else mask.div_(mask.new_full((), divisor))


def _response_mask(maker: _Maker, *_: Any) -> Field:
    return maker.in_response(1, 0, torch.int64)


def _router_padding_mask(maker: _Maker, *_: Any) -> Field:
    return maker.in_cells(False, "routed", True, torch.bool)


def _sub_seq_lengths(maker: _Maker, columns: Columns, _: Any) -> Field:
    per_row = columns.placement.segments["lengths"]
    lengths = per_row.values
    if "examples" in columns.placement.segments:  # a dummy image is no sub-sequence
        lengths = lengths * columns.placement.segments["examples"].values
    before = np.append(0, np.cumsum(lengths > 0))
    device = columns.segments["num_segments"].device
    values = torch.from_numpy(lengths[lengths > 0].astype(np.int64))
    values = values.to(device, non_blocking=True)
    return Ragged(values, before[per_row.offsets])


def _cu_seq_lens(maker: _Maker, columns: Columns, _: Any) -> Field:
    starts: Any = columns.segments["starts"].values
    values = starts.new_full((len(starts) + maker.num_rows,), maker.width)
    places = maker.row_of_segment() + torch.arange(len(starts), device=starts.device)
    offsets = columns.placement.segments["starts"].offsets + np.arange(maker.num_rows + 1)
    return Ragged(values.scatter_(0, places, starts), offsets)


_DERIVED: dict[str, Callable[[_Maker, Columns, Mapping[str, Any]], Field]] = {
    "position_ids": _position_ids,
    "mrope_position_ids": _mrope_position_ids,
    "token_type_ids": _token_types,
    "attention_mask": _attention_mask,
    "labels": _labels,
    "response_mask": _response_mask,
    "loss_mask": _loss_mask,
    "router_padding_mask": _router_padding_mask,
    "sub_seq_lengths": _sub_seq_lengths,
    "cu_seq_lens": _cu_seq_lens,
}
