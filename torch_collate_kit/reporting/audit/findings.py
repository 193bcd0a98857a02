"""The findings of an audit, to print, to show in a notebook, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal, NamedTuple

import numpy as np

from torch_collate_kit._checks import plural
from torch_collate_kit.batch.showing.style import html_table

Severity = Literal["error", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
_ROWS_SHOWN = 8


class Found(NamedTuple):
    """Rows found by a check, with one of them as text."""

    rows: np.ndarray
    """int64, the numbers of the rows in the user's data, each once."""
    message: str
    """The finding and the way out; ROWS stands for how many of how many rows."""
    example: str = ""
    severity: Severity | None = None
    """The severity where it differs from that of the check."""
    num_rows: int | None = None
    """The number of rows looked at; None: all that were read."""
    share: float = 0.0
    """These rows as a share of the rows that have a target."""


class Refused(NamedTuple):
    """A row that no collator accepts."""

    number: int
    message: str
    of_images: bool = False
    """Whether a reader accepts the text without its images."""


def words_of(kinds: Mapping[str, np.ndarray]) -> str:
    """Return the words, with "or" between, of the kinds that hold any places, or any True."""
    is_there = {
        what: places.any() if places.dtype == np.bool_ else len(places)
        for what, places in kinds.items()
    }
    return " or ".join(what for what, found in is_there.items() if found)


@dataclass(frozen=True, eq=False)
class Finding:
    """One fault of a dataset, or a fact worth knowing.

    Attributes:
        name: one of the names in docs/audit_checks.md.
        severity: "error", training would be wrong; "warning", it probably would; "note", worth
            knowing.
        message: what is wrong, in how many rows, and the way out.
        rows: int64, the numbers of all rows that have it; empty if it is not about rows.
        example: the text of one of them, with the place marked by double brackets.

    >>> Finding("pad_trained", "error", "1 of 2 rows trains pads", np.array([1])).count
    1
    """

    name: str
    severity: Severity
    message: str
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    example: str = ""

    @property
    def count(self) -> int:
        """Number of rows that have it."""
        return len(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the whole as a dict that JSON can hold."""
        return {**vars(self), "count": self.count, "rows": self.rows.tolist()}

    def __str__(self) -> str:
        rows = ", ".join(map(str, self.rows[:_ROWS_SHOWN].tolist()))
        if self.count > 1:
            more = f", ... ({self.count:,} in all)" if self.count > _ROWS_SHOWN else ""
            rows = f"rows {rows}{more}"
        elif rows:
            rows = f"row {rows}"
        lines = [f"{self.severity}: {self.name}", self.message, rows, self.example]
        return "\n  ".join(filter(None, lines))


@dataclass(frozen=True, eq=False)
class AuditReport:
    """The findings of an audit, errors first.

    Attributes:
        findings: a list of :class:`Finding`.
        num_rows, num_tokens: size of the dataset.
        not_checked: the checks that could not run, each with what it needs, such as a tokenizer.

    >>> report = AuditReport([], num_rows=2, num_tokens=5)
    >>> report.ok, report.names
    (True, [])
    >>> print(report)
    audit of 2 rows (5 tokens): nothing found
    """

    findings: list[Finding]
    num_rows: int
    num_tokens: int
    not_checked: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether there are neither errors nor warnings; notes do not count."""
        return all(finding.severity == "note" for finding in self.findings)

    @property
    def names(self) -> list[str]:
        """Names of the findings, in their order."""
        return [finding.name for finding in self.findings]

    def __getitem__(self, name: str) -> Finding:
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(f"{name!r} was not found; found were {self.names}")

    def to_dict(self) -> dict[str, Any]:
        """Return the whole as a dict that JSON can hold."""
        findings = [finding.to_dict() for finding in self.findings]
        checked = {"findings": findings, "not_checked": dict(self.not_checked)}
        return {"ok": self.ok, **vars(self), **checked}

    def __str__(self) -> str:
        parts = [self._summary(), *map(str, self.findings)]
        if self.not_checked:
            parts.append("\n  ".join(["not checked", *self._needs()]))
        return "\n\n".join(parts)

    __repr__ = __str__

    def _needs(self) -> list[str]:
        """Return each thing that is missing, with the checks that need it."""
        names: dict[str, list[str]] = {}
        for name, what in self.not_checked.items():
            names.setdefault(what, []).append(name)
        return [f"without {what}: {', '.join(checks)}" for what, checks in names.items()]

    def _summary(self) -> str:
        counts = {kind: sum(f.severity == kind for f in self.findings) for kind in SEVERITIES}
        found = [f"{n} {severity}{'s' * (n > 1)}" for severity, n in counts.items() if n]
        what = f"audit of {plural(self.num_rows, 'row')} ({plural(self.num_tokens, 'token')})"
        return f"{what}: {', '.join(found) or 'nothing found'}"

    def _repr_html_(self) -> str:
        """Return the findings as a table for notebooks."""
        names = ("severity", "found", "rows", "what", "example")
        rows = [[f.severity, f.name, f"{f.count:,}", f.message, f.example] for f in self.findings]
        table = html_table(names, rows, names, [""] * len(rows), wrap=True) if rows else ""
        needs = "; ".join(self._needs())
        rest = f"<p>Not checked {escape(needs)}</p>" if needs else ""
        return f"<p>{escape(self._summary())}</p>{table}{rest}"
