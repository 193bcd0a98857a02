"""Attention of rows cut over context ranks, or that share prefixes: keys along paths of cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torch_collate_kit.batch.context_shards import LAYOUTS, slices_of_rank
from torch_collate_kit.batch.dense import cells_of_tokens, make_field
from torch_collate_kit.batch.model_kind import ModelKind
from torch_collate_kit.batch.placement import MAX_WIDTH, Placement, Shard
from torch_collate_kit.batch.storage import Columns
from torch_collate_kit.errors import IsolationError
from torch_collate_kit.ragged import span_indices


def check_group(shard: Shard, group: Any) -> None:
    """Refuse a group of other ranks than those that the batch was cut for."""
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"the batch is the shard of context rank {shard.rank} of {shard.size}, whose attention "
            f"needs the keys of the others; pass context_group=, got {group!r}"
        )
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if (rank, size) != (shard.rank, shard.size):
        raise ValueError(
            f"the batch is the shard of context rank {shard.rank} of {shard.size}, and this "
            f"process is rank {rank} of the {size} in the group; cut it with "
            "batch.context_shard(dist.get_rank(group), dist.get_world_size(group))"
        )


def check_one_batch(contents: list[list[int]]) -> None:
    """Refuse shards of different batches or layouts; ``contents`` is ``content_of`` each rank."""
    if any(content != contents[0] for content in contents):
        raise ValueError(
            "the context ranks have shards of different batches or layouts, with the checksums "
            f"{[content[0] for content in contents]}; all must cut the same rows: let a group "
            "read them as dp_rank, of dp_rank, cp_rank = layout.place(rank)"
        )


def content_of(shard: Shard) -> list[int]:
    """Return integers that are equal on all ranks that cut the same batch in the same way."""
    return [shard.content, LAYOUTS.index(shard.layout), shard.depth]


def gathered_ints(values: list[int], group: Any) -> list[list[int]]:
    """Return the integers of every rank of the group; waits for the device."""
    backends = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    devices = [part.partition(":")[0] for part in backends.split(",")]
    own = torch.tensor(values, dtype=torch.int64, device="cpu" if "cpu" in devices else devices[0])
    all_ranks = own.new_empty(dist.get_world_size(group) * len(values))
    all_gather()(all_ranks, own, group=group)
    found: Tensor = all_ranks.view(-1, len(values))
    listed: list[list[int]] = found.tolist()
    return listed


def all_gather() -> Callable[..., Any]:
    """Return the function of torch that joins tensors of all ranks along the first axis."""
    new: Any = getattr(dist, "all_gather_single", None)  # torch 2.13 renames it
    return dist.all_gather_into_tensor if new is None else new


def reduce_scatter() -> Callable[..., Any]:
    """Return the function of torch that adds tensors up, and leaves each rank its part."""
    new: Any = getattr(dist, "reduce_scatter_single", None)
    return dist.reduce_scatter_tensor if new is None else new


_COMPARED: WeakSet[Any] = WeakSet()
"""Groups whose ranks were seen to have shards of one batch."""


def shard_inputs(
    batch: Mapping[str, Any], columns: Columns, kind: ModelKind, group: Any
) -> dict[str, Any]:
    """Return the inputs of a shard: no labels, since its targets are shifted already.

    Raises:
        IsolationError: a model whose layers carry state from cell to cell.
        ValueError: another attention, images, pads on the left, or a group that does not fit.
    """
    shard: Any = columns.placement.shard
    _refuse_for_shards(kind, columns.placement, shard)
    check_group(shard, group)
    if group not in _COMPARED:  # once: it waits for the device
        check_one_batch(gathered_ints(content_of(shard), group))
        _COMPARED.add(group)
    queries, keys, cells = paths_of_shard(columns.placement, columns.num_rows)
    ends = [np.append(0, np.cumsum(lengths)) for lengths in (queries, keys)]
    if max(int(bounds[-1]) for bounds in ends) > MAX_WIDTH:
        raise ValueError(
            f"rows of {ends[1][-1]} cells are more than int32 boundaries can count, {MAX_WIDTH}; "
            "cut them in parts, such as batch.split(rows)"
        )
    device = batch["input_ids"].device
    bounds = torch.from_numpy(np.stack(ends).astype(np.int32)).to(device, non_blocking=True)
    return {
        **{name: batch[name] for name in ("input_ids", "position_ids")},
        "use_cache": False,
        "cu_seq_lens_q": bounds[0],
        "cu_seq_lens_k": bounds[1],
        "max_length_q": int(queries.max(initial=0)),
        "max_length_k": int(keys.max(initial=0)),
        "path_cells": torch.from_numpy(cells).to(device, non_blocking=True),
        "context_group": group,
    }


def paths_of_shard(
    placement: Placement, num_rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the queries and keys of each run of cells, int64 [K], and where the keys are.

    The keys of a run are those of its segment up to its end. They are found in the cells of all
    ranks joined, rank after rank: int64, the sum of the keys of all runs.
    """
    shard: Any = placement.shard
    bounds = np.array(shard.bounds, dtype=np.int64)
    own = slices_of_rank(bounds, num_rows, shard.rank, shard.size, shard.layout)
    firsts = bounds[own.segments]
    keys = own.ends - firsts
    places = places_in_ranks(placement, num_rows)
    return own.ends - own.begins, keys, places[span_indices(firsts, keys)]


def places_in_ranks(placement: Placement, num_rows: int) -> np.ndarray:
    """Return where each cell of the batch is in the cells of all ranks joined: int64 [R * W]."""
    shard: Any = placement.shard
    bounds = np.array(shard.bounds, dtype=np.int64)
    of_ranks = [
        slices_of_rank(bounds, num_rows, rank, shard.size, shard.layout)
        for rank in range(shard.size)
    ]
    cells = np.concatenate([span_indices(own.begins, own.ends - own.begins) for own in of_ranks])
    places = np.empty_like(cells)
    places[cells] = np.arange(len(cells))
    return places


def _refuse_for_shards(kind: ModelKind, placement: Placement, shard: Shard) -> None:
    """Refuse a model or rows for which keys of other ranks are not all that is needed."""
    _refuse_model(kind, "context shards", "no rank has whole", "pass it whole rows")
    if kind.attention != "torch_varlen":
        raise ValueError(
            f"attention {kind.attention!r} does not see the keys of other context ranks; use "
            '"torch_varlen" for the model, or cut rows as another framework does (docs/recipes.md)'
        )
    if placement.vision is not None:
        raise ValueError(
            "the placeholders of an image may be on several context ranks, and its features on "
            "one; pass whole rows of vision-language models"
        )
    if shard.has_left_pads:
        raise ValueError(
            "rows padded on the left need a mask, which shards do not pass on; collate with "
            'PaddedCollator(..., padding_side="right"), or pack'
        )


def _refuse_model(kind: ModelKind, what: str, along: str, way_out: str) -> None:
    """Refuse a model that reads more than keys before a token, where rows are not whole."""
    family = kind.family
    carries_state = family.keywords or family.needs_isolation or kind.is_isolated
    if carries_state or family.refused or kind.is_two_way:
        reason = f"its layers carry state along a row, which {along}"
        if kind.is_two_way:
            reason = "tokens see later ones there, which are not in the keys of a causal part"
        reason = family.refused or reason
        raise IsolationError(f"{what} are wrong in {family.name} models: {reason}; {way_out}")


_OTHERWISE = "or collate without share_prefixes"


def tree_inputs(
    batch: Mapping[str, Any], columns: Columns, kind: ModelKind, window: int | None
) -> dict[str, Any]:
    """Return the inputs of rows whose segments share prefixes: no labels, which are per token.

    Raises:
        IsolationError: a model whose layers do not follow paths.
        ValueError: attention that does not; more entries than int32.
    """
    _refuse_for_trees(kind)
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")} | {"use_cache": False}
    if not kind.takes_mask:
        paths = paths_of(columns)
        return inputs | {
            "cu_seq_lens_q": paths.cu_q,
            "cu_seq_lens_k": paths.cu_k,
            "max_length_q": paths.longest_q,
            "max_length_k": paths.longest_k,
            "path_cells": paths.cells,
        }
    mask = tree_mask(columns, kind.attention, window=window or kind.window)
    if kind.all_slide and isinstance(mask, dict):  # such a model may take no dict
        mask = mask["sliding_attention"]
    return inputs | {"attention_mask": mask}


def _refuse_for_trees(kind: ModelKind) -> None:
    """Refuse a model or an attention that does not follow paths through shared prefixes."""
    way_out = _OTHERWISE.removeprefix("or ")
    _refuse_model(kind, "segments that share prefixes", "has no paths", way_out)
    if kind.attention != "torch_varlen" and not kind.takes_mask:
        raise ValueError(
            f"attention {kind.attention!r} has no paths through segments that share prefixes; use "
            f'"torch_varlen", "sdpa" or "eager", {_OTHERWISE}'
        )
    if kind.odd_layers and kind.takes_mask:
        raise ValueError(
            f"the layers {kind.odd_layers} of the model need masks of their own, which are not "
            'made for segments that share prefixes; use attention "torch_varlen" if it accepts '
            f"them, {_OTHERWISE}"
        )
    if kind.dropout:
        raise ValueError(
            f"the model has attention dropout ({kind.dropout}), which would drop a shared prefix "
            "for one segment as for all; load it with attention_dropout=0.0, "
            f"{_OTHERWISE}"
        )


class Paths(NamedTuple):
    """Attention of rows that share prefixes: queries in runs of cells, keys along their paths."""

    cu_q: Tensor  # int32 [S + 1], runs of cells of one segment's own, or of pads, over all rows
    cu_k: Tensor  # int32 [S + 1], where the path of each run begins and ends in cells
    cells: Tensor
    """int64 [K], the cells of all paths: those that the first query of a run sees, and the run."""
    longest_q: int
    longest_k: int


def paths_of(columns: Columns) -> Paths:
    """Return the paths; sizes and boundaries come from host memory, so nothing is waited for."""
    placement, num_rows = columns.placement, columns.num_rows
    width, segments = placement.tree_width, placement.segments
    rows = placement.rows()
    own = segments["own"].values.astype(np.int64)
    firsts = rows * width + segments["firsts"].values
    lengths = segments["lengths"].values.astype(np.int64)
    kept = np.flatnonzero(own > 0)
    order = kept[np.argsort(firsts[kept], kind="stable")]
    begins, ends = firsts[order], firsts[order] + own[order]
    # what lies between runs of tokens are pads: runs that see only themselves, up to row ends
    edges = np.unique(np.concatenate([begins, ends, np.arange(num_rows + 1) * width]))
    counts = np.diff(edges)
    is_run = np.isin(edges[:-1], begins)
    numbers = np.zeros_like(counts)
    numbers[is_run] = order  # they begin in the order of their cells
    path_lengths = np.where(is_run, lengths[numbers], counts)
    before = np.cumsum(lengths) - lengths  # of the tokens of each segment in the column
    starts = np.where(is_run, before[numbers], int(lengths.sum()) + edges[:-1])
    picked = torch.from_numpy(span_indices(starts, path_lengths))
    cells = cells_of_tokens(columns)
    every = torch.arange(num_rows * width, device=cells.device)
    joined = torch.cat([cells, every])[picked.to(cells.device, non_blocking=True)]
    cu_q, cu_k = edges, np.append(0, np.cumsum(path_lengths))
    if max(cu_q[-1], cu_k[-1]) > MAX_WIDTH:
        raise ValueError(
            f"paths of {cu_k[-1]} tokens through {cu_q[-1]} cells are more than int32 boundaries "
            f"can count, {MAX_WIDTH}; pass them to the model in parts, such as batch.split(rows)"
        )
    bounds = torch.from_numpy(np.stack([cu_q, cu_k]).astype(np.int32))
    bounds = bounds.to(cells.device, non_blocking=True)
    return Paths(bounds[0], bounds[1], joined, int(counts.max()), int(path_lengths.max()))


def tree_mask(
    columns: Columns, attention: str, *, window: int | None
) -> Tensor | dict[str, Tensor]:
    """Return the mask [R, 1, W, W] by which a cell sees its path up to itself.

    With ``window`` a dict of two masks, as ``block_mask`` returns; it counts tokens of the path.
    """
    paths, num_rows, width = paths_of(columns), columns.num_rows, columns.placement.tree_width
    device = paths.cells.device
    runs = torch.arange(len(paths.cu_q) - 1, device=device)
    of_cells, of_keys = (
        torch.repeat_interleave(runs, bounds.diff().long(), output_size=total)
        for bounds, total in ((paths.cu_q, num_rows * width), (paths.cu_k, len(paths.cells)))
    )
    on_path = torch.zeros(len(runs), width, dtype=torch.bool, device=device)
    on_path.index_put_((of_keys, paths.cells % width), on_path.new_ones(()))
    # pads have position 0, so that those of a run see each other, which nothing reads
    positions: Any = make_field("position_ids", columns, {}, {})
    of_query, of_key = positions[:, :, None], positions[:, None, :]  # no numbers [R, W, W]
    seen = on_path[of_cells].view(num_rows, width, width) & (of_key <= of_query)
    masks = {"full_attention": seen[:, None]}
    if window is not None:
        masks["sliding_attention"] = (seen & (of_key > of_query - window))[:, None]
    return masks_for(attention, masks)


def masks_for(attention: str, masks: dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
    """Return masks of bool as the attention reads them: a dict where there are several."""
    if attention != "sdpa":
        zeros = torch.zeros_like(masks["full_attention"], dtype=torch.bfloat16)
        masks = {name: zeros.masked_fill(~mask, -math.inf) for name, mask in masks.items()}
    return masks if len(masks) > 1 else masks["full_attention"]
