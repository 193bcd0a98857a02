"""Rows that say the same thing twice, or two things to one question."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.reporting.audit.check import check
from torch_collate_kit.reporting.audit.columns import AuditColumns, Found
from torch_collate_kit.reporting.audit.findings import Severity

__all__ = ["CHECKS", "same_spans"]

_MEANT, _MANY = 0.5, 20  # half of at least 20 rows: several answers per prompt are the design


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


CHECKS = (
    duplicates,
    contradictory_answers,
)
