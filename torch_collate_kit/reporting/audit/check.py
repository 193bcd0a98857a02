"""A check of the audit: what it needs, how serious its finding is, and the message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch_collate_kit._reprs import plural
from torch_collate_kit.reporting.audit.columns import AuditColumns
from torch_collate_kit.reporting.audit.findings import Finding, Found, Severity

__all__ = ["FEW", "MOST", "Check", "check"]

_Run: TypeAlias = Callable[[AuditColumns], Found | None]

FEW, MOST = 1 / 3, 0.5  # of the rows with a target: an exception; what the others do

# By the name of a need, its words and whether it is met
_NEEDS: dict[str, tuple[str, Callable[[AuditColumns], bool]]] = {
    "max_tokens": ("max_tokens=", lambda c: c.max_tokens is not None),
    "logprobs": ("", lambda c: c.logprobs is not None),
    "tokenizer": ("a tokenizer", lambda c: c.vocabulary.tokenizer is not None),
    "size": ("a tokenizer with a size", lambda c: c.vocabulary.size is not None),
    "bos": ("a tokenizer with a BOS token", lambda c: c.vocabulary.bos_id is not None),
    "eos": ("a tokenizer with an EOS token", lambda c: c.vocabulary.eos_id is not None),
    "pad": ("a tokenizer with a pad token", lambda c: c.vocabulary.pad_id is not None),
    "header": (
        "a tokenizer whose chat template has a generation prompt",
        lambda c: bool(c.vocabulary.header_ids),
    ),
    "turns": (
        "a tokenizer whose chat template begins answers with an added token",
        lambda c: bool(c.vocabulary.role_ids and c.vocabulary.end_ids),
    ),
    "template": ("a tokenizer with a chat template", lambda c: c.vocabulary.template is not None),
}


@dataclass(frozen=True)
class Check:
    """A function that looks for one thing, with the message and the severity of its finding.

    Attributes:
        run: the function; its name is that of the finding.
        severity: of the finding, unless what was found has its own.
        message: what is wrong and the way out, with places for ``rows`` (how many of how many) and
            for the values of what was found.
        needs: names of what must be there, or else it does not run.
        of_rows: whether it looks at rows, and has nothing to do without any.
        of_rollouts: the severity of rollouts, where it differs.
        of_most: the severity where more than half of the rows have it.
        at_most: the largest share of the rows with a target; above it nothing is said.
    """

    run: _Run
    severity: Severity
    message: str
    needs: tuple[str, ...] = ()
    of_rows: bool = True
    of_rollouts: Severity | None = None
    of_most: Severity | None = None
    at_most: float = float("inf")

    @property
    def name(self) -> str:
        """Name of the finding."""
        return self.run.__name__

    def missing(self, columns: AuditColumns) -> str | None:
        """Return the first need that is not met, in words; "" where there is nothing to look at."""
        if self.of_rows and not len(columns.lengths):
            return ""
        needs = (_NEEDS[need] for need in self.needs)
        return next((what for what, is_met in needs if not is_met(columns)), None)

    def finding(self, columns: AuditColumns) -> Finding | None:
        """Run the check."""
        if "turns" in self.needs and not len(columns.turns.starts):
            return None
        found = self.run(columns)
        if found is None or found.share > self.at_most:
            return None
        total = columns.num_read if found.num_rows is None else found.num_rows
        rows = f"{len(found.rows):,} of {plural(total, 'row')}"
        message = _printable(self.message.format(rows=rows, **found.values))
        severity = found.severity or (self.of_rollouts if columns.are_rollouts else None)
        severity = severity or (self.of_most if found.share > MOST else None) or self.severity
        return Finding(self.name, severity, message, found.rows, _printable(found.example))


def check(severity: Severity, message: str, *needs: str, **options: Any) -> Callable[[_Run], Check]:
    """Turn a function into the check of its name; the options are fields of :class:`Check`."""
    return lambda run: Check(run, severity, message, needs, **options)


def _printable(text: str) -> str:
    """Return ``text`` with control characters escaped, so that data cannot steer a terminal."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1]
        for letter in text
    )
