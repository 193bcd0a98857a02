"""Tables as text and HTML; axes, legends and colours that colour-blind readers can tell apart."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape
from typing import TYPE_CHECKING, Any
from unicodedata import combining, east_asian_width

from torch_collate_kit._checks import needed_package

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    """Import a module of matplotlib; the ImportError has the pip command."""
    return needed_package(f"matplotlib.{name}", "a plot", install="-e '.[plots]'")


def axes_for(ax: Axes | None, width: float, height: float) -> Any:
    """Return ``ax``, or axes of a new figure of this size in inches."""
    if ax is not None:
        return ax
    _, axes = matplotlib_module("pyplot").subplots(figsize=(width, height), layout="constrained")
    return axes


def tint(color: str, share: float = 0.28) -> tuple[float, float, float]:
    """Mix the colour ``#rrggbb`` with white, of which ``share`` is left; RGB from 0 to 1."""
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 1 - share * (1 - red), 1 - share * (1 - green), 1 - share * (1 - blue)


def boxed_number(ax: Axes, x: float, y: float, number: int) -> None:
    """Write a number in a white box around this point."""
    box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    ax.text(x, y, str(number), ha="center", va="center", fontsize=7, clip_on=True, bbox=box)


def legend_below(ax: Axes, handles: list[Any], *, inches: float = 0.5) -> None:
    """Add a legend this far below the axes, at most as wide as they are."""
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


def text_table(
    names: Sequence[str], rows: Sequence[Sequence[str] | str], left_aligned: Collection[str]
) -> list[str]:
    """Return a line with the names of the columns, and one per row."""
    cells = [row for row in rows if not isinstance(row, str)]
    widths = [max(map(_width, column)) for column in zip(names, *cells, strict=True)]
    lines = []
    for row in (names, *rows):
        if isinstance(row, str):
            lines.append(row)
            continue
        line = ""
        for name, cell, width in zip(names, row, widths, strict=True):
            space = " " * (width - _width(cell))
            line += f"{cell}{space}  " if name in left_aligned else f"{space}{cell}  "
        lines.append(line.rstrip())
    return lines


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def html_table(
    names: Sequence[str],
    rows: Sequence[Sequence[str] | str],
    left_aligned: Collection[str],
    styles: Sequence[str],
    *,
    wrap: bool = False,
) -> str:
    """Return an HTML table, with a CSS style for each row; ``wrap`` breaks long lines."""
    sides = ["left" if name in left_aligned else "right" for name in names]
    html = ""
    for name, side in zip(names, sides, strict=True):
        html += f'<th style="text-align:{side}">{escape(name)}</th>'
    html, space = f"<tr>{html}</tr>", "pre-wrap" if wrap else "pre"
    for row, style in zip(rows, styles, strict=True):
        html += f'<tr style="{style}">' if style else "<tr>"
        if isinstance(row, str):
            html += f'<td colspan="{len(names)}"><i>{escape(row)}</i></td>'
        else:
            for cell, side in zip(row, sides, strict=True):
                html += f'<td style="text-align:{side};white-space:{space}">{escape(cell)}</td>'
        html += "</tr>"
    return f'<table style="color:inherit">{html}</table>'
