"""Figures out of a run's JSON, as a page shows them; "not measured" for what it lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["MISSING", "Results", "Rows", "bytes_per_token", "cell", "duration", "ms", "times"]

Results = Mapping[str, Any]
Rows = list[list[str]]
MISSING = "not measured"


def ms(results: Results, key: str, name: str) -> str:
    """The median of one candidate, such as "3.7 ms"."""
    found = results.get(key, {}).get(name)
    return f"{1e3 * found['median']:,.3g} ms" if found else MISSING


def times(results: Results, key: str, other: str, ours: str) -> str:
    """How many times as long as ours another one takes."""
    table = results.get(key, {})
    if other not in table or ours not in table:
        return MISSING
    return f"{table[other]['median'] / table[ours]['median']:,.3g}x"


def cell(results: Results, heading: str, row: str, column: str) -> str:
    """A cell of a table of the page, by its heading and the first cell of its row."""
    for part in results.get("parts", []):
        if part.get("heading") == heading:
            for cells in part["rows"]:
                if cells[0] == row and column in part["header"]:
                    return str(cells[part["header"].index(column)])
    return MISSING


def duration(cell: str) -> str:
    """A cell with milliseconds, in the unit that reads best."""
    if cell == MISSING:
        return cell
    ms = float(cell.replace(",", ""))
    return f"{ms / 1e3:.2g} s" if ms >= 1000 else f"{ms:.3g} ms"


def bytes_per_token(results: Results, key: str, of: str) -> str:
    found = results.get(key)
    return f"{found[of] / found['tokens']:.0f}" if found else MISSING
