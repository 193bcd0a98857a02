"""Tables as text and as HTML: numbers on the right, and the columns that are named on the left."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from unicodedata import combining, east_asian_width

__all__ = ["html_row", "text_table"]


def text_table(
    names: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str]
) -> list[str]:
    """A line with the names of the columns, and one per row.

    >>> text_table(["id", "text"], [["5", "a"], ["1,234", "b"]], left=["text"])
    ['   id  text', '    5  a', '1,234  b']
    """
    widths = [max(map(_width, column)) for column in zip(names, *rows, strict=True)]
    lines = []
    for row in (names, *rows):
        line = []
        for name, cell, width in zip(names, row, widths, strict=True):
            space = " " * (width - _width(cell))
            line.append(cell + space if name in left else space + cell)
        lines.append("  ".join(line).rstrip())
    return lines


def _width(text: str) -> int:
    """How wide a terminal shows it."""
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def html_row(
    names: Sequence[str],
    row: Sequence[str],
    left: Sequence[str],
    *,
    tag: str = "td",
    is_bold: bool = False,
    row_style: str = "",
    cell_style: str = "",
) -> str:
    """A row of a table; of the names with ``tag="th"``.

    >>> html_row(["text"], ["<b>"], left=["text"])
    '<tr><td style="text-align:left">&lt;b&gt;</td></tr>'
    """
    cells = ""
    for name, cell in zip(names, row, strict=True):
        side = "left" if name in left else "right"
        text = f"<b>{escape(cell)}</b>" if is_bold else escape(cell)
        cells += f'<{tag} style="text-align:{side}{cell_style}">{text}</{tag}>'
    return f'<tr style="{row_style}">{cells}</tr>' if row_style else f"<tr>{cells}</tr>"
