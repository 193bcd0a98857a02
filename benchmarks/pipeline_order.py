"""Simulated steps of pipelines: the order of rows, and how far a step is above its bound.

    python benchmarks/pipeline_order.py

Four ranks with rows of the real mix as a step plans them, each a micro-batch, under 1F1B. A row
costs ``W * L + sum(n * n)`` forward on every stage, and twice that backward. The figure is the time
of the slowest rank over its bound: the work of a stage, and the least head and tail around it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from harness import arguments
from pages import markdown_table

from torch_collate_kit import PackedBatchSampler, PackedCollator, ParallelLayout

_RANKS, _STEPS = 4, 12


def makespan(costs: np.ndarray, stages: int) -> float:
    """Return the time of a 1F1B step; each stage runs its passes in the fixed order.

    >>> makespan(np.array([1.0, 1.0]), 1), makespan(np.array([1.0, 1.0]), 2)
    (6.0, 9.0)
    """
    count = len(costs)
    schedules = []
    for stage in range(stages):
        warm = min(count, stages - stage - 1)
        passes = [("f", i) for i in range(warm)]
        for i in range(count - warm):
            passes += [("f", warm + i), ("b", i)]
        schedules.append(passes + [("b", i) for i in range(count - warm, count)])
    done: dict[tuple[str, int, int], float] = {}
    clock, at = [0.0] * stages, [0] * stages
    while any(at[s] < len(schedules[s]) for s in range(stages)):
        for stage in range(stages):
            while at[stage] < len(schedules[stage]):
                kind, i = schedules[stage][at[stage]]
                before = ("f", stage - 1, i) if kind == "f" else ("b", stage + 1, i)
                if kind == "b" and stage == stages - 1:
                    before = ("f", stage, i)
                if not (kind == "f" and stage == 0) and before not in done:
                    break
                begin = max(clock[stage], done.get(before, 0.0))
                clock[stage] = begin + costs[i] * (1 if kind == "f" else 2)
                done[kind, stage, i] = clock[stage]
                at[stage] += 1
    return max(clock)


def at_ends(rising: np.ndarray) -> np.ndarray:
    """Return an order with the first ones of ``rising`` at both ends, the last in the middle."""
    return np.concatenate([rising[0::2], rising[1::2][::-1]])


ORDERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "planned": lambda costs: np.arange(len(costs)),
    "smallest first": lambda costs: np.argsort(costs, kind="stable"),
    "small at ends": lambda costs: at_ends(np.argsort(costs, kind="stable")),
    "large at ends": lambda costs: at_ends(np.argsort(-costs, kind="stable")),
    "random": lambda costs: np.random.default_rng(0).permutation(len(costs)),
}


def main() -> None:
    given = arguments(__doc__, rounds=2).parse_args()
    lengths = np.load(given.data / "lengths" / "mix_all.qwen.npy").astype(np.int64)
    rows = []
    for width, linear, count, stages in (
        (8192, 24_576, 16, 4), (8192, 24_576, 16, 8), (8192, 24_576, 8, 8),
        (8192, 98_304, 32, 8), (32_768, 24_576, 16, 8),
    ):  # fmt: skip
        of = np.minimum(lengths, width)
        collate = PackedCollator(
            0, max_tokens=width, parallel=ParallelLayout(dp=_RANKS), normalize_loss=False
        )
        sampler = PackedBatchSampler(
            of, collate, batch_rows=_RANKS * count, dp_rank=0, tail="wrap", window=4
        )
        found: dict[str, list[float]] = {name: [] for name in ORDERS}
        for _, part in zip(range(_STEPS), sampler, strict=False):
            plan = part.plan
            squares = np.add.reduceat(plan.lengths**2, plan.row_offsets[:-1])
            costs = (width * linear + squares).reshape(_RANKS, -1) / (width * linear)
            for name, order in ORDERS.items():
                times = [makespan(rank[order(rank)], stages) for rank in costs]
                bounds = [3 * (rank.sum() + (stages - 1) * rank.min()) for rank in costs]
                found[name].append(max(times) / max(bounds))
        cells = [f"{np.mean(values):.3f}" for values in found.values()]
        rows.append([f"{width:,}, L {linear:,}", f"{count}, {stages}", *cells])
    print(markdown_table(["rows", "m, stages", *ORDERS], rows))


if __name__ == "__main__":
    main()
