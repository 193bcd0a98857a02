"""What all plots share; lengths, padding and balance against the data."""

from __future__ import annotations

import io

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.patches import StepPatch

from tests.batch_samples import examples
from torch_collate_kit import (
    ModelCost,
    PackedCollator,
    PaddedCollator,
    ParallelLayout,
    pack,
    packing_report,
    plot_balance,
    plot_efficiency,
    plot_lengths,
    plot_rows,
)
from torch_collate_kit.packing.options import STRATEGIES
from torch_collate_kit.reporting.plots.bars import LOOKS

LENGTHS = [5, 3, 9, 2, 12, 7, 7, 1]


def report(**options):
    return packing_report(LENGTHS, [8, 16], show=False, **options)


PLOTS = {
    "rows": lambda ax=None: plot_rows(PaddedCollator(0)(examples()), ax=ax),
    "lengths": lambda ax=None: plot_lengths(LENGTHS, [8, 10], ax=ax),
    "efficiency": lambda ax=None: plot_efficiency(report(), ax=ax),
    "balance": lambda ax=None: plot_balance(pack(LENGTHS, 16, rows_multiple_of=2), ax=ax),
    "balance of a report": lambda ax=None: plot_balance(report(), ax=ax),
}


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_is_drawn_on_the_given_axes_and_explains_itself(name):
    figure, (left, right) = plt.subplots(1, 2)
    before = plt.get_fignums()
    ax = PLOTS[name](ax=right)
    assert ax is right
    assert plt.get_fignums() == before  # no other figure
    assert not left.has_data()
    assert ax.get_title()
    assert ax.get_ylabel()
    assert ax.get_xlabel()
    assert ax.get_legend().get_texts()
    figure.savefig(io.BytesIO())


@pytest.mark.parametrize("name", PLOTS)
def test_nothing_is_drawn_over_the_legend_or_cut_off(name):
    ax = PLOTS[name]()
    ax.figure.canvas.draw()
    legend = ax.get_legend().get_window_extent()
    outside = [text.get_window_extent() for text in (ax.xaxis.label, *ax.get_xticklabels())]
    assert not any(legend.overlaps(box) for box in (*outside, ax.get_window_extent()))
    texts = [text for text in (ax.title, ax.xaxis.label, ax.yaxis.label) if text.get_text()]
    for box in (legend, *(text.get_window_extent() for text in texts)):
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= ax.figure.bbox.x1
        assert box.y1 <= ax.figure.bbox.y1


@pytest.mark.parametrize("name", ["efficiency", "balance of a report", "balance"])
def test_bars_of_a_group_lie_around_its_tick(name):
    ax = PLOTS[name]()
    middles = [[bar.get_x() + bar.get_width() / 2 for bar in bars] for bars in ax.containers]
    assert len(middles) > 1, "no groups in the sample"
    assert np.mean(middles, axis=0).tolist() == pytest.approx(ax.get_xticks().tolist())
    num_bars = sum(len(bars) for bars in ax.containers)
    assert len(ax.texts) == (0 if name == "balance" else num_bars)


# lengths


def shares(ax) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    steps = [patch for patch in ax.patches if isinstance(patch, StepPatch)]
    return {step.get_label(): (step.get_data().values, step.get_data().edges) for step in steps}


@pytest.mark.parametrize("lengths", [LENGTHS, [7], [1, 1, 500, 40, 40, 3], list(range(1, 300))])
def test_shares_of_examples_and_tokens(lengths):
    found = shares(plot_lengths(lengths, 8))
    for name, weights in (("examples", [1] * len(lengths)), ("tokens", lengths)):
        values, edges = found[name]
        expected = np.zeros(len(values))
        for length, weight in zip(lengths, weights, strict=True):
            inside = [i for i in range(len(values)) if edges[i] < length < edges[i + 1]]
            assert len(inside) == 1
            expected[inside[0]] += weight
        assert values.tolist() == pytest.approx((100 * expected / sum(weights)).tolist())


def test_a_long_range_is_logarithmic():
    assert plot_lengths([1, 500]).get_xscale() == "log"
    assert plot_lengths([5, 9]).get_xscale() == "linear"


def test_bins_of_a_narrow_range_hold_equally_many_lengths():
    lengths = list(range(100, 200)) * 100
    _, edges = shares(plot_lengths(lengths))["examples"]
    assert set(np.diff(edges)) == {3}
    assert len(edges) - 1 == 34  # at most 48


def test_limits_say_what_is_longer():
    ax = plot_lengths(LENGTHS, [8, 12])
    lines = {line.get_label(): line for line in ax.lines}
    assert list(lines) == [
        "max_tokens=8: 2 longer (45.7% of the tokens)",  # 9 and 12 of 46
        "max_tokens=12: none longer",
    ]
    assert [line.get_xdata()[0] for line in lines.values()] == [8, 12]
    assert len({line.get_linestyle() for line in lines.values()}) == 2
    assert ax.get_title() == "8 examples, 46 tokens: median 6, longest 12"


# efficiency


def test_bars_are_the_padding_of_the_candidates():
    found = report(strategies=["best_fit_decreasing", "sequential"])
    ax = plot_efficiency(found)
    strategies = ["padded", "best_fit_decreasing", "sequential"]
    assert [bars.get_label() for bars in ax.containers] == strategies
    for bars in ax.containers:
        of_strategy = [c for c in found["candidates"] if c["strategy"] == bars.get_label()]
        heights = [bar.get_height() for bar in bars]
        assert heights == pytest.approx([100 * c["padding"] for c in of_strategy])
        assert [round(bar.get_x() + bar.get_width() / 2) for bar in bars] == [0, 1]
    texts = [text.get_text() for text in ax.texts]
    assert texts[:2] == [f"{100 * c['padding']:.1f}" for c in found["candidates"][::3]]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["8\n2 dropped", "16 *"]
    assert found["recommended"]["max_tokens"] == 16
    assert ax.get_title() in repr(found).splitlines()


def test_bars_of_neighbours_differ_without_colour():
    ax = plot_efficiency(report(strategies=["best_fit_decreasing", "balanced", "sequential"]))
    hatches = [bars[0].get_hatch() for bars in ax.containers]
    assert len(set(hatches)) == len(hatches) == 4


def test_every_strategy_has_a_look():
    assert set(LOOKS) == {"padded", *STRATEGIES}


# balance


def heights(ax) -> dict[str, list[float]]:
    return {bars.get_label(): [bar.get_height() for bar in bars] for bars in ax.containers}


def test_ranks_of_a_plan_by_hand():
    """Rows [9] and [5, 3, 2], of 9 and 10 tokens, and with cost n * n of 81 and 38."""
    plan = pack([5, 3, 9, 2], 10, rows_multiple_of=2, cost=ModelCost(0, 1), balance=None)
    assert plan.bins == [[2], [0, 1, 3]]
    ax = plot_balance(plan)
    found = heights(ax)
    assert found["tokens"] == pytest.approx([100 * (9 / 9.5 - 1), 100 * (10 / 9.5 - 1)])
    assert found["cost"] == pytest.approx([100 * (81 / 59.5 - 1), 100 * (38 / 59.5 - 1)])
    assert list(found) == ["tokens", "cost"]
    assert ax.get_title() == "heaviest of 2 ranks: +5.3% tokens, +36.1% cost"


def test_of_many_ranks_some_are_named():
    ax = plot_balance(pack([4] * 70, 4, rows_multiple_of=70))
    ranks = [*range(0, 70, 3)]
    assert ax.get_xticks().tolist() == ranks
    assert [text.get_text() for text in ax.get_xticklabels()] == [str(rank) for rank in ranks]


def test_images_have_bars_of_their_own():
    plan = pack([5, 3, 9, 2], 10, rows_multiple_of=2, patches=[8, 0, 0, 0])
    found = heights(plot_balance(plan))
    assert sorted(found["vision cost"]) == pytest.approx([-100, 100])


@pytest.mark.parametrize("tp", [1, 4])
def test_a_batch_is_as_balanced_as_its_plan(tp):
    collate = PackedCollator(0, max_tokens=16, parallel=ParallelLayout(dp=2, tp=tp))
    of_plan = heights(plot_balance(collate.plan(LENGTHS)))
    of_batch = heights(plot_balance(collate(examples(LENGTHS)), num_ranks=2))
    assert of_batch["tokens"] == pytest.approx(of_plan["tokens"])
    assert of_batch["cost"] == pytest.approx(of_plan["cost"])
    assert any(abs(height) > 1e-6 for height in of_plan["cost"])


def test_padded_rows_cost_their_width():
    found = heights(plot_balance(PaddedCollator(0)(examples([3, 1, 1, 1])), num_ranks=2))
    assert found["tokens"] == pytest.approx([100 / 3, -100 / 3])
    assert found["cost"] == [0, 0]


def test_cost_of_a_batch_may_be_given():
    batch = PackedCollator(0, max_tokens=4, parallel=ParallelLayout(dp=2))(examples([4, 2, 2]))
    found = heights(plot_balance(batch, num_ranks=2, cost=ModelCost(0, 1)))
    assert sorted(found["cost"]) == pytest.approx([100 * (8 / 12 - 1), 100 * (16 / 12 - 1)])


def test_dummy_rows_are_nothing():
    batch = PackedCollator(0, max_tokens=4, parallel=ParallelLayout(dp=2))(examples([4]))
    assert sorted(heights(plot_balance(batch, num_ranks=2))["cost"]) == pytest.approx([-100, 100])


def test_added_rows_have_no_tokens_and_cost_what_they_repeat():
    batch = PackedCollator(0, max_tokens=4)(examples([4])).pad_rows(multiple_of=2)
    found = heights(plot_balance(batch, num_ranks=2))
    assert (found["tokens"], found["cost"]) == ([100, -100], [0, 0])


def test_a_report_is_drawn_by_strategy():
    found = report(parallel=ParallelLayout(dp=3), strategies=["sequential", "balanced"])
    ax = plot_balance(found)
    limit = found["recommended"]["max_tokens"]
    of_limit = [c for c in found["candidates"] if c["max_tokens"] == limit]
    for name in ("tokens", "cost"):
        expected = [100 * (c[f"{name}_max_over_mean"] - 1) for c in of_limit]
        assert heights(ax)[name] == pytest.approx(expected)
    assert [t.get_text() for t in ax.get_xticklabels()] == ["padded", "sequential", "balanced"]
    costs = heights(ax)["cost"]
    best = [c["strategy"] for c in of_limit].index(found["recommended"]["strategy"])
    expected = f"heaviest of 3 ranks: cost {costs[0]:+.1f}% padded, {costs[best]:+.1f}% packed"
    assert best != 0
    assert costs[0] != costs[best]
    assert ax.get_title() == expected
    assert ax.get_xlabel() == f"layout, at max_tokens={limit}"


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        (lambda: plot_lengths([]), ValueError, "no examples"),
        (lambda: plot_lengths([3], 0), ValueError, "max_tokens must be at least 1, got 0"),
        (lambda: plot_efficiency({}), TypeError, "draws a PackingReport, got dict; pass packing_r"),
        (lambda: plot_balance([3]), TypeError, "a PackingReport or a Batch, got list; pass pack"),
        (
            lambda: plot_balance(pack([3], 4), num_ranks=2),
            TypeError,
            "num_ranks and cost are for a Batch; a PackingPlan has its own",
        ),
        (
            lambda: plot_balance(PaddedCollator(0)(examples([3, 2])), num_ranks=4),
            ValueError,
            "2 rows do not divide into 4 equal chunks",
        ),
    ],
)
def test_bad_arguments(draw, error, message):
    with pytest.raises(error, match=message):
        draw()
