"""A check of the audit: a function that looks for one thing, and how serious that is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from torch_collate_kit._reprs import plural
from torch_collate_kit.reporting.audit.columns import AuditColumns
from torch_collate_kit.reporting.audit.findings import Finding, Found, Severity

_Run: TypeAlias = Callable[[AuditColumns], Found | None]

FEW, MOST = 1 / 3, 0.5  # of the rows with a target: an exception; what the others do

_NEEDS = {  # attributes of the columns or of their vocabulary, in words
    "max_tokens": "max_tokens=",
    **dict.fromkeys(("labels", "scores", "logprobs", "uids", "unk_id"), ""),
    "tokenizer": "a tokenizer",
    "size": "a tokenizer with a size",
    "bos_id": "a tokenizer with a BOS token",
    "eos_id": "a tokenizer with an EOS token",
    "pad_id": "a tokenizer with a pad token",
    "header_ids": "a tokenizer whose chat template has a generation prompt",
    "role_ids": "a tokenizer whose chat template begins answers with an added token",
    "template": "a tokenizer with a chat template",
}


@dataclass(frozen=True)
class Check:
    """A function that looks for one thing, and the severity of its finding.

    Attributes:
        run: the function; its name is that of the finding.
        severity: of the finding, unless what was found has its own.
        needs: names of what must be there, or else it does not run.
        of_rows: whether it looks at rows, and has nothing to do without any.
        of_rollouts: the severity of rollouts, where it differs.
        of_most: the severity where more than half of the rows have it.
        at_most: the largest share of the rows with a target; above it nothing is said.
    """

    run: _Run
    severity: Severity
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
        for need in self.needs:
            owner = columns if hasattr(columns, need) else columns.vocabulary
            value = getattr(owner, need)
            if value is None or (isinstance(value, np.ndarray | tuple | dict) and not len(value)):
                return _NEEDS[need]
        return None

    def finding(self, columns: AuditColumns) -> Finding | None:
        """Run the check."""
        if "role_ids" in self.needs and not len(columns.turns.starts):
            return None
        found = self.run(columns)
        if found is None or found.share > self.at_most:
            return None
        total = columns.num_read if found.num_rows is None else found.num_rows
        rows = f"{len(found.rows):,} of {plural(total, 'row')}"
        message = _printable(found.message.replace("ROWS", rows, 1))
        severity = found.severity or (self.of_rollouts if columns.are_rollouts else None)
        severity = severity or (self.of_most if found.share > MOST else None) or self.severity
        return Finding(self.name, severity, message, found.rows, _printable(found.example))


def check(severity: Severity, *needs: str, **options: Any) -> Callable[[_Run], Check]:
    """Turn a function into the check of its name; the options are fields of :class:`Check`."""
    return lambda run: Check(run, severity, needs, **options)


def _printable(text: str) -> str:
    """Return ``text`` with control characters escaped, so that data cannot steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
