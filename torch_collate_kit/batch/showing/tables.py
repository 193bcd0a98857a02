"""Tables as text and as HTML, right-aligned but for the columns named in ``left``.

A row is its cells, or a text on a line of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape
from unicodedata import combining, east_asian_width


def text_table(
    names: Sequence[str], rows: Sequence[Sequence[str] | str], left: Collection[str]
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
            line += f"{cell}{space}  " if name in left else f"{space}{cell}  "
        lines.append(line.rstrip())
    return lines


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def html_table(
    names: Sequence[str],
    rows: Sequence[Sequence[str] | str],
    left: Collection[str],
    styles: Sequence[str],
    *,
    wrap: bool = False,
) -> str:
    """Return an HTML table, with a CSS style for each row; ``wrap`` breaks long lines."""
    sides = ["left" if name in left else "right" for name in names]
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
