"""Attention of rows whose segments share prefixes: each cell sees the path that leads to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.batch.columns import Columns
from torch_collate_kit.batch.dense import cells_of_tokens, make_field
from torch_collate_kit.batch.model_kind import ModelKind
from torch_collate_kit.batch.placement import MAX_WIDTH
from torch_collate_kit.errors import IsolationError
from torch_collate_kit.ragged import span_indices

_OTHERWISE = "or collate without share_prefixes"


def tree_inputs(
    batch: Mapping[str, Any], columns: Columns, kind: ModelKind, window: int | None
) -> dict[str, Any]:
    """Return the inputs of rows whose segments share prefixes: no labels, which are per token.

    Raises:
        IsolationError: a model whose layers do not follow paths.
        ValueError: attention that does not; more entries than int32.
    """
    _refuse_other_models(kind)
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


def _refuse_other_models(kind: ModelKind) -> None:
    """Refuse a model or an attention that does not follow paths through shared prefixes."""
    family = kind.family
    carries_state = family.keywords or family.needs_isolation or kind.is_isolated
    if carries_state or family.refused:
        reason = family.refused or "its layers carry state along a row, which has no paths"
        raise IsolationError(
            f"segments that share prefixes are wrong in {family.name} models: {reason}; collate "
            "without share_prefixes"
        )
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

    cu_q: Tensor
    """int32 [S + 1], runs of cells of one segment's own, or of pads, over all rows."""
    cu_k: Tensor
    """int32 [S + 1], where the path of each run begins and ends in ``cells``."""
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
    if attention != "sdpa":
        zeros = torch.zeros(seen[:, None].shape, dtype=torch.bfloat16, device=device)
        masks = {name: zeros.masked_fill(~of, -math.inf) for name, of in masks.items()}
    return masks["full_attention"] if window is None else masks
