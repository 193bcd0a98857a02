"""Dense fields from columns: one torch implementation for the CPU and CUDA.

Every size is known in host memory, so nothing waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_collate_kit.batch.fields import (
    IGNORE_INDEX,
    Field,
    PerImage,
    PerResponseToken,
    PerRoutedToken,
    PerTarget,
    PerToken,
)
from torch_collate_kit.batch.placement import Placement
from torch_collate_kit.batch.storage import Columns, fresh_bytes
from torch_collate_kit.ragged import Ragged, span_indices


def make_field(
    name: str, columns: Columns, made: dict[str, Tensor], metadata: Mapping[str, Any]
) -> Field:
    """Return the dense field; ``made`` keeps what several fields need.

    ``metadata["loss_mask_divisor"]`` divides the loss mask.
    """
    with torch.inference_mode(False):  # or changes in place would not be noticed
        maker = _Maker(columns, made, metadata.get("loss_mask_divisor", 1))
        field: Field = maker.own(name) if name in columns.specs else getattr(maker, name)()
        return field


def cells_of_responses(columns: Columns, made: dict[str, Tensor]) -> Tensor:
    """Return the cell of every response token in ``[R, A]``, int64 [n]; ``made`` keeps it."""
    with torch.inference_mode(False):
        maker = _Maker(columns, made)
        return maker.cells("responses", maker.hidden)


def cells_of_shard(columns: Columns, made: dict[str, Tensor]) -> Tensor:
    """Return the cell of the batch of each cell of its shard, int64 [R * W]; ``made`` keeps it."""
    if "cells of the batch" not in made:
        with torch.inference_mode(False):
            made["cells of the batch"] = _Maker(columns, {}).cells_of_batch()
    return made["cells of the batch"]


def cells_of_tokens(columns: Columns) -> Tensor:
    """Return the cell of every token of rows that share prefixes, int64 [T] over all rows."""
    column = columns.values["tree_cells"]
    rows = torch.from_numpy(np.repeat(np.arange(columns.num_rows), column.lengths))
    first = rows.to(column.values.device, non_blocking=True) * columns.placement.tree_width
    return first + column.values


def cells_of_rows(batch: Any) -> Tensor:
    """Return the cell of every token, int64 [R, U] over all rows of cells; 0 at pads."""
    made: dict[str, Tensor] = batch._shared
    if "cells of tokens" not in made:
        columns: Columns = batch.stored().columns
        placement = columns.placement
        with torch.inference_mode(False):
            places = torch.from_numpy(placement.cells("lengths"))
            cells = cells_of_tokens(columns)
            dense = cells.new_zeros(columns.num_rows * placement.width)
            dense.scatter_(0, places.to(cells.device, non_blocking=True), cells)
        made["cells of tokens"] = dense.view(columns.num_rows, placement.width)
    return made["cells of tokens"]


def trained_labels(batch: Any) -> Tensor | None:
    """Return the label of each token, int64 [R, U], -100 where it is not trained, if they changed.

    A token is trained where its weight in ``loss_mask`` is not 0 and its label is not -100. Labels
    of next tokens follow a ``loss_mask`` that was replaced or changed: what it trains beside them
    has its id. Pads, and first tokens of next-token labels, are never trained. None
    where neither was (without labels, as of rollouts: neither the mask nor the ids). Of a context
    shard these are its targets, made with the whole batch.
    """
    stored = batch.stored()
    columns, given, placement = stored.columns, stored.given, batch.placement
    name = "targets" if placement is not None and placement.shard is not None else "labels"
    changes = {name, "loss_mask"} if name in batch else {"input_ids", "loss_mask"}
    if changes.isdisjoint(given) or "loss_mask" not in batch or "input_ids" not in batch:
        return None
    if placement is None or name == "targets":
        labels: Tensor | None = batch.get(name)
        return labels
    mask, ids = batch["loss_mask"], batch["input_ids"]
    is_of_next = placement.targets == "next_token"  # else labels may be classes
    if name in batch and name not in given:  # labels are of the ids that were collated
        ids = make_field("input_ids", columns, batch._shared, {})
    ids = ids.flatten()[cells_of_rows(batch)] if placement.tree_width else ids
    is_trained = F.pad(mask != 0, (ids.shape[1] - mask.shape[1], 0)).flatten()
    without = [cells_without(placement, len(is_trained), int(is_of_next))]
    examples = batch.row_metadata.get("example_indices")
    if isinstance(examples, Ragged):  # an added row has none
        is_added = np.repeat(examples.lengths == 0, ids.shape[1])
        without.append(np.flatnonzero(is_added))
    cells = torch.from_numpy(np.concatenate(without))
    is_trained.index_fill_(0, cells.to(mask.device, non_blocking=True), 0)
    if name in given or not is_of_next:
        ids = batch[name]
    elif name in batch:
        ids = torch.where(batch[name] == IGNORE_INDEX, ids, batch[name])
    return torch.where(is_trained.view(ids.shape), ids, IGNORE_INDEX)


def cells_without(placement: Placement, num_cells: int, depth: int) -> np.ndarray:
    """Return the cells of tokens without one ``depth`` before them, and of pads: int64."""
    firsts, lengths = placement.first_cells(), placement.segments["lengths"].values
    ends = np.append(0, firsts + lengths)
    begins = np.append(firsts + np.minimum(min(depth, num_cells), lengths), num_cells)
    return span_indices(ends, begins - ends)


class _Maker:
    """Dense fields of a batch: those without a column are methods of their names."""

    def __init__(self, columns: Columns, made: dict[str, Tensor], divisor: float = 1) -> None:
        self.columns, self.placement, self._made = columns, columns.placement, made
        self.divisor = divisor
        self.num_rows, self.width = columns.num_rows, columns.placement.width
        self.hidden = self.width - columns.placement.response_length
        """The first cells of a row, which ``[R, A]`` does not have."""
        segments = dict(columns.segments)
        self.num_segments = segments.pop("num_segments")
        self.per_segment: dict[str, Tensor] = {k: column.values for k, column in segments.items()}
        self.flat: dict[str, Tensor] = {k: column.values for k, column in columns.values.items()}
        self.device = self.num_segments.device

    def row_of_segment(self) -> Tensor:
        """Return the row of each segment, int64 [Q]."""
        rows = torch.arange(self.num_rows, device=self.device)
        total = len(self.per_segment["starts"])
        return torch.repeat_interleave(rows, self.num_segments, output_size=total)

    def starts(self) -> Tensor:
        """Return the first cell of each segment, int64 [Q], counted over all rows."""
        if "starts" not in self._made:
            first = self.row_of_segment() * self.width
            self._made["starts"] = self.per_segment["starts"] + first
        return self._made["starts"]

    def cells(self, count: str, hidden: int = 0) -> Tensor:
        """Return the cell of every counted token, int64, over all rows without hidden cells."""
        key = f"{count}, {hidden} hidden"
        if key not in self._made:
            number, starts = self.per_segment[count], self.starts()
            if count == "responses":
                last = "targets" if self.placement.shard else "lengths"
                starts = starts + self.per_segment[last] - number
            if hidden:
                starts = starts - (self.row_of_segment() + 1) * hidden
            total = int(self.placement.segments[count].values.sum())
            before = torch.cumsum(number, 0) - number
            self._made[key] = _counted_up(starts - before, before, total)
        return self._made[key]

    def dense(
        self, values: Tensor | int, count: str, pad: Any, dtype: torch.dtype, *, hidden: int = 0
    ) -> Tensor:
        """Return values per counted token, or one for all: new, ``[R, W - hidden, ...]``."""
        width, shape = self.width - hidden, () if isinstance(values, int) else values.shape[1:]
        spans = self.placement.spans(count, hidden) if self.device.type == "cpu" else None
        if hidden and count != "responses" and spans is None:
            return self.dense(values, count, pad, dtype)[:, hidden:].contiguous()
        dense = _full(self.num_rows * width * math.prod(shape), pad, dtype, self.device)
        if isinstance(values, int):
            values = dense.new_full((1,), values)
        if spans is not None:
            _put_spans(dense, _as(values, dtype), *spans)
        elif shape:
            dense.view(-1, *shape).index_copy_(0, self.cells(count, hidden), _as(values, dtype))
        else:  # scatter_ takes four times as long with a number
            cells = self.cells(count, hidden)
            dense.scatter_(0, cells, _as(values, dtype).expand(len(cells)))
        return dense.view(self.num_rows, width, *shape)

    def last_cells(self, count: str, *, counted_up: bool = False, hidden: int = 0) -> Tensor | None:
        """Return 1 (or 0, 1, 2, ...) for counted tokens that end padded rows; None if they do not.

        Every row is a window over the same numbers: int64 [R, W - hidden], 0 at pads.
        """
        placement, width = self.placement, self.width - hidden
        ends = placement.first_counted(count) + placement.segments[count].values
        is_last = np.array_equal(ends, np.arange(1, self.num_rows + 1) * self.width)
        if placement.is_packed or placement.shard or not is_last:
            return None
        steps = torch.zeros(2 * width, dtype=torch.int64, device=self.device)
        steps[width:] = torch.arange(width, device=self.device) if counted_up else 1
        dense = _empty(self.num_rows * width, steps.dtype, self.device).view(-1, width)
        return torch.index_select(steps.unfold(0, width, 1), 0, self.per_segment[count], out=dense)

    def in_cells(self, values: Tensor | int, pad: Any) -> Tensor:
        """Return values per token, or one for all, in the cells of the tokens: int64 [R, W].

        Tokens that share a cell have the same value.
        """
        width = self.placement.tree_width
        if not width:
            return self.dense(values, "lengths", pad, torch.int64)
        cells = cells_of_tokens(self.columns)
        dense = _full(self.num_rows * width, pad, torch.int64, self.device)
        if isinstance(values, int):
            values = dense.new_full((1,), values).expand(len(cells))
        return dense.scatter_(0, cells, _as(values, torch.int64)).view(self.num_rows, width)

    def own(self, name: str) -> Field:
        """Return a field that has a column of its own."""
        spec, values = self.columns.specs[name], self.flat[name]
        if isinstance(spec, PerToken):
            if name == "input_ids":
                return self.in_cells(values, spec.pad)
            return self.dense(values, "lengths", spec.pad, spec.dtype)
        if isinstance(spec, PerTarget):
            return self.dense(values, str(spec.count), spec.pad, spec.dtype)
        if isinstance(spec, PerResponseToken):
            return self.dense(values, "responses", spec.pad, spec.dtype, hidden=self.hidden)
        if isinstance(spec, PerRoutedToken):
            shape = (self.num_rows * self.width, *values.shape[1:])
            experts = torch.arange(shape[-1], dtype=spec.dtype, device=self.device)
            dense = experts.expand(shape).clone()
            if values.dtype.is_signed:  # uint8 has no holes
                values = torch.where(values < 0, experts, values)
            dense.index_copy_(0, self.cells("routed"), _as(values, spec.dtype))
            return dense.view(self.num_rows, self.width, *shape[1:])
        # a copy of grids: positions follow from them, so a change must not reach the column
        dtype: Any = spec.dtype  # never str, of which there is no column
        values = values.to(dtype, copy=name == "image_grid_thw")
        if isinstance(spec, PerImage) and spec.patch_shape is not None:
            values = _with_frames(values, *spec.patch_shape)
        return Ragged(values, self.columns.values[name].offsets)

    def position_ids(self) -> Tensor:
        if self.placement.is_packed and not self.placement.tree_width:  # segments cover their rows
            starts, size = self.starts(), self.num_rows * self.width
            shifts = self.per_segment.get("depths", 0) - starts
            return _counted_up(shifts, starts, size).view(self.num_rows, self.width)
        if (positions := self.last_cells("lengths", counted_up=True)) is not None:
            return positions
        lengths = self.per_segment["lengths"]
        before = torch.cumsum(lengths, 0) - lengths
        shifts = self.per_segment.get("depths", 0) - before
        num_tokens = int(self.placement.segments["lengths"].values.sum())
        return self.in_cells(_counted_up(shifts, before, num_tokens), 0)

    def cells_of_batch(self) -> Tensor:
        """Return the cell of the batch, over its rows, of each cell of a shard: int64 [R * W]."""
        columns, counts = (self.per_segment[name].long() for name in ("columns", "cells"))
        shard: Any = self.placement.shard
        first = self.row_of_segment() * shard.width + columns
        before = torch.cumsum(counts, 0) - counts
        return _counted_up(first - before, before, self.num_rows * self.width)

    def mrope_position_ids(self) -> Tensor:
        positions = self.position_ids()[:, None].repeat(1, 4, 1)
        if not len(grids := self.flat["image_grid_thw"]):
            return positions
        layout: Any = self.placement.vision
        cells = self.cells("lengths")
        is_image = _as(self.flat["input_ids"], torch.int64) == layout.image_token_id
        lengths = self.per_segment["lengths"]
        of_tokens = mrope_positions(is_image, grids, lengths, layout.merge_size)
        first = (cells // self.width) * (4 * self.width) + cells % self.width
        for k, values in enumerate(of_tokens, start=1):
            positions.view(-1).scatter_(0, first + k * self.width, values)
        return positions

    def token_type_ids(self) -> Tensor:
        layout: Any = self.placement.vision
        is_image = self.flat["input_ids"] == layout.image_token_id
        return self.dense(is_image, "lengths", 0, torch.int64)

    def attention_mask(self) -> Tensor:
        ones = self.last_cells("lengths")
        return self.in_cells(1, 0) if ones is None else ones

    def labels(self) -> Tensor:
        ids, count = self.flat["input_ids"], str(self.columns.specs["loss_weights"].count)
        if count == "responses":
            dense = self.dense(ids, "lengths", 0, torch.int64)
            ids = dense.view(-1).gather(0, self.cells("responses"))
        labels = _empty(len(ids), ids.dtype, ids.device)
        # torch.where(trained, ids, IGNORE_INDEX) takes seven times as long on the CPU
        torch.sub(ids, IGNORE_INDEX, out=labels).mul_(self.columns.is_trained()).add_(IGNORE_INDEX)
        return self.dense(labels, count, IGNORE_INDEX, torch.int64)

    def loss_mask(self) -> Tensor:
        target = self.columns.target
        weights = self.columns.is_trained() if target == "labels" else self.flat[target]
        weights = _as(weights, torch.float32)
        if self.divisor != 1:  # by a tensor: CUDA multiplies by the reciprocal of a number
            weights = weights / weights.new_full((), self.divisor)
        count = str(self.columns.specs[target].count)
        return self.dense(weights, count, 0, torch.float32, hidden=self.hidden)

    def response_mask(self) -> Tensor:
        if (ones := self.last_cells("responses", hidden=self.hidden)) is not None:
            return ones
        return self.dense(1, "responses", 0, torch.int64, hidden=self.hidden)

    def router_padding_mask(self) -> Tensor:
        routes = self.flat["rollout_expert_indices"]
        is_hole = routes[:, 0, 0] < 0 if routes.dtype.is_signed else False
        return self.dense(is_hole, "routed", True, torch.bool)

    def sub_seq_lengths(self) -> Ragged:
        segments = self.placement.segments
        lengths = segments["lengths"].values
        if "examples" in segments:  # a dummy image is not a sub-sequence
            lengths = lengths * segments["examples"].values
        before = np.append(0, np.cumsum(lengths > 0))
        values = torch.from_numpy(lengths[lengths > 0].astype(np.int64))
        values = values.to(self.device, non_blocking=True)
        return Ragged(values, before[segments["lengths"].offsets])

    def cu_seq_lens(self) -> Ragged:
        starts = self.per_segment["starts"]
        values = starts.new_full((len(starts) + self.num_rows,), self.width)
        places = self.row_of_segment() + torch.arange(len(starts), device=self.device)
        offsets = self.placement.segments["starts"].offsets + np.arange(self.num_rows + 1)
        return Ragged(values.scatter_(0, places, starts), offsets)


def _empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a new flat tensor, not filled."""
    if device.type != "cpu" or not size:
        return torch.empty(size, dtype=dtype, device=device)
    return torch.from_numpy(fresh_bytes(size * dtype.itemsize)).view(dtype)


def _full(size: int, value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a new flat tensor; in host memory zeros take no time until they are used."""
    if device.type == "cpu" and value == 0 and size:
        return torch.from_numpy(np.zeros(size * dtype.itemsize, dtype=np.uint8)).view(dtype)
    return _empty(size, dtype, device).fill_(value)


def _copied(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a new tensor with the same values in this dtype."""
    if values.dtype == torch.bool:  # the CPU takes seven times as long to convert it
        values = values.view(torch.uint8)
    fresh = _empty(values.numel(), dtype, values.device)
    return fresh.view(values.shape).copy_(values)


def _as(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values if values.dtype == dtype else _copied(values, dtype)


def _counted_up(shifts: Tensor, starts: Tensor, size: int) -> Tensor:
    """Return ``t + shifts[q]`` for t below ``size``, with q the last segment that begins by t.

    ``starts`` do not fall. A running sum needs no other array of that size.
    """
    # one more, for segments without tokens may begin after the last one
    steps = _full(size + 1, 1, shifts.dtype, shifts.device)
    steps[:1] = 0
    steps.scatter_add_(0, starts, torch.diff(shifts, prepend=shifts.new_zeros(1)))
    return torch.cumsum(steps, 0, out=steps)[:size]


def _with_frames(patches: Tensor, channels: int, frames: int, size: int) -> Tensor:
    """Repeat the one stored frame of each patch: ``[P, channels * frames * size]``."""
    dense = _empty(patches.numel() * frames, patches.dtype, patches.device)
    dense.view(-1, channels, frames, size).copy_(patches.view(-1, channels, 1, size))
    return dense.view(len(patches), channels * frames * size)


def mrope_positions(
    is_image_T: Tensor, grids_N3: Tensor, lengths_S: Tensor, merge_size: int
) -> Tensor:
    """Return positions in time, height and width, int64 [3, T], from 0 in each example.

    Source: P. Wang et al., "Qwen2-VL: Enhancing Vision-Language Model's Perception of the World at
    Any Resolution" (2024), section 2.1.

    Args:
        is_image_T: bool, where a token is the placeholder of an image.
        grids_N3: the images in order, in patches: frames, height and width.
        lengths_S: tokens of each example, 0 allowed.
        merge_size: patches a side that become one token.

    A text token has a counter as its three positions, and raises it by 1. An image of ``H * W``
    tokens that begins at the counter ``s`` has the positions ``s`` plus frame, row and column, and
    after it the counter is ``s + max(H, W)``. Waits for no device.
    """
    grids = grids_N3.long()
    height, width = grids[:, 1] // merge_size, grids[:, 2] // merge_size
    ends = torch.cumsum(grids[:, 0] * height * width, 0)  # placeholders up to the end of each
    number = torch.cumsum(is_image_T, 0) - 1  # of the placeholder, over all images
    image = torch.searchsorted(ends, number, right=True).clamp_(max=len(grids) - 1)
    inside = number - (ends - grids[:, 0] * height * width)[image]  # its place in its image
    largest, columns = torch.maximum(height, width)[image], width[image]
    is_later = is_image_T & (inside > 0)
    steps = torch.where(is_image_T, largest * ~is_later, 1)
    counter = torch.cumsum(steps, 0) - steps
    lengths = lengths_S.long()
    first = torch.cumsum(lengths, 0) - lengths
    padded = torch.cat([counter, counter.new_zeros(1)])  # an example without tokens may be last
    counter -= torch.repeat_interleave(padded[first], lengths, output_size=len(counter))
    counter -= largest * is_later  # s, which later tokens of an image share with its first
    inside = torch.where(is_image_T, inside, 0)
    of_frame = height[image] * columns
    in_frame = inside % of_frame
    offsets = (inside // of_frame, in_frame // columns, in_frame % columns)
    return torch.stack([counter + offset for offset in offsets])


def _put_spans(
    dense: Tensor, values: Tensor, cells: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> None:
    """Copy ``values[start:start + length]``, or one value, into spans of a tensor in host memory.

    A copy per span takes a third of the time of an index per token, and between memoryviews three
    quarters of that between arrays.
    """
    if len(values) == 1:
        values, starts = values.repeat_interleave(int(lengths.max()), 0), 0 * starts
    size, flat = values[:1].nbytes, (dense, values.contiguous().view(-1))
    room, source = (tensor.view(torch.uint8).numpy().data for tensor in flat)
    bounds = [
        (size * numbers).tolist() for numbers in (cells, cells + lengths, starts, starts + lengths)
    ]
    for begin, end, start, stop in zip(*bounds, strict=True):
        room[begin:end] = source[start:stop]
