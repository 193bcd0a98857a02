"""The cells that context ranks compute, drawn with matplotlib: a colour per rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_collate_kit._reprs import plural
from torch_collate_kit.batch.context_shards import shard_of
from torch_collate_kit.batch.dense import cells_of_shard
from torch_collate_kit.batch.showing.plot import (
    axes_of_rows,
    draw_examples,
    draw_kinds,
    draw_runs,
    drawable_cells,
    rows_in_words,
)
from torch_collate_kit.batch.showing.style import COLORS, legend_below, matplotlib_module
from torch_collate_kit.batch.storage import Storage
from torch_collate_kit.packing.context import attention_work, busiest_over_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FEW = ("blue", "orange", "green", "purple", "sky", "vermillion")
_MOST_NAMES = 16
_PALE = (1.0, 1.0, 1.0, 0.6)  # over the colour of the rank, which computes pads, too


def draw_context(
    stored: Storage, num_rows: int, cp_size: int, layout: str, ax: Axes | None
) -> Axes:
    """Draw the rows of ``stored``, the first of ``num_rows``, in the colours of context ranks."""
    cells = drawable_cells(stored)
    ranks, work = _ranks_of(stored, cells.kinds.shape, cp_size, layout)
    ax = axes_of_rows(ax, cells)
    of_ranks = cells._replace(kinds=np.zeros_like(cells.kinds), segments=ranks, trained=None).runs()
    handles = _draw_ranks(ax, of_ranks, cp_size)
    handles += draw_kinds(ax, cells.runs(), _PALE)
    draw_examples(ax, stored, cells, border=2.0)
    ax.set_title(
        f"{rows_in_words(cells, num_rows)}, {layout} over {plural(cp_size, 'context rank')}: "
        f"attention, busiest / mean {busiest_over_mean(work):.3f}"
    )
    legend_below(ax, handles)
    return ax


def _ranks_of(
    stored: Storage, shape: tuple[int, ...], size: int, layout: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rank of each cell, int64 [R, W], and the attention of each rank in each row."""
    ranks = np.zeros(shape, dtype=np.int64)
    shard = shard_of(stored, 0, size, layout)
    whole: Any = shard.columns.placement.shard
    bounds = np.array(whole.bounds)
    for rank in range(1, size):
        shard = shard_of(stored, rank, size, layout)
        ranks.flat[cells_of_shard(shard.columns).cpu().numpy()] = rank
    return ranks, attention_work(bounds, len(ranks), size, layout)


def _draw_ranks(ax: Any, runs: Any, size: int) -> list[Any]:
    """Draw a collection for each rank, and return the entries of the legend."""
    patch = matplotlib_module("patches").Patch
    colors: Any = [COLORS[name] for name in _FEW]
    if size > len(_FEW):
        colors = matplotlib_module("pyplot").get_cmap("viridis")(np.linspace(0.15, 1, size))
    handles = []
    for rank, color in enumerate(colors[:size]):
        look = {"facecolor": color, "edgecolor": "none"}
        draw_runs(ax, runs, runs.segments == rank, f"rank {rank}", **look)
        if rank % -(-size // _MOST_NAMES) == 0:
            handles.append(patch(facecolor=color, edgecolor="black", label=f"rank {rank}"))
    return handles
