"""``packing_report(batch_rows=)``: steps by examples, by rows and wrapped, against plain loops."""

from __future__ import annotations

import json

import numpy as np
import pytest

from torch_collate_kit import (
    ModelCost,
    PackedBatchSampler,
    PackedCollator,
    PackingOptions,
    ParallelLayout,
    packing_report,
)

COST = ModelCost(language_linear=50, language_quadratic=2)
LENGTHS = np.random.default_rng(0).integers(1, 40, 400)


def plain_figures(lengths, sampler, *, width, steps=256):
    """The figures of the first steps, with Python numbers and a loop for each."""
    drawn, sums, slowest, means = [], np.zeros(4), [], []
    epoch = 0
    while len(slowest) < steps:
        for step, part in zip(range(steps - len(slowest)), sampler, strict=False):
            plan, examples = part.plan, sampler.examples(epoch, step)
            dp = plan.rows_multiple_of
            costs, attention, tokens, weighted = [0] * dp, [0] * dp, 0, 0.0
            for row, pieces in enumerate(plan.bins):
                rank = row * dp // plan.num_rows
                for piece in pieces:
                    n = int(lengths[examples[piece]])
                    costs[rank] += 50 * n + 2 * n * n
                    attention[rank] += 2 * n * n
                    tokens, weighted = tokens + n, weighted + n * np.log2(n)
                    drawn.append(n)
            num_cells = plan.num_rows * (width or plan.width)
            mean = sum(costs) / dp
            sums += tokens, num_cells, num_cells / dp * 50 + max(attention), mean
            slowest.append(max(costs) / mean)
            means.append(weighted / tokens)
        epoch += 1
    of, per_step = np.array(drawn), sums[0] / len(means)
    middle = (of * np.log2(of)).sum() / of.sum()
    spread = (of**2 * (np.log2(of) - middle) ** 2).mean() / (per_step / of.mean() * of.mean() ** 2)
    return {
        "padding": 1 - sums[0] / sums[1],
        "imbalance": np.mean(slowest),
        "imbalance_99": np.quantile(slowest, 0.99),
        "unlikeness": np.var(means) / (spread * (1 - per_step / lengths.sum())),
        "time_per_token": sums[2] / sums[3],
    }


@pytest.mark.parametrize(("dp", "batch_rows", "batch_size"), [(1, 2, 5), (2, 4, None), (4, 4, 30)])
def test_figures_are_those_of_plain_loops(dp, batch_rows, batch_size):
    parallel = ParallelLayout(dp=dp)
    report = packing_report(
        LENGTHS,
        64,
        parallel=parallel,
        cost=COST,
        batch_size=batch_size,
        batch_rows=batch_rows,
        show=False,
    )
    by_examples, by_rows = report["steps"][:2]
    packing = PackingOptions(64, parallel=parallel, cost=COST)
    collate = PackedCollator(0, packing=packing, normalize_loss=False)
    sampler = PackedBatchSampler(LENGTHS, collate, batch_rows=batch_rows)
    assert by_rows["num_steps"] == len(sampler)
    expected = plain_figures(LENGTHS, sampler, width=64)
    assert {key: by_rows[key] for key in expected} == pytest.approx(expected)
    if batch_size is None:
        batch_size = round(len(LENGTHS) / by_rows["num_steps"])
    assert by_examples["batch_size"] == batch_size
    sampler = PackedBatchSampler(LENGTHS, collate, batch_size=batch_size)
    assert by_examples["num_steps"] == len(sampler) == -(-len(LENGTHS) // batch_size)
    expected = plain_figures(LENGTHS, sampler, width=None)
    assert {key: by_examples[key] for key in expected} == pytest.approx(expected)
    json.dumps(report)


def test_examples_drawn_at_random_are_as_unlike_as_chance():
    lengths = np.random.default_rng(1).lognormal(5, 1, 40_000).astype(int) + 1
    report = packing_report(lengths[lengths <= 2000], 2000, batch_rows=4, show=False)
    assert report["steps"][0]["unlikeness"] == pytest.approx(1, abs=0.25)
    assert report["steps"][1]["padding"] < 0.02


def test_steps_are_shown_in_text_and_html():
    parallel = ParallelLayout(dp=2)
    report = packing_report(LENGTHS, 64, parallel=parallel, batch_rows=4, show=False)
    lines = repr(report).splitlines()
    [header] = [line for line in lines if "a step over 2 ranks, max_tokens=64" in line]
    assert header.split()[-6:] == ["steps", "padding", "imbalance", "99%", "unlike", "time"]
    by_rows = report["steps"][1]
    [row] = [line for line in lines if line.startswith("batch_rows=4 ")]
    figures = row.split()[1:]
    assert figures[0] == str(by_rows["num_steps"])
    assert float(figures[-1]) == pytest.approx(by_rows["time_per_token"], abs=0.001)
    assert max(map(len, lines)) <= 100
    assert all(figure in report._repr_html_() for figure in figures)
    one = packing_report([7] * 9, 14, batch_rows=1, show=False)  # nothing differs, no rank waits
    assert "imbalance" not in repr(one)
    assert one["steps"][1]["unlikeness"] is None
    assert packing_report(LENGTHS, 64, show=False)["steps"] == []
    assert packing_report([9], 8, batch_rows=1, show=False)["steps"] == [], "nothing fits"


@pytest.mark.parametrize(
    ("batch_rows", "message"),
    [
        (0, "batch_rows must be at least 1, got 0; None compares no steps"),
        (3, r"batch_rows must be a multiple of parallel.dp=2, got 3"),
    ],
)
def test_bad_batch_rows(batch_rows, message):
    with pytest.raises(ValueError, match=message):
        packing_report([5], 8, parallel=ParallelLayout(dp=2), batch_rows=batch_rows, show=False)
