"""Whole rows: those that no collator takes, those that are there twice, and those at odds."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.reporting.audit.check import check
from torch_collate_kit.reporting.audit.columns import AuditColumns, Found
from torch_collate_kit.reporting.audit.findings import Severity

__all__ = ["REFUSED", "REPEATED", "same_spans"]

_MEANT, _MANY = 0.5, 20  # half of at least 20 rows: several answers per prompt are the design


@check(
    "error",
    "in {rows} the images and the text do not belong together: {reason}",
    of_rows=False,
)
def placeholders_disagree_with_grids(columns: AuditColumns) -> Found | None:
    """Rows that a reader refuses with their images, and takes without them."""
    return _refused(columns, of_images=True)


@check(
    "error",
    "{rows} are refused by every collator, and were not looked at further: {reason}",
    of_rows=False,
)
def refused(columns: AuditColumns) -> Found | None:
    """Rows that a reader refuses, and with it every collator."""
    return _refused(columns, of_images=False)


@check(
    "note",
    "there are images, and only a processor says how many tokens they take; pass the processor "
    "in place of the tokenizer",
    of_rows=False,
)
def images_not_checked(columns: AuditColumns) -> Found | None:
    """That there are images, and no processor that says how many tokens they take."""
    return Found(np.empty(0, dtype=np.int64)) if columns.has_unread_images else None


def _refused(columns: AuditColumns, *, of_images: bool) -> Found | None:
    rows = [row for row in columns.refused if row.of_images == of_images]
    if not rows:
        return None
    numbers, reason = np.array([row.number for row in rows], dtype=np.int64), rows[0].message
    num_rows = len(columns.refused) + columns.num_read
    return Found(numbers, reason, values={"reason": reason}, num_rows=num_rows)


@check(
    "warning",
    "{rows} have the same tokens as another one; drop the copies ({copies}), unless the weight "
    "that they get is meant",
)
def duplicates(columns: AuditColumns) -> Found | None:
    """Rows with the same tokens, all of them: the first and its copies.

    Silent about rows with images, which are not compared. Of rollouts it is a note, since a policy
    may well give one answer twice.
    """
    groups = same_spans(columns.ids, columns.starts, columns.lengths)
    counts = np.bincount(groups)
    is_copied = (counts[groups] > 1) & ~columns.has_image
    num_copies = np.count_nonzero(is_copied) - len(np.unique(groups[is_copied]))
    severity: Severity | None = "note" if columns.are_rollouts else None
    return columns.found_in(is_copied, severity=severity, copies=f"{num_copies:,}")


@check(
    "warning",
    "{rows} give {answers} different answers to {prompts} prompts; keep one answer for each, "
    "unless several are meant",
)
def contradictory_answers(columns: AuditColumns) -> Found | None:
    """Rows with the same prompt, and other answers.

    The prompt is what comes before the first trained token, the answer what is trained. Needs rows
    that say what is trained, with one trained run, after which two tokens may follow: several
    trials of one conversation are no contradiction, and neither are rollouts, nor rows with images,
    which are not compared. Where at least half of 20 rows or more have company it is a note, since
    several answers were meant.
    """
    if columns.are_rollouts or not columns.has_target:
        return None
    first, stop = columns.first_trained, columns.last_trained + 1
    is_one_run = (stop - first == columns.num_trained) & (columns.num_trained > 0)
    is_asked = is_one_run & (first > columns.starts + 1) & (columns.ends - stop <= 2)
    is_asked &= ~columns.has_image
    if not is_asked.any():
        return None
    starts, answers, stops = columns.starts[is_asked], first[is_asked], stop[is_asked]
    prompts = same_spans(columns.ids, starts, answers - starts)
    texts = same_spans(columns.ids, answers, stops - answers)
    pairs = np.unique(np.stack([prompts, texts]), axis=1)
    different = np.bincount(pairs[0])  # answers per prompt
    is_found = np.zeros_like(is_asked)
    is_found[is_asked] = different[prompts] > 1
    several, num_found = different[different > 1], np.count_nonzero(is_found)
    is_meant = num_found >= _MANY and num_found >= _MEANT * len(is_found)
    return columns.found_in(
        is_found,
        first,
        stop,
        severity="note" if is_meant else None,
        answers=f"{several.sum():,}",
        prompts=f"{len(several):,}",
    )


def same_spans(ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64 [N], equal numbers for spans with equal ids: the place of the first such span.

    >>> same_spans(np.array([5, 6, 7, 5, 6]), np.array([0, 2, 3]), np.array([2, 1, 2])).tolist()
    [0, 1, 0]
    """
    known: dict[bytes, int] = {}  # faster than hashes of whole columns, but for very short spans
    spans = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
    firsts = (known.setdefault(ids[a:b].tobytes(), i) for i, (a, b) in enumerate(spans))
    return np.fromiter(firsts, dtype=np.int64, count=len(starts))


REFUSED = (placeholders_disagree_with_grids, refused, images_not_checked)
REPEATED = (duplicates, contradictory_answers)
