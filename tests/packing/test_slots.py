"""max_sequences_per_row with "balanced": rows as full as without a limit, and never more pieces."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.building import packed_sampler
from torch_collate_kit import (
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    PackingOptions,
    ParallelLayout,
    audit,
    pack,
)
from torch_collate_kit.errors import DataError
from torch_collate_kit.reporting import packing_report

ALL = "ALL_CASES" in os.environ
MIXES = ["mix_all.qwen", "mix_all.mistral", "gsm8k_train.qwen", "taskmaster4_all.qwen"]


def sampler(lengths: np.ndarray, most: int | None, width: int, seed: int = 0) -> PackedBatchSampler:
    packing = PackingOptions(
        width, "balanced", parallel=ParallelLayout(dp=8), max_sequences_per_row=most
    )
    collate = PackedCollator(0, packing=packing, normalize_loss=False)
    return PackedBatchSampler(lengths, collate, batch_rows=16, dp_rank=0, seed=seed, tail="drop")


def figures(parts: list[Any], width: int) -> tuple[float, float, float, float, int]:
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


# --- Rows of any ``max_tokens``: no array of as many entries, no sum beyond int64, the same plans


LENGTHS = np.random.default_rng(0).integers(1, 2000, 120)
LARGE = [2**31, 2**41, 2**62, 2**70]
STRATEGIES = ["balanced", "best_fit_decreasing", "first_fit_decreasing", "sequential", "wrapped"]


@pytest.mark.parametrize("max_tokens", LARGE)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_that_hold_all_are_planned(max_tokens: int, strategy: str) -> None:
    options: dict[str, Any] = {"max_tokens": max_tokens, "strategy": strategy}
    plan = pack(LENGTHS, parallel=ParallelLayout(dp=2), **options)
    assert plan.lengths.sum() == LENGTHS.sum()
    assert plan.num_rows == 2
    assert 0 < plan.efficiency <= 1
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    packing = PackingOptions(**options, max_patches=None if strategy == "wrapped" else max_tokens)
    patches = {} if strategy == "wrapped" else {"patches": LENGTHS % 7}
    collate = PackedCollator(tokenizer, packing=packing, normalize_loss=False)
    for number in ({"batch_rows": 2}, {"batch_size": 50}):
        sampler = PackedBatchSampler(LENGTHS, collate, dp_rank=0, **number, **patches)
        assert sum(int(part.plan.lengths.sum()) for part in sampler) == LENGTHS.sum()
    examples = [{"input_ids": [5] * int(n) + [1]} for n in LENGTHS[:40] // 20]
    stream = PackedIterableDataset(examples, PackedCollator(tokenizer, **options), buffer_size=9)
    assert sum(batch.num_tokens for batch in stream) == sum(len(of["input_ids"]) for of in examples)


def test_joined_epochs_that_never_fill_a_row_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"500 of 120 examples do not fill 8 steps of batch_rows=2"
    ):
        list(packed_sampler(LENGTHS, batch_rows=2, tail="wrap", max_tokens=2**41))


@pytest.mark.parametrize("max_tokens", LARGE)
def test_examples_longer_than_int32_counts_fit_in_no_row(max_tokens: int) -> None:
    long = [min(max_tokens, 2**58), 5]
    for make in (pack, lambda *of: packed_sampler(of[0], batch_rows=2, max_tokens=of[1])):
        with pytest.raises(DataError, match=r"more than the 2147483647 that fit .*int32 counts"):
            make(long, max_tokens)
    assert pack(long, max_tokens, overflow="drop").dropped.tolist() == [0]
    nearly = [2**31 - 1, 5, 2**31 - 1, 2**30, 2**30]
    for strategy in STRATEGIES:
        plan = pack(nearly, max_tokens, strategy=strategy)
        assert plan.row_cells.max() < 2**31
        assert plan.lengths.sum() == sum(nearly)
    assert len(list(packed_sampler(nearly, batch_rows=1, max_tokens=max_tokens))) == 4


@pytest.mark.parametrize("max_tokens", LARGE)
def test_reports_and_audits_return(max_tokens: int) -> None:
    report = packing_report([min(max_tokens, 2**62), 5], max_tokens, show=False)
    assert report["candidates"][1]["num_dropped"] == 1
    assert report["candidates"][1]["num_rows"] == 1
    if max_tokens == LARGE[1]:
        short = packing_report([30, 20, 7], max_tokens, batch_rows=1, show=False)
        assert short["steps"][1]["num_steps"] == 1
    assert "padding 0.0%" in str(packing_report([30, 30, 30], max_tokens, show=False))
    assert audit([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}], max_tokens=max_tokens)


@pytest.mark.parametrize("dp", [1, 2])
def test_a_text_longer_than_a_row_is_cut_where_it_is_counted(dp: int) -> None:
    packing = PackingOptions(
        40, parallel=ParallelLayout(dp=dp), overflow="split", dummy_image_tokens=4
    )
    plan = pack([12, 78], packing=packing)
    assert sorted(plan.lengths.tolist()) == [12, 38, 40]
    plan = pack([12, 78], packing=packing, patches=[4, 0])
    assert sorted(plan.lengths.tolist()) == ([12, 38, 40] if dp == 1 else [6, 12, 36, 36])
    batch = PackedCollator(0, packing=packing)([{"input_ids": [5] * 12}, {"input_ids": [5] * 78}])
    assert batch.num_tokens == 90
