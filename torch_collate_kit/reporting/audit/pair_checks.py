"""The two sides of preference pairs against each other."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.reporting.audit.check import check
from torch_collate_kit.reporting.audit.columns import AuditColumns
from torch_collate_kit.reporting.audit.findings import Found

_LEAST_PAIRS, _NEARLY_ALL = 20, 0.9
_SHARED = 3  # tokens with which both sides begin


@check("error")
def two_prompts(columns: AuditColumns) -> Found | None:
    """Find pairs whose sides differ before the first trained token of both."""
    pairs = _pairs(columns)
    pairs = pairs[(columns.num_trained[pairs] > 0).all(axis=1)]
    starts = columns.starts[pairs]
    shared = (columns.first_trained[pairs] - starts).min(axis=1)
    groups = columns.equal_spans(starts.T.ravel(), np.tile(shared, 2)).reshape(2, -1)
    differ = groups[0] != groups[1]
    return columns.found_at(
        starts[differ, 1],
        "ROWS have two prompts: the sides differ before their first trained token, so they answer "
        "different questions; tokenize them with preference.tokenize_preferences",
        shared[differ],
    )


@check("warning")
def equal_sides(columns: AuditColumns) -> Found | None:
    """Find pairs whose sides have the same tokens."""
    pairs = _pairs(columns)
    rows = pairs.T.ravel()
    groups = columns.equal_spans(columns.starts[rows], columns.lengths[rows]).reshape(2, -1)
    return _found(
        columns,
        pairs[groups[0] == groups[1]],
        "ROWS have the same chosen and rejected side, which teaches nothing; drop them",
    )


@check("warning")
def shared_prompt_trained(columns: AuditColumns) -> Found | None:
    """Find pairs of which every token is trained though the sides begin with the same ones."""
    pairs = _pairs(columns) if columns.has_target else np.empty((0, 2), dtype=np.int64)
    is_full = columns.is_fully_trained & (columns.lengths > _SHARED)
    rows = pairs[is_full[pairs].all(axis=1)].T.ravel()
    groups = columns.equal_spans(columns.starts[rows], np.full_like(rows, _SHARED)).reshape(2, -1)
    return _found(
        columns,
        rows.reshape(2, -1).T[groups[0] == groups[1]],
        "ROWS train every token of both sides, which begin with the same prompt: it cancels out in "
        "a difference of sums, and is counted in means (SimPO, ORPO) and in what is logged; mark "
        "the answers alone, as preference.tokenize_preferences does",
    )


@check("warning")
def sides_told_by_length(columns: AuditColumns) -> Found | None:
    """Find pairs of which nearly all have the longer, or the shorter, answer chosen."""
    pairs = _pairs(columns)
    chosen, rejected = columns.num_trained[pairs].T
    longer, shorter = chosen > rejected, chosen < rejected
    is_usual, word = (longer, "longer") if longer.sum() > shorter.sum() else (shorter, "shorter")
    if len(pairs) < _LEAST_PAIRS or is_usual.mean() < _NEARLY_ALL:
        return None
    return _found(
        columns,
        pairs[is_usual],
        f"ROWS choose the {word} answer, so length alone tells the sides apart and may be what is "
        "learnt; check that the sides are not swapped, and add pairs of the other kind",
    )


@check("warning")
def wrong_margin(columns: AuditColumns) -> Found | None:
    """Find pairs whose margin is negative, or whose rejected side has the higher score."""
    pairs = _pairs(columns)
    return _found(
        columns,
        pairs[columns.margins[pairs[:, 0]] < 0],
        "ROWS choose the side with the lower score, or have a negative margin; swap the sides, or "
        "drop the pairs",
    )


def _pairs(columns: AuditColumns) -> np.ndarray:
    """Return the rows of the chosen and the rejected side of each pair: int64 [P, 2]."""
    heads = columns.heads
    are_two = (np.diff(heads, append=len(columns.lengths)) == 2).all()
    are_pairs = len(columns.segments) and not columns.are_labelled and are_two
    heads = heads if are_pairs else heads[:0]
    return np.stack([heads, heads + 1], axis=1)


def _found(columns: AuditColumns, pairs: np.ndarray, message: str) -> Found | None:
    """Return these pairs; the chosen answer of the first one is shown."""
    places = np.maximum(columns.first_trained[pairs[:, 0]], columns.starts[pairs[:, 0]])
    return columns.found_at(places, message, columns.ends[pairs[:, 0]] - places)
