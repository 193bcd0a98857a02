"""Bars: ``plot_efficiency``, the padding of layouts, and ``plot_balance``, what ranks get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_collate_kit._checks import checked_int
from torch_collate_kit._reprs import plural
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.showing.cells import Kind
from torch_collate_kit.batch.showing.style import (
    COLORS,
    axes_for,
    cells_to_draw,
    legend_below,
    tint,
)
from torch_collate_kit.packing import ModelCost, PackingPlan
from torch_collate_kit.reporting.candidates import PADDED
from torch_collate_kit.reporting.report import PackingReport, headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["LOOKS", "plot_balance", "plot_efficiency"]

_MOST_TICKS = 32

# light to dark, and a hatch of its own for each
LOOKS: dict[str, dict[str, Any]] = {
    PADDED: {"facecolor": "#E4E4E4", "hatch": "////"},
    "best_fit_decreasing": {"facecolor": COLORS["blue"], "hatch": ""},
    "first_fit_decreasing": {"facecolor": COLORS["purple"], "hatch": "xx"},
    "balanced": {"facecolor": COLORS["green"], "hatch": ".."},
    "sequential": {"facecolor": tint(COLORS["orange"], 0.7), "hatch": "\\\\\\\\"},
}
_LOOKS = LOOKS | {
    "tokens": {"facecolor": tint(COLORS["sky"], 0.6), "hatch": ""},
    "cost": {"facecolor": COLORS["blue"], "hatch": ""},
    "vision cost": {"facecolor": tint(COLORS["orange"], 0.7), "hatch": "////"},
}


def plot_efficiency(report: PackingReport, *, ax: Axes | None = None) -> Axes:
    """Draw the share of padding of every candidate, grouped by ``max_tokens``.

    Under each ``max_tokens`` is what it loses; the recommended one has a star.

    Args:
        report: of ``packing_report``.
        ax: axes to draw on; by default those of a new figure.

    Returns:
        The axes. Nothing is shown: call ``plt.show()``, or ``ax.figure.savefig("padding.png")``.

    Raises:
        TypeError: not a PackingReport.
        ImportError: matplotlib is not installed.

    >>> from torch_collate_kit.reporting import packing_report
    >>> plot_efficiency(packing_report([5, 3, 9, 2], 20, show=False)).get_title()
    'padding 47.2% -> 0.0% at max_tokens=20'
    """
    if not isinstance(report, PackingReport):
        raise TypeError(
            f"plot_efficiency draws a PackingReport, got {type(report).__name__}; pass "
            "packing_report(data, max_tokens)"
        )
    candidates = report["candidates"]
    ax = axes_for(ax, min(16.0, 4.5 + 0.5 * len(candidates)), 4.2)
    percent: dict[str, list[float]] = {c["strategy"]: [] for c in candidates}
    ticks = []
    for candidate in candidates:
        percent[candidate["strategy"]].append(100 * candidate["padding"])
        if candidate["strategy"] == PADDED:
            ticks.append(_tick(candidate, report["recommended"]["max_tokens"]))
    _grouped_bars(ax, percent, ticks, width=0.84, are_labelled=True, inches=0.75)
    ax.set(
        ylim=(0, max(1.0, 115 * max(c["padding"] for c in candidates))),
        xlabel="max_tokens (* recommended), and what is lost",
        ylabel="padding (% of the cells)",
        title=headline(report),
    )
    return ax


def _tick(candidate: Mapping[str, Any], best: int) -> str:
    """A ``max_tokens``, with a star if it is the best, and how many examples do not fit."""
    lines = [f"{candidate['max_tokens']:,}" + (" *" if candidate["max_tokens"] == best else "")]
    for word in ("dropped", "cut"):
        if candidate[f"num_{word}"]:
            lines.append(f"{candidate[f'num_{word}']:,} {word}")
    return "\n".join(lines)


def plot_balance(
    balanced: PackingPlan | PackingReport | Batch,
    *,
    num_ranks: int | None = None,
    cost: ModelCost | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw how evenly tokens and cost are spread over the data-parallel ranks.

    Of a plan or a batch: each rank's difference from the mean rank. Of a report: for each strategy,
    at the recommended ``max_tokens``, how much more than the mean rank the heaviest one has in a
    step; the others wait for it.

    Args:
        balanced: a plan of ``pack`` or ``collator.plan``, a report of ``packing_report``, or a
            packed or padded Batch, whose rows go to the ranks as ``batch.chunk(num_ranks)``.
        num_ranks: of a Batch, and of nothing else, which knows it.
        cost: of a Batch: what its sub-sequences cost, by default ``ModelCost()``.
        ax: axes to draw on; by default those of a new figure.

    Returns:
        The axes. Nothing is shown: call ``plt.show()``, or ``ax.figure.savefig("balance.png")``.

    Raises:
        TypeError: something else, or ``num_ranks`` or ``cost`` for something that knows them.
        ValueError: rows that do not divide into ``num_ranks``; a batch that is not on the CPU.
        ImportError: matplotlib is not installed.

    >>> from torch_collate_kit import pack
    >>> plot_balance(pack([5, 3, 9, 2], 10, rows_multiple_of=2)).get_title()
    'heaviest of 2 ranks: +5.3% tokens, +5.3% cost'
    """
    if isinstance(balanced, Batch):
        ranks = 1 if num_ranks is None else checked_int("num_ranks", num_ranks)
        groups = _of_batch(balanced, ranks, ModelCost() if cost is None else cost)
        return _draw_ranks(groups, ax)
    if not isinstance(balanced, PackingPlan | PackingReport):
        raise TypeError(
            f"plot_balance draws a PackingPlan, a PackingReport or a Batch, got "
            f"{type(balanced).__name__}; pass pack(...), packing_report(...) or a batch"
        )
    if num_ranks is not None or cost is not None:
        raise TypeError(
            f"num_ranks and cost are for a Batch; a {type(balanced).__name__} has its own"
        )
    if isinstance(balanced, PackingReport):
        return _draw_report(balanced, ax)
    groups = {"tokens": balanced.tokens_per_rank, "cost": balanced.cost_per_rank}
    if balanced.vision_costs.any():
        groups["vision cost"] = balanced.vision_cost_per_rank
    return _draw_ranks(groups, ax)


def _of_batch(batch: Batch, num_ranks: int, cost: ModelCost) -> dict[str, np.ndarray]:
    """By the cells of each sub-sequence, its gap included; of a padded row by all of its cells.

    A row that fills up the batch has no tokens, but it is run, so it costs as much as another.
    """
    cells = cells_to_draw(batch)
    batch.chunk(num_ranks)  # ValueError, if the rows do not divide
    num_rows, width = cells.kinds.shape
    tokens = cells.is_own.sum(axis=1)
    costs = np.full(num_rows, int(cost.language(np.array([width]))[0]))
    if "cu_seq_lens" in batch:
        for row, edges in enumerate(map(np.asarray, batch["cu_seq_lens"])):
            used = int((cells.kinds[row] != Kind.PAD).sum())
            costs[row] = cost.language(np.diff(np.append(edges[edges < used], used))).sum()
    of_ranks = (of.reshape(num_ranks, -1).sum(axis=1) for of in (tokens, costs))
    return dict(zip(("tokens", "cost"), of_ranks, strict=True))


def _draw_ranks(groups: dict[str, np.ndarray], ax: Axes | None) -> Axes:
    """Each rank's difference from the mean."""
    num_ranks = len(groups["tokens"])
    ax = axes_for(ax, min(16.0, 5.0 + 0.25 * num_ranks), 3.8)
    percent = {name: 100 * (of / max(of.mean(), 1e-9) - 1) for name, of in groups.items()}
    _draw_bars(ax, percent, [str(rank) for rank in range(num_ranks)])
    most = ", ".join(f"{of.max():+.1f}% {name}" for name, of in percent.items())
    ax.set(
        xlabel="data-parallel rank",
        ylabel="difference from the mean rank (%)",
        title=f"heaviest of {plural(num_ranks, 'rank')}: {most}",
    )
    return ax


def _draw_report(report: PackingReport, ax: Axes | None) -> Axes:
    """The heaviest rank of each strategy."""
    best, ranks = report["recommended"], report["options"]["dp"]
    found = {
        c["strategy"]: c for c in report["candidates"] if c["max_tokens"] == best["max_tokens"]
    }
    ax = axes_for(ax, 3.5 + 1.2 * len(found), 4.0)
    percent = {
        name: np.array([100 * (c[f"{name}_max_over_mean"] - 1) for c in found.values()])
        for name in ("tokens", "cost")
    }
    labels = [strategy.replace("_", "\n") for strategy in found]
    _draw_bars(ax, percent, labels, are_labelled=True, inches=0.95)
    costs = dict(zip(found, percent["cost"], strict=True))
    ax.set(
        xlabel=f"layout, at max_tokens={best['max_tokens']}",
        ylabel="heaviest rank of a step, over the mean (%)",
        title=(
            f"heaviest of {plural(ranks, 'rank')}: cost {costs[PADDED]:+.1f}% padded, "
            f"{costs[best['strategy']]:+.1f}% packed"
        ),
    )
    return ax


def _draw_bars(
    ax: Any,
    percent: dict[str, np.ndarray],
    ticks: list[str],
    *,
    are_labelled: bool = False,
    inches: float = 0.5,
) -> None:
    """Above and below zero."""
    _grouped_bars(ax, percent, ticks, width=0.8, are_labelled=are_labelled, inches=inches)
    ax.axhline(0, color="black", linewidth=1)
    low, high = min(of.min() for of in percent.values()), max(of.max() for of in percent.values())
    ax.set_ylim(min(1.2 * low, -1.0 if low < 0 else 0.0), max(1.2 * high, 1.0))


def _grouped_bars(
    ax: Axes,
    groups: Mapping[str, np.ndarray | Sequence[float]],
    ticks: Sequence[str],
    *,
    width: float,
    are_labelled: bool,
    inches: float,
) -> None:
    """A bar of each group around each tick, ``width`` together, and a legend below."""
    size = width / len(groups)
    handles = []
    for i, (name, heights) in enumerate(groups.items()):
        places = np.arange(len(heights)) + (i - (len(groups) - 1) / 2) * size
        bars = ax.bar(places, heights, size, label=name, edgecolor="black", **_LOOKS[name])
        if are_labelled:
            ax.bar_label(bars, [f"{height:.1f}" for height in heights], fontsize=7, padding=1)
        handles.append(bars)
    step = -(-len(ticks) // _MOST_TICKS)
    ax.set_xticks(range(0, len(ticks), step), ticks[::step])
    legend_below(ax, handles, inches=inches)
