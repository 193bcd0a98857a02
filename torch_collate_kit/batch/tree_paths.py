"""Attention of rows whose segments share prefixes: each cell sees the path that leads to it."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.batch.columns import Columns
from torch_collate_kit.batch.dense import cells_of_tokens
from torch_collate_kit.ragged import span_indices


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
    numbers = np.searchsorted(begins, edges[:-1])
    is_run = np.isin(edges[:-1], begins)
    numbers = (
        np.where(is_run, order[np.minimum(numbers, max(len(order) - 1, 0))], -1)
        if len(order)
        else np.full(len(edges) - 1, -1)
    )
    counts = np.diff(edges)
    path_lengths = np.where(is_run, lengths[numbers], counts)
    before = np.cumsum(lengths) - lengths  # of the tokens of each segment in the column
    starts = np.where(is_run, before[numbers], int(lengths.sum()) + edges[:-1])
    picked = torch.from_numpy(span_indices(starts, path_lengths))
    cells = cells_of_tokens(columns)
    every = torch.arange(num_rows * width, device=cells.device)
    joined = torch.cat([cells, every])[picked.to(cells.device, non_blocking=True)]
    cu_q, cu_k = edges, np.append(0, np.cumsum(path_lengths))
    bounds = torch.from_numpy(np.stack([cu_q, cu_k]).astype(np.int32))
    bounds = bounds.to(cells.device, non_blocking=True)
    return Paths(bounds[0], bounds[1], joined, int(counts.max()), int(path_lengths.max()))


def tree_mask(
    columns: Columns, positions: Tensor, attention: str, *, window: int | None
) -> Tensor | dict[str, Tensor]:
    """Return the mask [R, 1, W, W] by which a cell sees its path up to itself.

    With ``window`` a dict of two masks, as ``block_mask`` returns; it counts positions.
    """
    num_rows, width = positions.shape
    paths = paths_of(columns)
    total = num_rows * width
    runs_q, runs_k = paths.cu_q.diff().long(), paths.cu_k.diff().long()
    runs = torch.arange(len(runs_q), device=positions.device)
    run_of_cell = torch.repeat_interleave(runs, runs_q, output_size=total)
    run_of_key = torch.repeat_interleave(runs, runs_k, output_size=len(paths.cells))
    on_path = positions.new_zeros(len(runs), total, dtype=torch.bool)
    on_path[run_of_key, paths.cells] = True
    seen = on_path[run_of_cell].view(num_rows, width, num_rows, width)
    own_row = torch.arange(num_rows, device=positions.device)
    seen = seen[own_row, :, own_row]
    cells = torch.arange(width, device=positions.device)
    is_pad_run = (runs_q == runs_k)[run_of_cell].view(num_rows, width, 1)
    is_later = positions[:, None, :] > positions[:, :, None]
    after = cells[None, :] > cells[:, None]
    seen &= ~torch.where(is_pad_run, after, is_later)
    masks = {"full_attention": seen[:, None]}
    if window is not None:
        distance = positions[:, :, None] - positions[:, None, :]
        masks["sliding_attention"] = (seen & (distance < window))[:, None]
    if attention != "sdpa":
        zeros = torch.zeros(seen[:, None].shape, dtype=torch.bfloat16, device=seen.device)
        masks = {name: zeros.masked_fill(~of, -math.inf) for name, of in masks.items()}
    return masks["full_attention"] if window is None else masks
