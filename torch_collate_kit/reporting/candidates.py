"""What one way to lay out the data gives: the figures of a plan, and of padded rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_collate_kit.packing import PackingOptions, PackingPlan
from torch_collate_kit.packing.fitting import FittedPieces, cut_to_fit
from torch_collate_kit.packing.images import ImageLoad
from torch_collate_kit.packing.planner import plan_of

__all__ = ["PADDED", "Candidate", "candidates_of", "packed_candidate", "padded_candidate"]

PADDED = "padded"
_Ints = npt.NDArray[np.int64]


@dataclass
class Candidate:
    """The figures of one layout, added up step by step."""

    max_tokens: int
    strategy: str
    """One of packing's, or "padded"."""
    num_rows: int = 0
    num_tokens: int = 0
    num_cells: int = 0
    num_dropped: int = 0
    num_dropped_tokens: int = 0
    num_cut: int = 0
    num_cut_tokens: int = 0
    tokens_per_rank: list[int] = field(default_factory=list)
    cost_per_rank: list[int] = field(default_factory=list)
    tokens_max_over_mean: float = 1.0
    cost_max_over_mean: float = 1.0
    plan_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """All figures, ``efficiency`` and ``padding`` (shares of the cells) among them."""
        figures = {each.name: getattr(self, each.name) for each in fields(self)}
        efficiency = self.num_tokens / self.num_cells if self.num_cells else 1.0
        first = {name: figures.pop(name) for name in ("max_tokens", "strategy")}
        return {**first, "efficiency": efficiency, "padding": 1.0 - efficiency, **figures}

    def count_lost(self, lost: FittedPieces | PackingPlan) -> None:
        """Adds what did not fit."""
        self.num_dropped += len(lost.dropped)
        self.num_dropped_tokens += lost.num_dropped_tokens
        self.num_cut += len(lost.cut)
        self.num_cut_tokens += lost.num_cut_tokens

    def set_ranks(self, tokens: _Ints, costs: _Ints) -> None:
        """``tokens`` and ``costs`` int64 [steps, ranks]: what every rank gets in every step."""
        self.tokens_per_rank = tokens.sum(axis=0).tolist()
        self.cost_per_rank = costs.sum(axis=0).tolist()
        self.tokens_max_over_mean = _max_over_mean(tokens)
        self.cost_max_over_mean = _max_over_mean(costs)


def packed_candidate(
    lengths: _Ints, packing: PackingOptions, images: ImageLoad | None, batch_size: int | None
) -> Candidate:
    """``lengths`` int64 [N] packed, ``batch_size`` examples at a time, or all at once."""
    found = Candidate(packing.max_tokens, packing.strategy)
    tokens, costs = [], []
    for start in range(0, len(lengths), batch_size or len(lengths)):
        batch = slice(start, start + (batch_size or len(lengths)))
        part = None if images is None else images.take(np.arange(len(lengths))[batch])
        began = time.perf_counter()
        plan = plan_of(lengths[batch], packing, part)
        found.plan_seconds += time.perf_counter() - began
        found.count_lost(plan)
        found.num_rows += plan.num_rows
        found.num_cells += plan.num_rows * plan.width
        found.num_tokens += int(plan.lengths.sum())
        step_tokens, step_costs = _per_step(plan, by_row=batch_size is None)
        tokens.append(step_tokens)
        costs.append(step_costs)
    found.set_ranks(np.concatenate(tokens), np.concatenate(costs))
    return found


def _per_step(plan: PackingPlan, *, by_row: bool) -> tuple[_Ints, _Ints]:
    """Tokens and cost of every rank: [1, ranks], or for each row of a rank [rows, ranks]."""
    costs = plan.cost.language(plan.aligned_lengths) + plan.vision_costs
    sums = np.append(0, np.cumsum(costs))[plan.row_offsets]
    found = []
    for per_row in (plan.row_tokens, np.diff(sums)):
        per_rank = per_row.reshape(plan.num_ranks, -1)
        found.append(per_rank.T if by_row else per_rank.sum(axis=1)[None])
    return found[0], found[1]


def padded_candidate(
    lengths: _Ints, packing: PackingOptions, images: ImageLoad | None, batch_size: int
) -> Candidate:
    """One row per example, each as wide as the longest of its batch, in the order of ``lengths``.

    The examples are those that ``packing`` keeps, cut as it says. In a step every rank has
    ``batch_size`` of them, and in the last step fewer, or none.
    """
    found = Candidate(packing.max_tokens, PADDED)
    pieces = cut_to_fit(lengths, packing, images)
    found.count_lost(pieces)
    kept, align = pieces.lengths, packing.parallel.align
    found.num_rows, found.num_tokens = len(kept), int(kept.sum())
    starts = np.arange(0, len(kept), batch_size)
    if not len(starts):
        return found
    rows = np.diff(np.append(starts, len(kept)))
    widths = -(-np.maximum.reduceat(kept, starts) // align) * align
    found.num_cells = int((rows * widths).sum())
    costs = rows * packing.cost.language(widths) + np.add.reduceat(pieces.images.costs, starts)
    num_ranks = packing.parallel.dp
    missing = -len(starts) % num_ranks
    per_rank = (
        np.append(per_batch, np.zeros(missing, dtype=np.int64)).reshape(-1, num_ranks)
        for per_batch in (np.add.reduceat(kept, starts), costs)
    )
    found.set_ranks(*per_rank)
    return found


def _max_over_mean(per_step: _Ints) -> float:
    """What the slowest rank of each step takes, in relation to the mean rank: [steps, ranks]."""
    total = int(per_step.sum())
    slowest = int(per_step.max(axis=1).sum())
    return slowest * per_step.shape[1] / total if total else 1.0


def candidates_of(
    lengths: _Ints,
    packings: Sequence[PackingOptions],
    images: ImageLoad | None,
    batch_size: int | None,
    padded_batch_size: int,
) -> Iterator[Candidate]:
    """For every ``max_tokens``, padded rows and the strategies, in the order given."""
    done: set[int] = set()
    for packing in packings:
        if packing.max_tokens not in done:
            done.add(packing.max_tokens)
            yield padded_candidate(lengths, packing, images, padded_batch_size)
        yield packed_candidate(lengths, packing, images, batch_size)
