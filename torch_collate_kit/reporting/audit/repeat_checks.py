"""Rows that say the same thing twice, or two things to one question."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.ragged import span_indices
from torch_collate_kit.reporting.audit.columns import AuditColumns, Found
from torch_collate_kit.reporting.audit.findings import Severity

__all__ = ["contradictory_answers", "duplicates", "same_spans"]

_TOKENS_AT_A_TIME = 1 << 20
_MEANT, _MANY = 0.5, 20  # half of at least 20 rows: several answers per prompt are the design


def duplicates(columns: AuditColumns) -> Found | None:
    """Rows with the same tokens, all of them: the first and its copies.

    Rows are compared token by token where their hashes agree. Silent about rows with images, which
    are not compared. Of rollouts it is a note, since a policy may well give one answer twice.
    """
    groups = same_spans(columns.ids, columns.starts, columns.lengths)
    counts = np.bincount(groups)
    is_copied = (counts[groups] > 1) & ~columns.has_image
    num_copies = np.count_nonzero(is_copied) - len(np.unique(groups[is_copied]))
    severity: Severity | None = "note" if columns.are_rollouts else None
    return columns.found_in(is_copied, severity=severity, copies=f"{num_copies:,}")


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

    Spans have one id or more, and come in the order of the ids.

    >>> same_spans(np.array([5, 6, 7, 5, 6]), np.array([0, 2, 3]), np.array([2, 1, 2])).tolist()
    [0, 1, 0]
    """
    hashes = _hashes(ids, starts, lengths)
    _, first, groups = np.unique(hashes, return_index=True, return_inverse=True)
    firsts = first[groups.reshape(-1)]
    copies = np.flatnonzero(firsts != np.arange(len(starts)))
    if not len(copies):
        return firsts
    is_same = _are_equal(ids, starts, lengths, copies, firsts[copies])
    for place in copies[~is_same].tolist():  # different ids with one hash: next to never
        firsts[place] = _first_equal(ids, starts, lengths, place)
    return firsts


def _hashes(ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """uint64 [N]: sums of what each id becomes with its place in the span, a block at a time."""
    found = np.empty(len(starts), dtype=np.uint64)
    before = np.append(0, np.cumsum(lengths))
    begin = 0
    while begin < len(starts):
        end = int(np.searchsorted(before, before[begin] + _TOKENS_AT_A_TIME, side="right")) - 1
        end = max(end, begin + 1)
        own = lengths[begin:end]
        offsets = np.cumsum(own) - own
        places = np.arange(int(own.sum())) - np.repeat(offsets, own)
        taken = ids[places + np.repeat(starts[begin:end], own)]
        mixed = _mixed(taken.astype(np.uint64) + places.astype(np.uint64) * _STEP)
        found[begin:end] = np.add.reduceat(mixed, offsets) + own.astype(np.uint64)
        begin = end
    return found


_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _mixed(values: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer: every bit of a value changes half of the bits."""
    values ^= values >> np.uint64(30)
    values *= _FIRST
    values ^= values >> np.uint64(27)
    values *= _SECOND
    values ^= values >> np.uint64(31)
    return values


def _are_equal(
    ids: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    some: np.ndarray,
    others: np.ndarray,
) -> np.ndarray:
    """bool, for each pair of spans whether their ids are equal."""
    is_same: np.ndarray = lengths[some] == lengths[others]
    pairs = np.flatnonzero(is_same)
    own = lengths[some[pairs]]
    if len(pairs):
        mine = ids[span_indices(starts[some[pairs]], own)]
        theirs = ids[span_indices(starts[others[pairs]], own)]
        is_same[pairs] = np.logical_and.reduceat(mine == theirs, np.cumsum(own) - own)
    return is_same


def _first_equal(ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, place: int) -> int:
    """The first span that has the ids of this one."""
    span = ids[starts[place] : starts[place] + lengths[place]]
    for i in np.flatnonzero(lengths[:place] == lengths[place]).tolist():
        if np.array_equal(ids[starts[i] : starts[i] + lengths[i]], span):
            return int(i)
    return place
