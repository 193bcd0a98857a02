"""``plot_lengths``: how long the examples are, and where the tokens are."""

from __future__ import annotations

from collections.abc import Sequence
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
from torch_collate_kit.reporting.lengths import checked_limits, data_lengths

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_lengths"]

_MOST_BINS = 48
_WIDE = 20  # longest / shortest above which the axis is logarithmic
_LINES = ("--", ":", "-.")


def plot_lengths(
    data: Any, max_tokens: int | Sequence[int] | None = None, *, ax: Axes | None = None
) -> Axes:
    """Draw how long the examples are: the share of examples and of tokens in bins of length.

    Args:
        data: lengths, a dataset or examples, as for ``packing_report``.
        max_tokens: one or several; for each a line, and what is longer.
        ax: axes to draw on; by default those of a new figure.

    Returns:
        The axes. Nothing is shown: call ``plt.show()``, or ``ax.figure.savefig("lengths.png")``.

    Raises:
        DataError: no examples, or a length below 1.
        TypeError: data without lengths.
        ImportError: matplotlib is not installed.

    >>> plot_lengths([5, 3, 9, 2], 8).get_title()
    '4 examples, 19 tokens: median 4, longest 9'
    """
    lengths = data_lengths(data).lengths
    limits = [] if max_tokens is None else checked_limits(max_tokens)
    ax = axes_for(ax, 8.0, 4.2)
    edges, is_log = _edges(lengths, limits)
    shares = [100 * np.histogram(lengths, edges, weights=w)[0] for w in (None, lengths)]
    blue: dict[str, Any] = {"facecolor": tint(COLORS["blue"], 0.5), "edgecolor": COLORS["blue"]}
    ax.stairs(shares[0] / len(lengths), edges, label="examples", fill=True, **blue)
    ax.stairs(shares[1] / lengths.sum(), edges, label="tokens", color="black", linewidth=1.8)
    handles, _ = ax.get_legend_handles_labels()
    handles += [_draw_limit(ax, lengths, limit, i) for i, limit in enumerate(limits)]
    ticker = matplotlib_module("ticker")
    if is_log:
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
            f"{plural(len(lengths), 'example')}, {plural(int(lengths.sum()), 'token')}: median "
            f"{np.median(lengths):,.0f}, longest {lengths.max():,}"
        ),
    )
    legend_below(ax, handles)
    return ax


def _edges(lengths: np.ndarray, limits: list[int]) -> tuple[np.ndarray, bool]:
    """The edges of the bins, between integers; and whether they are on a logarithmic scale."""
    least, most = int(lengths.min()), int(max(lengths.max(), *limits, 0))
    count = min(_MOST_BINS, max(1, 4 * int(np.sqrt(len(lengths)))))
    is_log = most > _WIDE * least
    if is_log:
        return np.unique(np.ceil(np.geomspace(least, most + 1, count + 1))) - 0.5, True
    size = -(-(most + 1 - least) // count)  # equally many lengths in each, or they look uneven
    return np.arange(least, most + size + 1, size) - 0.5, False


def _draw_limit(ax: Any, lengths: np.ndarray, limit: int, number: int) -> Any:
    """A line at ``max_tokens``, whose legend says what is longer."""
    longer = lengths[lengths > limit]
    share = longer.sum() / lengths.sum()
    text = f"max_tokens={limit}: none longer"
    if len(longer):
        text = f"max_tokens={limit}: {len(longer):,} longer ({share:.1%} of the tokens)"
    style = _LINES[number % len(_LINES)]
    return ax.axvline(limit, color=COLORS["vermillion"], linestyle=style, linewidth=2, label=text)
