"""Axes, colours and legends of all plots; colour-blind readers can tell the colours apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_collate_kit._checks import needed_package
from torch_collate_kit.batch.showing.cells import Cells, cells_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from torch_collate_kit.batch import Batch

__all__ = [
    "COLORS",
    "axes_for",
    "boxed_number",
    "cells_to_draw",
    "legend_below",
    "matplotlib_module",
    "tint",
]

_LETTERS_PER_INCH = 14  # of small print

# Of Okabe and Ito, https://jfly.uni-koeln.de/color/
COLORS = {
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "green": "#009E73",
    "purple": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "grey": "#8C8C8C",
}


def matplotlib_module(name: str) -> Any:
    """Import a module of matplotlib.

    Raises:
        ImportError: it is not installed; the message has the pip command.
    """
    return needed_package(f"matplotlib.{name}", "a plot", install="-e '.[plots]'")


def axes_for(ax: Axes | None, width: float, height: float) -> Any:
    """Return ``ax``, or axes of a new figure of this size in inches."""
    if ax is not None:
        return ax
    _, axes = matplotlib_module("pyplot").subplots(figsize=(width, height), layout="constrained")
    return axes


def tint(color: str, share: float = 0.28) -> tuple[float, float, float]:
    """Mix the colour ``#rrggbb`` with white: ``share`` of it is left. RGB from 0 to 1.

    >>> tint("#000000", 0.25)
    (0.75, 0.75, 0.75)
    """
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 1 - share * (1 - red), 1 - share * (1 - green), 1 - share * (1 - blue)


def cells_to_draw(batch: Batch) -> Cells:
    """Return the contents of a batch's cells; ValueError if it does not say."""
    cells = cells_of(batch.stored())
    if cells is None:
        raise ValueError(
            "the batch does not say what its cells hold: it has no input_ids [R, W] in host "
            'memory; pass batch.to("cpu")'
        )
    return cells


def boxed_number(ax: Axes, x: float, y: float, number: int) -> None:
    """Draw a number in a white box, around this point."""
    ax.text(
        x,
        y,
        str(number),
        ha="center",
        va="center",
        fontsize=7,
        clip_on=True,
        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"},
    )


def legend_below(ax: Axes, handles: list[Any], *, inches: float = 0.5) -> None:
    """Draw a legend so far below the axes, at most as wide as they are; nothing is drawn over."""
    figure = ax.figure
    transforms = matplotlib_module("transforms")
    below = transforms.ScaledTranslation(0, -inches, figure.dpi_scale_trans)
    width = ax.get_window_extent().width / figure.dpi
    longest = max(len(handle.get_label()) for handle in handles)
    ax.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        bbox_transform=ax.transAxes + below,
        borderaxespad=0,
        ncols=max(1, min(len(handles), int(width * _LETTERS_PER_INCH / (longest + 8)))),
        frameon=False,
        fontsize="small",
    )
