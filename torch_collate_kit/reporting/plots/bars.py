"""Bars of a packing report: the padding of each layout, and how even its ranks are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_collate_kit._reprs import plural
from torch_collate_kit.batch.showing.style import COLORS, axes_for, legend_below, tint
from torch_collate_kit.reporting.candidates import PADDED, headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["LOOKS", "draw_balance", "draw_padding"]

_MOST_TICKS = 32

# light to dark, and a hatch of its own for each
LOOKS: dict[str, dict[str, Any]] = {
    PADDED: {"facecolor": "#E4E4E4", "hatch": "////"},
    "best_fit_decreasing": {"facecolor": COLORS["blue"], "hatch": ""},
    "first_fit_decreasing": {"facecolor": COLORS["purple"], "hatch": "xx"},
    "balanced": {"facecolor": COLORS["green"], "hatch": ".."},
    "sequential": {"facecolor": tint(COLORS["orange"], 0.7), "hatch": "\\\\\\\\"},
    "tokens": {"facecolor": tint(COLORS["sky"], 0.6), "hatch": ""},
    "cost": {"facecolor": COLORS["blue"], "hatch": ""},
}


def draw_padding(report: Mapping[str, Any], ax: Axes | None) -> Axes:
    """Draw the padding of every candidate, grouped by ``max_tokens``; the best has a star."""
    candidates = report["candidates"]
    ax = axes_for(ax, min(16.0, 4.5 + 0.5 * len(candidates)), 4.2)
    percent: dict[str, list[float]] = {c["strategy"]: [] for c in candidates}
    ticks = []
    for candidate in candidates:
        percent[candidate["strategy"]].append(100 * candidate["padding"])
        if candidate["strategy"] == PADDED:
            ticks.append(_tick(candidate, report["recommended"]["max_tokens"]))
    _grouped_bars(ax, percent, ticks, inches=0.75)
    ax.set(
        ylim=(0, max(1.0, 115 * max(c["padding"] for c in candidates))),
        xlabel="max_tokens (* recommended), and what is lost",
        ylabel="padding (% of the cells)",
        title=headline(report),
    )
    return ax


def _tick(candidate: Mapping[str, Any], best: int) -> str:
    """Return a ``max_tokens``, a star if it is the best, and how many examples do not fit."""
    lines = [f"{candidate['max_tokens']:,}" + (" *" if candidate["max_tokens"] == best else "")]
    for word in ("dropped", "cut"):
        if candidate[f"num_{word}"]:
            lines.append(f"{candidate[f'num_{word}']:,} {word}")
    return "\n".join(lines)


def draw_balance(report: Mapping[str, Any], ax: Axes | None) -> Axes:
    """Draw how far the heaviest rank of a step is above the mean, at the best ``max_tokens``."""
    best, ranks = report["recommended"], report["options"]["dp"]
    found = {
        c["strategy"]: c for c in report["candidates"] if c["max_tokens"] == best["max_tokens"]
    }
    ax = axes_for(ax, 3.5 + 1.2 * len(found), 4.0)
    percent = {
        name: [100 * (c[f"{name}_max_over_mean"] - 1) for c in found.values()]
        for name in ("tokens", "cost")
    }
    _grouped_bars(ax, percent, [name.replace("_", "\n") for name in found], inches=0.95)
    costs = dict(zip(found, percent["cost"], strict=True))
    ax.set(
        ylim=(0, max(1.0, 1.2 * max(max(heights) for heights in percent.values()))),
        xlabel=f"layout, at max_tokens={best['max_tokens']}",
        ylabel="heaviest rank of a step, over the mean (%)",
        title=(
            f"heaviest of {plural(ranks, 'rank')}: cost {costs[PADDED]:+.1f}% padded, "
            f"{costs[best['strategy']]:+.1f}% packed"
        ),
    )
    return ax


def _grouped_bars(
    ax: Axes, groups: Mapping[str, Sequence[float]], ticks: Sequence[str], *, inches: float
) -> None:
    """Draw a bar of each group around each tick, and a legend below."""
    size = 0.84 / len(groups)
    handles = []
    for i, (name, heights) in enumerate(groups.items()):
        places = np.arange(len(heights)) + (i - (len(groups) - 1) / 2) * size
        bars = ax.bar(places, heights, size, label=name, edgecolor="black", **LOOKS[name])
        ax.bar_label(bars, [f"{height:.1f}" for height in heights], fontsize=7, padding=1)
        handles.append(bars)
    step = -(-len(ticks) // _MOST_TICKS)
    ax.set_xticks(range(0, len(ticks), step), ticks[::step])
    legend_below(ax, handles, inches=inches)
