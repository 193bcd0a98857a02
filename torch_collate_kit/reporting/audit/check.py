"""What a check is: what it needs, how bad what it finds is, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch_collate_kit._reprs import plural
from torch_collate_kit.reporting.audit.columns import AuditColumns, Found
from torch_collate_kit.reporting.audit.findings import Finding, Severity

__all__ = ["Check", "check"]

_Run: TypeAlias = Callable[[AuditColumns], Found | None]

# What a check may need: in words, and whether it is there
_NEEDS: dict[str, tuple[str, Callable[[AuditColumns], bool]]] = {
    "max_tokens": ("max_tokens=", lambda c: c.max_tokens is not None),
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
    "template": (
        "a tokenizer with a chat template",
        lambda c: c.vocabulary.template is not None,
    ),
}


@dataclass(frozen=True)
class Check:
    """A check, and the finding that is made of what it found."""

    run: _Run
    severity: Severity
    message: str
    needs: tuple[str, ...]
    of_rows: bool

    @property
    def name(self) -> str:
        """The name of its finding."""
        return self.run.__name__

    def missing(self, columns: AuditColumns) -> str:
        """What it needs and does not have, in words; "" if it can run."""
        for need in self.needs:
            what, is_there = _NEEDS[need]
            if not is_there(columns):
                return what
        return ""

    def finding(self, columns: AuditColumns) -> Finding | None:
        """What it finds, if anything."""
        if "turns" in self.needs and not len(columns.turns.starts):
            return None
        found = self.run(columns)
        if found is None:
            return None
        total = columns.num_read if found.num_rows is None else found.num_rows
        rows = f"{len(found.rows):,} of {plural(total, 'row')}"
        message = self.message.format(rows=rows, **found.values)
        severity = found.severity or self.severity
        return Finding(
            self.name, severity, _printable(message), found.rows, _printable(found.example)
        )


def check(
    severity: Severity, message: str, *, needs: tuple[str, ...] = (), of_rows: bool = True
) -> Callable[[_Run], Check]:
    """Turn a function into the check of its name.

    Args:
        severity: of its finding, unless what was found has its own.
        message: what is wrong and the way out, with places for ``rows``, how many of how many, and
            for the values of what was found.
        needs: without these it is not run; "eos" is a tokenizer with an EOS token.
        of_rows: whether there is nothing to check where no row was read.
    """
    return lambda run: Check(run, severity, message, needs, of_rows)


def _printable(text: str) -> str:
    """``text`` with control characters escaped, so that data cannot steer a terminal.

    >>> print(_printable("a\\x1b[31mb"))
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
