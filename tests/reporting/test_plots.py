"""The plots of a packing report against its figures."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.test_batch_plot import check_a_plot, plots
from torch_collate_kit import ParallelLayout, packing_report
from torch_collate_kit.reporting import PackingReport

__all__ = ["plots"]  # a fixture

LENGTHS = [5, 3, 9, 2, 12, 7, 7, 1]
NAMES = ("padding", "balance", "lengths")
STRATEGIES = ("best_fit_decreasing", "first_fit_decreasing", "balanced", "sequential")


def report(lengths: Any = LENGTHS, **options: Any) -> PackingReport:
    return packing_report(lengths, [8, 16], show=False, **options)


@pytest.mark.parametrize("name", NAMES)
def test_a_plot_explains_itself(name: str) -> None:
    check_a_plot(lambda **options: report().plot(name, **options))
    read = PackingReport(json.loads(json.dumps(report())))
    assert read.plot(name).get_title() == report().plot(name).get_title()


@pytest.mark.parametrize("lengths", [LENGTHS, [7], [1, 1, 500, 40, 40, 3], [*range(1, 300)]])
def test_shares_of_examples_and_tokens(lengths: list[int]) -> None:
    ax = report(lengths).plot("lengths")
    steps = {step.get_label(): step.get_data() for step in ax.patches}
    for name, weights in (("examples", [1] * len(lengths)), ("tokens", lengths)):
        edges = steps[name].edges
        expected = np.zeros(len(edges) - 1)
        for length, weight in zip(lengths, weights, strict=True):
            [inside] = np.flatnonzero((edges[:-1] < length) & (length < edges[1:]))
            expected[inside] += weight
        assert steps[name].values.tolist() == pytest.approx(100 * expected / sum(weights))
    assert ax.get_xscale() == ("log" if max(lengths) > 20 * min(lengths) else "linear")


def test_the_line_says_what_is_lost() -> None:
    for limit, lost in (
        (8, " drops 2 examples (45.65% of the tokens lost)"),  # 9 and 12 of 46
        (12, ": all examples fit"),
    ):
        ax = packing_report(LENGTHS, limit, show=False).plot("lengths")
        [line] = ax.lines
        assert (line.get_label(), line.get_xdata()[0]) == (f"max_tokens={limit}{lost}", limit)
    assert ax.get_title() == "8 examples, 46 tokens: median 6, longest 12"


def heights(ax: Any) -> dict[str, list[float]]:
    return {bars.get_label(): [bar.get_height() for bar in bars] for bars in ax.containers}


def test_bars_are_the_padding_of_the_candidates() -> None:
    found = report(strategies=STRATEGIES)
    ax = found.plot()
    assert [*heights(ax)] == ["padded", *STRATEGIES]
    for strategy, bars in heights(ax).items():
        candidates = [c for c in found["candidates"] if c["strategy"] == strategy]
        assert bars == pytest.approx([100 * c["padding"] for c in candidates])
    middles = [[bar.get_x() + bar.get_width() / 2 for bar in bars] for bars in ax.containers]
    assert np.mean(middles, axis=0).tolist() == pytest.approx(ax.get_xticks().tolist())
    assert [t.get_text() for t in ax.get_xticklabels()] == ["8\n2 dropped", "16 *"]
    assert len({bars[0].get_hatch() for bars in ax.containers}) == len(ax.containers)
    assert ax.get_title() in repr(found).splitlines()


def test_balance_of_the_layouts() -> None:
    found = report(parallel=ParallelLayout(dp=3), strategies=["sequential", "balanced"])
    ax, limit = found.plot("balance"), found["recommended"]["max_tokens"]
    candidates = [c for c in found["candidates"] if c["max_tokens"] == limit]
    for name in ("tokens", "cost"):
        over = [100 * (c[f"{name}_max_over_mean"] - 1) for c in candidates]
        assert heights(ax)[name] == pytest.approx(over)
    assert [t.get_text() for t in ax.get_xticklabels()] == ["padded", "sequential", "balanced"]
    costs = heights(ax)["cost"]
    best = [c["strategy"] for c in candidates].index(found["recommended"]["strategy"])
    expected = f"heaviest of 3 ranks: cost {costs[0]:+.1f}% padded, {costs[best]:+.1f}% packed"
    assert (best != 0, costs[0] != costs[best], ax.get_title()) == (True, True, expected)
