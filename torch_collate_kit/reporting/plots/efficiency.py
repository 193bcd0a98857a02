"""``plot_efficiency``: the padding of every layout in a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch_collate_kit.reporting.candidates import PADDED
from torch_collate_kit.reporting.plots.style import (
    COLORS,
    axes_for,
    grouped_bars,
    tint,
)
from torch_collate_kit.reporting.report import PackingReport, headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["LOOKS", "plot_efficiency"]

# light to dark, and a hatch of its own for each
LOOKS: dict[str, dict[str, Any]] = {
    PADDED: {"facecolor": "#E4E4E4", "hatch": "////"},
    "best_fit_decreasing": {"facecolor": COLORS["blue"], "hatch": ""},
    "first_fit_decreasing": {"facecolor": COLORS["purple"], "hatch": "xx"},
    "balanced": {"facecolor": COLORS["green"], "hatch": ".."},
    "sequential": {"facecolor": tint(COLORS["orange"], 0.7), "hatch": "\\\\\\\\"},
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
    grouped_bars(ax, percent, LOOKS, ticks, width=0.84, are_labelled=True, inches=0.75)
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
