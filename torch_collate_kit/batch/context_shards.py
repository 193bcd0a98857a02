"""Context shards: the part of a batch that one of several ranks computes, with targets.

Legend: R rows of W cells over C ranks; K ``slices``: neighbouring cells of one segment.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit._checks import checked_choice, checked_int
from torch_collate_kit.batch.dense import make_field
from torch_collate_kit.batch.fields import IGNORE_INDEX, PerExample, PerImage, PerTarget, PerToken
from torch_collate_kit.batch.placement import Placement, Shard
from torch_collate_kit.batch.storage import Columns, Storage
from torch_collate_kit.ragged import Ragged, span_indices

# Sources of the layouts: the zigzag of each segment is the partition of TransformerEngine's ``thd``
# format, that of each row torch's head-tail load balancer, and both are the "striped in two" order
# of H. Zhu's ring-flash-attention; contiguous parts are those of S. A. Jacobs et al., "DeepSpeed
# Ulysses" (2023).

LAYOUTS = ("zigzag", "contiguous", "head_tail")


class Slices(NamedTuple):
    """The cells of one rank: slices within segments, as long as can be, ascending. int64 each."""

    segments: np.ndarray
    begins: np.ndarray  # first cell of each run, counted over all rows
    ends: np.ndarray


def slices_of_rank(bounds: np.ndarray, num_rows: int, rank: int, size: int, layout: str) -> Slices:
    """Return the cells of rank ``rank`` of ``size``.

    ``bounds`` int64 ``[S + 1]`` are those of the segments, flat over rows of one width, from 0 on.
    "zigzag" cuts every segment, "head_tail" every row, into ``2 * size`` equal parts, of which rank
    ``r`` has the parts ``r`` and ``2 * size - 1 - r``; "contiguous" cuts every row into ``size``.
    ValueError: an unknown layout; segments or rows that do not divide.
    """
    checked_choice("layout", layout, LAYOUTS)
    whole = np.asarray(bounds, dtype=np.int64)
    if layout != "zigzag":
        whole = np.arange(num_rows + 1) * (int(whole[-1]) // max(num_rows, 1))
    lengths = np.diff(whole)
    parts = size if layout == "contiguous" or size == 1 else 2 * size  # one rank has all
    _check_divides(lengths, parts, layout, size)
    part = per_run = lengths // parts
    taken = [rank] if parts == size else [rank, parts - 1 - rank]
    if parts > size and rank == size - 1:  # neighbours in the middle
        taken, per_run = [rank], 2 * part
    begins = (whole[:-1, None] + part[:, None] * np.array(taken)).ravel()
    ends = begins + np.repeat(per_run, len(taken))
    if layout != "zigzag":
        begins, ends = _cut_at(np.asarray(bounds, dtype=np.int64), begins, ends)
    kept = ends > begins
    begins, ends = begins[kept], ends[kept]
    return Slices(np.searchsorted(bounds, begins, side="right") - 1, begins, ends)


def _check_divides(lengths: np.ndarray, parts: int, layout: str, size: int) -> None:
    wrong = np.flatnonzero(lengths % parts)
    if not len(wrong):
        return
    found = int(lengths[wrong[0]])
    what, way_out = f"segment {wrong[0]} has {found} cells", ""
    if layout != "zigzag":
        what = f"rows have {found} cells"
        way_out = f", or padded rows with pad_to_multiple_of={parts}"
    raise ValueError(
        f"{what}, which {layout} does not divide into {parts} equal parts for {size} context "
        f"ranks; collate with parallel=ParallelLayout(cp={size}){way_out}"
    )


def _cut_at(bounds: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
    """Return begins and ends of slices, which ascend and do not overlap, cut where segments end."""
    edges = np.unique(np.concatenate([bounds, begins, ends]))
    run = np.searchsorted(begins, edges[:-1], side="right") - 1
    inside = (run >= 0) & (edges[:-1] < ends[run])
    return [edges[:-1][inside], edges[1:][inside]]


_DROPPED = ("cu_seq_lens", "labels", "sub_seq_lengths", "mrope_position_ids")
_INPUTS = {
    *("input_ids", "position_ids", "attention_mask", "inputs_embeds", "router_padding_mask"),
    *("token_type_ids", "mm_token_type_ids", "rollout_expert_indices"),
}
"""Inputs stay in their cell; targets move to the cell that predicts them."""
_ADDED = ("input_ids", "inputs_embeds")  # but at a depth above 1 these are of later tokens


def is_shard(batch: Any) -> bool:
    """Return whether the batch is the part of one that a context rank has."""
    placement = getattr(batch, "placement", None)
    return placement is not None and placement.shard is not None


def shard_of(storage: Storage, rank: int, size: int, layout: str, depth: int) -> Storage:
    """Return the content of ``Batch.context_shard``: copies of a rank's entries."""
    _check(storage, rank, size, depth)
    placement = storage.columns.placement
    slices = _ShardSlices.of(placement, storage.num_rows, rank, size, layout, depth)
    columns, given = _columns_of(storage, slices), _given_of(storage, slices)
    if "mrope_position_ids" in storage.names and "mrope_position_ids" not in given:
        whole: Any = make_field("mrope_position_ids", storage.columns, {}, storage.metadata)
        given["mrope_position_ids"] = _cells_of(whole, slices, of_axis=2)
    trained, bounds = columns.is_trained(), tuple(slices.bounds.tolist())
    number = int(trained.count_nonzero()) if trained.is_cpu else None  # None: it would wait
    of_whole = (placement.width, bounds, _checksum(storage), number, placement.has_left_pads)
    shard = Shard(rank, size, layout, *of_whole, depth)
    columns = replace(columns, placement=replace(columns.placement, shard=shard))
    row_metadata = {k: v for k, v in storage.row_metadata.items() if k != "num_trained"}
    boundaries = {
        "cu_seq_lens": torch.from_numpy(slices.bounds.astype(np.int32)),
        "cu_seq_lens_local": torch.from_numpy(slices.local.astype(np.int32)),
    }
    metadata = {**storage.metadata, **boundaries, "response_length": slices.width}
    if depth > 1:  # whose number is another: none is better than a wrong one
        metadata.pop("num_loss_tokens", None)
    return Storage(columns, given, row_metadata, metadata)


def _check(storage: Storage, rank: int, size: int, depth: int) -> None:
    checked_int("cp_size", size)
    if not 0 <= checked_int("cp_rank", rank, minimum=0) < size:
        raise ValueError(
            f"cp_rank must be 0 to {size - 1}, got {rank}; layout.place(rank) returns that of a "
            "process, with layout=ParallelLayout(dp=..., cp=...)"
        )
    check_whole(storage, depth, "cut", "cut", "cut the whole batch, once for each rank")
    if storage.columns.placement.tree_width:
        raise ValueError(
            "segments of the batch share prefixes (share_prefixes), and a shared prefix has no "
            "one place among its ranks; collate without share_prefixes"
        )
    if depth > 1 and storage.columns.placement.vision is not None:
        raise ValueError(
            f"depth={depth} moves ids away from the features of their images; move embeddings "
            "yourself, by the cells of batch.targets(depth)"
        )
    if "cu_seq_lens" in storage.given:
        raise ValueError(
            "cu_seq_lens were replaced, and shards follow from where segments were collated; cut "
            "the batch first"
        )


def check_whole(storage: Storage, depth: int, wanted: str, what: str, way_out: str) -> None:
    """Refuse all but a whole batch that a collator made, with next tokens as targets."""
    checked_int("depth", depth, hint="1 is the next token, 2 the one after it")
    if not storage.columns:
        raise ValueError(
            "the batch was built from tensors, which do not say where its segments lie; "
            f"{wanted} the Batch that the collator returned"
        )
    refuse_shard(storage, what, way_out)
    if (targets := storage.columns.placement.targets) != "next_token":
        raise ValueError(
            f"the batch has targets={targets!r}, and depths and shards of context ranks have them "
            'in the cells that predict them, as causal models do; collate with targets="next_token"'
        )


def refuse_shard(storage: Storage, what: str, way_out: str) -> None:
    """Refuse a context shard where only a whole batch will do."""
    placement = storage.columns.placement
    if placement is not None and (shard := placement.shard) is not None:
        raise ValueError(
            f"the batch is the shard of context rank {shard.rank} of {shard.size}, and cannot be "
            f"{what}; {way_out}"
        )


def instead_of(name: str, storage: Storage) -> str:
    """Return what a shard has in place of a field of its batch, as the end of a message."""
    of = {"labels": '["targets"], shifted already', "cu_seq_lens": '.metadata["cu_seq_lens"]'}
    return f"; a context shard has {of[name]}" if is_shard(storage.columns) and name in of else ""


class _ShardSlices(NamedTuple):
    """The slices of a rank, and the tokens they hold and predict: int64 [K] each."""

    bounds: np.ndarray  # [S + 1], those of the segments of the batch, flat over rows
    local: np.ndarray  # [P + 1], those of their parts here
    rows: np.ndarray
    owners: np.ndarray  # the segment of the placement that each slice is of
    begins: np.ndarray  # the first cell, over all rows of the batch
    sizes: np.ndarray
    skipped: np.ndarray  # the tokens of the segment before the slice
    tokens: np.ndarray
    targets: np.ndarray
    inputs: np.ndarray  # cells with an input id: fewer than tokens at a depth above 1
    responses: np.ndarray  # how many of the targets, the last ones, are the response
    starts: np.ndarray  # the first cell with a token or target, in its row of the shard
    width: int  # cells of a row of the shard
    depth: int

    @classmethod
    def of(
        cls, placement: Placement, num_rows: int, rank: int, size: int, layout: str, depth: int
    ) -> _ShardSlices:
        width = placement.width
        firsts, lengths = placement.first_cells(), _count(placement, "lengths")
        edges = firsts if placement.is_packed else np.arange(num_rows) * width
        bounds = np.append(edges, num_rows * width)
        if layout == "zigzag" and size > 1 and not placement.is_packed:
            raise ValueError(
                'layout="zigzag" cuts the segments of packed rows, and these are padded; use '
                'layout="head_tail", which cuts rows in the same way'
            )
        owners, begins, ends = slices_of_rank(bounds, num_rows, rank, size, layout)
        first, length = firsts[owners], lengths[owners]
        begin = np.clip(first, begins, ends)  # where tokens may begin
        last = np.clip(first + length, begin, ends)
        predicting = np.clip(first + length - depth, begin, ends)
        responses = _count(placement, "responses")[owners]
        of_response = np.clip(first + length - responses - depth, begin, predicting)
        rows = begins // max(width, 1)
        sizes = ends - begins
        before = np.cumsum(sizes) - sizes
        local = np.append(before[np.diff(owners, prepend=-1) != 0], sizes.sum())
        places = before + begin - begins  # in the flat shard
        inputs = np.clip(first + length - depth + 1, begin, ends) - begin
        where = (bounds, local, rows, owners, begins, sizes, begin - first)
        counts = (last - begin, predicting - begin, inputs, predicting - of_response)
        own_width = width // size
        return cls(*where, *counts, places - rows * own_width, own_width, depth)

    def reading(self) -> _ShardSlices:
        """Return the slices whose targets are what the cells read: those of a depth less."""
        return self._replace(depth=self.depth - 1, targets=self.inputs)

    def picks(self, placement: Placement, count: str) -> tuple[np.ndarray, np.ndarray]:
        """Return where the entries of a column begin that each slice has, and how many."""
        kind = {"targets": "lengths"}.get(count, count)
        total = _count(placement, kind)
        before = (np.cumsum(total) - total)[self.owners]
        if count == "lengths":
            return before + self.skipped, self.tokens
        if count == "targets":
            return before + self.skipped + self.depth, self.targets
        if count == "responses":
            skipped = self.skipped + self.depth + self.targets - self.responses
            hidden = (_count(placement, "lengths") - total)[self.owners]
            return before + skipped - hidden, self.responses
        return before + self.skipped, np.clip(total[self.owners] - self.skipped, 0, self.tokens)


def _count(placement: Placement, name: str) -> np.ndarray:
    """Return a count per segment, int64 [Q]."""
    return placement.segments[name].values.astype(np.int64)


def _columns_of(storage: Storage, slices: _ShardSlices) -> Columns:
    columns, num_rows = storage.columns, storage.num_rows
    offsets = np.searchsorted(slices.rows, np.arange(num_rows + 1))
    specs, placement = dict(columns.specs), columns.placement
    values: dict[str, Any] = dict(columns.values)
    inputs = _INPUTS.union(getattr(placement.vision, "token_fields", ()))
    for name, column in columns.values.items():
        spec: Any = specs[name]
        if isinstance(spec, PerToken) and name not in inputs:
            spec = specs[name] = PerTarget(spec.dtype, spec.pad, spec.shape)
        if not isinstance(spec, PerExample | PerImage):
            values[name] = _picked(column.values, slices, placement, spec.count, offsets)
    if slices.depth > 1:
        pad, ids = placement.pad_token_id, columns.values["input_ids"].values
        specs["input_ids"] = PerTarget(torch.int64, pad, count="inputs")
        values["input_ids"] = _picked(ids, slices.reading(), placement, "targets", offsets)
    _add_targets(columns, slices, offsets, specs, values)
    names = ["targets" if name == "labels" else name for name in columns.names]
    if "targets" not in names:
        names.insert(names.index("loss_mask") if "loss_mask" in names else 1, "targets")
    dropped = _DROPPED[slices.width == placement.width :]  # whose boundaries are its own
    kept = tuple(name for name in dict.fromkeys(names) if name not in dropped)
    local = _placement_of(storage, slices, offsets)
    return Columns.of(values, specs, kept, local, device=columns.segments["num_segments"].device)


def _picked(
    values: Tensor, slices: _ShardSlices, placement: Placement, count: str, offsets: np.ndarray
) -> Ragged:
    starts, counts = slices.picks(placement, count)
    places = torch.from_numpy(span_indices(starts, counts))
    taken = values.index_select(0, places.to(values.device, non_blocking=True))
    return Ragged(taken, np.append(0, np.cumsum(counts))[offsets])


def _add_targets(
    columns: Columns, slices: _ShardSlices, offsets: np.ndarray, specs: Any, values: dict[str, Any]
) -> None:
    """Add the ids that cells predict, -100 where that is not trained, and their weights."""
    if "labels" in values:
        specs["targets"], values["targets"] = specs.pop("labels"), values.pop("labels")
        trained: Ragged = values["targets"]
        if "loss_weights" not in values:
            specs["loss_weights"] = PerTarget(torch.float32)
            values["loss_weights"] = Ragged(trained.values != IGNORE_INDEX, trained.offsets)
        return
    weights, spec = values["loss_weights"], specs["loss_weights"]
    if spec.count == "responses":
        skipped = slices.skipped + slices.targets - slices.responses
        slices = slices._replace(skipped=skipped, targets=slices.responses)
    ids = columns.values["input_ids"].values
    taken = _picked(ids, slices, columns.placement, "targets", offsets).values
    taken = taken if taken.dtype.is_signed else taken.long()
    taken = torch.where(weights.values != 0, taken, IGNORE_INDEX)
    specs["targets"] = type(spec)(torch.int64, IGNORE_INDEX)
    values["targets"] = Ragged(taken, weights.offsets)


def _placement_of(storage: Storage, slices: _ShardSlices, offsets: np.ndarray) -> Placement:
    placement = storage.columns.placement
    counts = {name: getattr(slices, name) for name in ("starts", "targets", "responses")}
    counts |= {"lengths": slices.tokens, "depths": slices.skipped, "cells": slices.sizes}
    counts["columns"] = slices.begins - slices.rows * placement.width
    if slices.depth > 1:
        counts["inputs"] = slices.inputs
    if "routed" in placement.segments:
        counts["routed"] = slices.picks(placement, "routed")[1]
    segments = {name: Ragged(numbers.astype(np.int32), offsets) for name, numbers in counts.items()}
    return replace(placement, width=slices.width, response_length=slices.width, segments=segments)


def _given_of(storage: Storage, slices: _ShardSlices) -> dict[str, Any]:
    """Return the dense fields that were given or changed: cells, or with the predicting cell."""
    given: dict[str, Any] = {}
    placement, specs = storage.columns.placement, storage.columns.specs
    inputs = _INPUTS.union(getattr(placement.vision, "token_fields", ()))
    field: Any
    for name, field in storage.given.items():
        if name == "mrope_position_ids":
            given[name] = _cells_of(field, slices, of_axis=2)
        elif name in _DROPPED and name != "labels":
            continue
        elif isinstance(field, Ragged) or field.ndim < 2:
            given[name] = field
        elif name in _ADDED and slices.depth > 1:
            pad = getattr(specs.get(name), "pad", 0)
            given[name] = _with_predicting(field, slices.reading(), pad, placement)
        elif name in inputs:
            given[name] = _cells_of(field, slices, of_axis=1)
        elif field.shape[1] in (placement.width, placement.response_length):
            pad = IGNORE_INDEX if name == "labels" else getattr(specs.get(name), "pad", 0)
            moved = _with_predicting(field, slices, pad, placement)
            given["targets" if name == "labels" else name] = moved
        else:
            given[name] = field
    return given


def _cells_of(field: Tensor, slices: _ShardSlices, *, of_axis: int) -> Tensor:
    """Return the entries of a rank's cells along an axis of W cells: a copy."""
    columns = span_indices(slices.begins - slices.rows * field.shape[of_axis], slices.sizes)
    index = torch.from_numpy(columns.reshape(len(field), slices.width))
    index = index.to(field.device, non_blocking=True)
    shape = [len(field), *[1] * (field.ndim - 1)]
    shape[of_axis] = slices.width
    return field.take_along_dim(index.view(shape), dim=of_axis)


def _with_predicting(
    field: Tensor, slices: _ShardSlices, pad: float, placement: Placement
) -> Tensor:
    """Return a field ``[R, C, ...]``, right-aligned, where each entry is with what predicts it."""
    hidden = placement.width - field.shape[1]
    columns = slices.skipped + placement.segments["starts"].values[slices.owners] - hidden
    columns += slices.depth
    missing = np.clip(-columns, 0, slices.targets)  # before the first column
    counts = slices.targets - missing
    begins = slices.rows * field.shape[1] + columns + missing
    places = slices.rows * slices.width + slices.starts + missing
    both = np.stack([span_indices(begins, counts), span_indices(places, counts)])
    index = torch.from_numpy(both).to(field.device, non_blocking=True)
    dense = field.new_full((len(field) * slices.width, *field.shape[2:]), pad)
    dense = dense.index_copy(0, index[1], field.flatten(0, 1).index_select(0, index[0]))
    return dense.view(len(field), slices.width, *field.shape[2:])


def _checksum(storage: Storage) -> int:
    """Return a checksum of where segments lie, what is trained and, in host memory, of the ids."""
    found = 0
    counts = [storage.columns.placement.segments[name] for name in ("starts", "lengths")]
    trained = storage.row_metadata.get("num_trained")
    counts += [trained] if isinstance(trained, Ragged) else []
    for column in counts:
        found = zlib.crc32(np.asarray(column.values).tobytes(), found)
    ids = storage.columns.values["input_ids"].values
    return zlib.crc32(ids.numpy().tobytes(), found) if ids.device.type == "cpu" else found
