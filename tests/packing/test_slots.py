"""max_sequences_per_row with "balanced": rows as full as without a limit, and never more pieces."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torch_collate_kit import (
    PackedBatchSampler,
    PackedCollator,
    PackingOptions,
    ParallelLayout,
    pack,
)
from torch_collate_kit.packing.rank_plan import RankPlan
from torch_collate_kit.reporting import packing_report

ALL = "ALL_CASES" in os.environ
MIXES = ["mix_all.qwen", "mix_all.mistral", "gsm8k_train.qwen", "taskmaster4_all.qwen"]


def sampler(lengths: np.ndarray, most: int | None, width: int, seed: int = 0) -> PackedBatchSampler:
    packing = PackingOptions(
        width, "balanced", parallel=ParallelLayout(dp=8), max_sequences_per_row=most
    )
    collate = PackedCollator(0, packing=packing, normalize_loss=False)
    return PackedBatchSampler(lengths, collate, batch_rows=16, dp_rank=0, seed=seed, tail="drop")


def figures(parts: list[RankPlan], width: int) -> tuple[float, float, float, float, int]:
    """Share of filled cells, of ranks and steps the unevenness, segments of a row: mean, most."""
    plans = [part.plan for part in parts]
    cells = width * sum(plan.num_rows for plan in plans)
    costs = np.array([plan.cost_per_rank for plan in plans])
    counts = np.concatenate([plan.rows.counts() for plan in plans])
    ranks = float((costs.max(axis=1) / costs.mean(axis=1)).mean())
    steps = float(costs.sum(axis=1).std() / costs.sum(axis=1).mean())
    full = sum(int(plan.lengths.sum()) for plan in plans) / cells
    return full, ranks, steps, float(counts.mean()), int(counts.max())


@pytest.mark.parametrize("name", MIXES if ALL else MIXES[1:3])
@pytest.mark.parametrize("width", [8192, 4096])
def test_a_limit_costs_nothing_on_real_lengths(shared_data: Path, name: str, width: int) -> None:
    lengths = np.minimum(np.load(shared_data / "lengths" / f"{name}.npy"), width)
    full, ranks, steps, mean, most = figures(list(sampler(lengths, None, width)), width)
    limit = math.ceil(1.25 * mean)
    found = figures(list(sampler(lengths, limit, width)), width)
    assert found[0] > full - 0.01
    assert found[1] < ranks + 0.005
    assert found[2] < steps + 0.01
    assert found[4] <= limit < most or most <= limit


def test_written_out() -> None:
    """Best fit under the limit: [9], [3, 3, 3], [3, 1, 1], [1]; four ones make a row of its own."""
    lengths = [9, 3, 3, 3, 3, 1, 1, 1]
    packing = PackingOptions(10, max_sequences_per_row=3)
    best_fit = pack(lengths, packing=packing)
    assert best_fit.num_rows == 3
    crowded = [6, 6, 6] + [2] * 3 + [1] * 6
    cases: Any = (("best_fit_decreasing", 5), ("balanced", 4))
    for strategy, rows in cases:
        packing = PackingOptions(8, strategy, max_sequences_per_row=3)
        plan = pack(crowded, packing=packing)
        assert plan.num_rows == rows, strategy
        assert plan.rows.counts().max() <= 3


@pytest.mark.parametrize("case", range(1000 if ALL else 50))
def test_no_row_of_a_random_window_has_more(case: int) -> None:
    rng = np.random.default_rng((3, case))
    shape, width = rng.choice([0.5, 1, 3]), int(rng.integers(20, 400))
    lengths = 1 + (width * rng.random(int(rng.integers(50, 400))) ** shape).astype(np.int64) % width
    most, rows = int(rng.integers(1, 12)), 2 * int(rng.integers(1, 5))
    packing = PackingOptions(
        width, "balanced", max_sequences_per_row=most, parallel=ParallelLayout(dp=2)
    )
    collate = PackedCollator(0, packing=packing, normalize_loss=False)
    seen = []
    for part in PackedBatchSampler(lengths, collate, batch_rows=rows, dp_rank=0):
        plan = part.plan
        assert plan.num_rows == rows
        assert plan.rows.counts().max() <= most
        assert plan.row_tokens.max() <= width
        seen += plan.lengths.tolist()
    assert sorted(seen) == sorted(lengths.tolist())
    whole = pack(lengths, packing=packing)
    today = pack(lengths, packing=PackingOptions(width, max_sequences_per_row=most))
    free = pack(lengths, packing=PackingOptions(width))
    assert max(free.num_rows, -(-len(lengths) // most)) <= whole.num_rows
    assert whole.num_rows <= today.num_rows + today.num_rows % 2


def test_the_report_recommends_a_limit() -> None:
    lengths = np.random.default_rng(0).integers(5, 60, 400)
    report = packing_report(lengths, 256, show=False)
    packed = {c["strategy"]: c for c in report["candidates"] if c["strategy"] != "padded"}
    found = packed[report["recommended"]["strategy"]]
    counts = pack(lengths, 256, strategy=found["strategy"]).rows.counts()
    assert found["mean_segments"] == pytest.approx(counts.mean())
    assert found["most_segments"] == counts.max()
    assert found["max_sequences_per_row"] == math.ceil(1.25 * counts.mean())
    line = f"segments per row: {counts.mean():.1f}, at most {counts.max()}; max_sequences_per_row="
    line += f"{found['max_sequences_per_row']} promises one shape"
    assert line in repr(report)
    pairs = packing_report(
        [{"input_ids": [[5] * 5, [6] * 6]}, {"input_ids": [[7] * 7, [2] * 2]}] * 40, 64, show=False
    )
    best = next(c for c in pairs["candidates"] if c["strategy"] == "balanced")
    assert best["max_sequences_per_row"] == math.ceil(1.25 * best["mean_segments"])
