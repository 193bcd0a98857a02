"""What one way to lay out the data gives: the figures of a plan, and of padded rows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from torch_collate_kit.packing import PackingOptions, PackingPlan
from torch_collate_kit.packing.pieces import FittedPieces, ImageLoad, cut_to_fit
from torch_collate_kit.packing.planner import plan_of
from torch_collate_kit.packing.rows import Ints, row_sums

__all__ = ["PADDED", "candidates_of"]

PADDED = "padded"


def candidates_of(
    lengths: Ints,
    packings: Sequence[PackingOptions],
    images: ImageLoad | None,
    batch_size: int | None,
    padded_batch_size: int,
) -> Iterator[dict[str, Any]]:
    """For every ``max_tokens``, padded rows and the strategies, in the order given."""
    done: set[int] = set()
    for packing in packings:
        if packing.max_tokens not in done:
            done.add(packing.max_tokens)
            yield _padded(lengths, packing, images, padded_batch_size)
        yield _packed(lengths, packing, images, batch_size)


def _packed(
    lengths: Ints, packing: PackingOptions, images: ImageLoad | None, batch_size: int | None
) -> dict[str, Any]:
    """``lengths`` int64 [N] packed, ``batch_size`` examples at a time, or all at once.

    A step is a batch, or of data packed at once one row of every rank.
    """

    def per_step(per_row: Ints) -> Ints:
        per_rank = per_row.reshape(packing.num_ranks, -1)
        return per_rank.T if batch_size is None else per_rank.sum(axis=1)[None]

    sums: Counter[str] = Counter()
    tokens, costs, seconds = [], [], 0.0
    for start in range(0, len(lengths), batch_size or len(lengths)):
        batch = np.arange(start, min(start + (batch_size or len(lengths)), len(lengths)))
        part = None if images is None else images.take(batch)
        began = time.perf_counter()
        plan = plan_of(lengths[batch], packing, part)
        seconds += time.perf_counter() - began
        sums.update(
            num_rows=plan.num_rows,
            num_tokens=int(plan.lengths.sum()),
            num_cells=plan.num_rows * plan.width,
            **_lost(plan),
        )
        of_pieces = plan.cost.language(plan.aligned_lengths) + plan.vision_costs
        tokens.append(per_step(plan.row_tokens))
        costs.append(per_step(row_sums(of_pieces, plan.row_offsets)))
    ranks = np.concatenate(tokens), np.concatenate(costs)
    return _figures(packing, packing.strategy, sums, *ranks, plan_seconds=seconds)


def _padded(
    lengths: Ints, packing: PackingOptions, images: ImageLoad | None, batch_size: int
) -> dict[str, Any]:
    """One row per example, each as wide as the longest of its batch, in the order of ``lengths``.

    The examples are those that ``packing`` keeps, cut as it says. In a step every rank has
    ``batch_size`` of them, and in the last step fewer, or none.
    """
    pieces = cut_to_fit(lengths, packing, images)
    kept, align = pieces.lengths, packing.parallel.align
    starts = np.arange(0, len(kept), batch_size)
    rows = np.diff(starts, append=len(kept))
    widths = -(-np.maximum.reduceat(kept, starts) // align) * align
    costs = rows * packing.cost.language(widths) + np.add.reduceat(pieces.images.costs, starts)
    sums = {
        "num_rows": len(kept),
        "num_tokens": int(kept.sum()),
        "num_cells": int((rows * widths).sum()),
        **_lost(pieces),
    }
    num_ranks = packing.parallel.dp
    ranks = (
        np.pad(per_batch, (0, -len(starts) % num_ranks)).reshape(-1, num_ranks)
        for per_batch in (np.add.reduceat(kept, starts), costs)
    )
    return _figures(packing, PADDED, sums, *ranks)


def _lost(pieces: FittedPieces | PackingPlan) -> dict[str, int]:
    """What does not fit."""
    return {
        "num_dropped": len(pieces.dropped),
        "num_dropped_tokens": pieces.num_dropped_tokens,
        "num_cut": len(pieces.cut),
        "num_cut_tokens": pieces.num_cut_tokens,
    }


def _figures(
    packing: PackingOptions,
    layout: str,
    sums: Mapping[str, int],
    tokens: Ints,
    costs: Ints,
    *,
    plan_seconds: float = 0.0,
) -> dict[str, Any]:
    """A candidate, of sums over all steps; ``tokens`` and ``costs`` int64 [steps, ranks]."""
    efficiency = sums["num_tokens"] / sums["num_cells"] if sums["num_cells"] else 1.0
    return {
        "max_tokens": packing.max_tokens,
        "strategy": layout,
        "efficiency": efficiency,
        "padding": 1.0 - efficiency,
        **sums,
        "tokens_per_rank": tokens.sum(axis=0).tolist(),
        "cost_per_rank": costs.sum(axis=0).tolist(),
        "tokens_max_over_mean": _max_over_mean(tokens),
        "cost_max_over_mean": _max_over_mean(costs),
        "plan_seconds": plan_seconds,
    }


def _max_over_mean(per_step: Ints) -> float:
    """What the slowest rank of each step takes, in relation to the mean rank: [steps, ranks]."""
    total = int(per_step.sum())
    slowest = int(per_step.max(axis=1).sum())
    return slowest * per_step.shape[1] / total if total else 1.0
