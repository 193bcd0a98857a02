"""The plots of a packing report: padding, balance of ranks, lengths. matplotlib loads on use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from torch_collate_kit._reprs import plural
from torch_collate_kit.batch.showing.style import (
    COLORS,
    axes_for,
    legend_below,
    matplotlib_module,
    tint,
)
from torch_collate_kit.reporting.candidates import PADDED, SHARED, headline, losses

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Plot: TypeAlias = Literal["padding", "balance", "lengths"]
_MOST_TICKS = 32

# light to dark, and a hatch of its own for each
_LOOKS: dict[str, dict[str, Any]] = {
    PADDED: {"facecolor": "#E4E4E4", "hatch": "////"},
    "best_fit_decreasing": {"facecolor": COLORS["blue"], "hatch": ""},
    "first_fit_decreasing": {"facecolor": COLORS["purple"], "hatch": "xx"},
    "balanced": {"facecolor": COLORS["green"], "hatch": ".."},
    "sequential": {"facecolor": tint(COLORS["orange"], 0.7), "hatch": "\\\\\\\\"},
    "wrapped": {"facecolor": tint(COLORS["sky"], 0.4), "hatch": "--"},
    SHARED: {"facecolor": tint(COLORS["purple"], 0.4), "hatch": "++"},
    "tokens": {"facecolor": tint(COLORS["sky"], 0.6), "hatch": ""},
    "cost": {"facecolor": COLORS["blue"], "hatch": ""},
}


def _draw_padding(report: Mapping[str, Any], ax: Axes | None) -> Axes:
    """Draw the padding of every candidate, grouped by ``max_tokens``; the best has a star."""
    candidates = report["candidates"]
    ax = axes_for(ax, min(16.0, 4.5 + 0.5 * len(candidates)), 4.2)
    percent: dict[str, list[float]] = {c["strategy"]: [] for c in candidates}
    ticks = []
    for candidate in candidates:
        percent[candidate["strategy"]].append(100 * candidate["padding"])
        if candidate["strategy"] == PADDED:
            is_best = candidate["max_tokens"] == report["recommended"]["max_tokens"]
            lost = ((candidate[f"num_{word}"], word) for word in ("dropped", "cut"))
            lines = (f"{number:,} {word}" for number, word in lost if number)
            ticks.append("\n".join([f"{candidate['max_tokens']:,}{' *' * is_best}", *lines]))
    _grouped_bars(ax, percent, ticks, inches=0.75)
    ax.set(
        ylim=(0, max(1.0, 115 * max(c["padding"] for c in candidates))),
        xlabel="max_tokens (* recommended), and what is lost",
        ylabel="padding (% of the cells)",
        title=headline(report),
    )
    return ax


def _draw_balance(report: Mapping[str, Any], ax: Axes | None) -> Axes:
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
        bars = ax.bar(places, heights, size, label=name, edgecolor="black", **_LOOKS[name])
        ax.bar_label(bars, [f"{height:.1f}" for height in heights], fontsize=7, padding=1)
        handles.append(bars)
    step = -(-len(ticks) // _MOST_TICKS)
    ax.set_xticks(range(0, len(ticks), step), ticks[::step])
    legend_below(ax, handles, inches=inches)


def _draw_lengths(report: Mapping[str, Any], ax: Axes | None) -> Axes:
    """Draw the share of examples and of tokens by length, and the best ``max_tokens``."""
    data, best = report["data"], report["recommended"]["max_tokens"]
    edges = np.array(data["histogram"]["edges"])
    ax = axes_for(ax, 8.0, 4.2)
    shares = [
        100 * np.array(data["histogram"][name]) / data[f"num_{name}"]
        for name in ("examples", "tokens")
    ]
    blue: dict[str, Any] = {"facecolor": tint(COLORS["blue"], 0.5), "edgecolor": COLORS["blue"]}
    ax.stairs(shares[0], edges - 0.5, label="examples", fill=True, **blue)
    ax.stairs(shares[1], edges - 0.5, label="tokens", color="black", linewidth=1.8)
    [candidate, *_] = [c for c in report["candidates"] if c["max_tokens"] == best]
    lost = losses(candidate, data["num_tokens"])
    text = f"max_tokens={best} {lost}" if lost else f"max_tokens={best}: all examples fit"
    ax.axvline(best, color=COLORS["vermillion"], linestyle="--", linewidth=2, label=text)
    ticker = matplotlib_module("ticker")
    if len(np.unique(np.diff(edges))) > 1:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_locator(ticker.LogLocator(base=2, numticks=12))
        ax.xaxis.set_minor_locator(ticker.NullLocator())
    else:
        ax.xaxis.set_major_locator(ticker.MaxNLocator(10, integer=True, min_n_ticks=1))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set(
        ylim=(0, None),
        xlabel="length of the example (tokens)",
        ylabel="share in the bin (%)",
        title=(
            f"{plural(data['num_examples'], 'example')}, {plural(data['num_tokens'], 'token')}: "
            f"median {data['median']:,.0f}, longest {data['longest']:,}"
        ),
    )
    legend_below(ax, ax.get_legend_handles_labels()[0])
    return ax


PLOTS = {"padding": _draw_padding, "balance": _draw_balance, "lengths": _draw_lengths}
