"""The lengths of examples as a histogram: how many examples, and where the tokens are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_collate_kit._reprs import plural
from torch_collate_kit.batch.showing.style import (
    COLORS,
    axes_for,
    legend_below,
    matplotlib_module,
    tint,
)
from torch_collate_kit.reporting.candidates import losses

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_lengths"]


def draw_lengths(report: Mapping[str, Any], ax: Axes | None) -> Axes:
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
