"""The text around the tokens that show what was found."""

from __future__ import annotations

from torch_collate_kit.reporting.audit.columns import AuditColumns, Found

__all__ = ["excerpt", "printable"]

_BEFORE, _AFTER, _LONGEST = 24, 12, 40


def excerpt(columns: AuditColumns, found: Found) -> str:
    """One row as text, with the place between double brackets; long ones are cut short."""
    if found.example is not None or not len(found.rows):
        return found.example or ""
    row = int(found.rows[0])
    begin, end = int(columns.starts[row]), int(columns.ends[row])
    start, stop = found.place or (begin, end)
    start, stop = max(start, begin), min(stop, end)
    first, last = max(begin, start - _BEFORE), min(end, stop + _AFTER)
    shown = min(stop, start + _LONGEST)
    if shown < stop:
        last = shown
    before, marked, after = (
        columns.vocabulary.text(columns.ids[a:b].tolist())
        for a, b in ((first, start), (start, shown), (shown, last))
    )
    sides = "... " if first > begin else "", " ..." if last < end else ""
    text = f"{sides[0]}{before} \u27e6{marked}\u27e7 {after}{sides[1]}".strip()
    return f"row {columns.numbers[row]}: {' '.join(text.split())}"


def printable(text: str) -> str:
    """``text`` with control characters escaped, so that data cannot steer a terminal.

    >>> print(printable("a\\x1b[31mb"))
    a\\x1b[31mb
    """
    if text.isprintable():
        return text
    return "".join(
        letter
        if letter.isprintable() or letter in "\n\t"
        else letter.encode("unicode_escape").decode()
        for letter in text
    )
