"""What is trained of each turn: an answer from its first token to its end, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from torch_collate_kit.reporting.audit.check import check
from torch_collate_kit.reporting.audit.columns import AuditColumns, Found
from torch_collate_kit.reporting.audit.findings import Severity

__all__ = ["CHECKS"]

_LONGEST_BLANK = 4  # tokens of white space that are taken for an empty answer
_FEW, _MOST = 1 / 3, 0.5  # of the rows with a target: an exception; what the others do


@check(
    "warning",
    "{rows} train text of the user, of a tool or of the system prompt, which the model is given "
    "at inference; train the answers alone, as tokenize_chat does",
    needs=("turns",),
)
def prompt_trained(columns: AuditColumns) -> Found | None:
    """Rows that train text after the header of another role than the assistant's.

    The end token alone counts in at most a third of the rows, since some train every end on
    purpose. Silent about rows that are trained as a whole, and those with a shifted mask.
    """
    turns = columns.turns
    is_asked = ~turns.are_answers & ~turns.is_set_aside
    texts = np.where(turns.ends >= 0, np.minimum(turns.ends, turns.limits), turns.limits)
    is_trained = is_asked & (turns.num_trained(turns.begins, texts) > 0)
    is_end_trained = is_asked & (turns.num_trained(texts, turns.stops) > 0)
    is_end_trained &= turns.stops <= turns.limits
    if columns.share_of(columns.in_rows(turns.rows[is_end_trained & ~is_trained])) <= _FEW:
        is_trained |= is_end_trained
    places = turns.first_trained(turns.begins[is_trained])
    return columns.found_at(places)


@check(
    "error",
    "the trained tokens of {rows} stand {by} too {direction}: the answer is not trained "
    "from its first token to its EOS; move the mask back",
    needs=("turns",),
)
def mask_shifted(columns: AuditColumns) -> Found | None:
    """Rows with an answer whose trained tokens begin and end equally late, or equally early.

    By up to five tokens. One end alone is no evidence: a prompt may open a thinking block. Silent
    about rows that :func:`labels_shifted` names, and about an answer at the very end of a row,
    after which nothing can be trained.
    """
    by = columns.turns.shifts
    is_shifted = by != 0
    if not is_shifted.any():
        return None
    distances = np.unique(np.abs(by[is_shifted]))
    words = "one token" if distances.max() == 1 else f"{distances.max()} tokens"
    directions = ["late"] * bool((by > 0).any()) + ["early"] * bool((by < 0).any())
    return columns.found_in(
        columns.in_rows(columns.turns.rows[is_shifted]),
        columns.first_trained,
        by=words if len(distances) == 1 else f"up to {words}",
        direction=" or ".join(directions),
    )


@check(
    "warning",
    "{rows} train only a part of an answer: {what}; train every answer from its first token to "
    "its end",
    needs=("turns",),
)
def answer_partly_trained(columns: AuditColumns) -> Found | None:
    """Rows with an answer of which the first tokens, the last ones, or some between are left out.

    What a prompt may add to a header is none of the answer: white space and tags, such as an empty
    thinking block. Nor is a hole with a control token, as a tool's result has. A note where it is
    so in more than half of the rows, which then is meant. Silent about rollouts, whose environment
    may write anything, rows with a shifted mask, and the end token alone, which
    :func:`eos_not_trained` names.
    """
    if columns.are_rollouts:
        return None
    turns = columns.turns
    first, last = turns.first_trained(turns.begins), turns.last_trained(turns.stops)
    is_trained = turns.are_answers & (first < turns.stops) & ~turns.is_set_aside
    kinds = {
        "its first tokens are not trained": is_trained & (first > turns.expected),
        "it is trained up to a token before its end": is_trained
        & (turns.ends >= 0)
        & (last < turns.ends - 1),
        "it has untrained tokens inside": is_trained
        & (turns.num_trained(first, last + 1) < last + 1 - first),
    }
    starts, _, holes = kinds.values()
    _keep(starts, lambda i: not turns.is_markup(int(turns.begins[i]), int(first[i])))
    control = columns.vocabulary.control_ids
    trained = columns.trained

    def is_hole(i: int) -> bool:
        inside = np.arange(first[i], last[i])
        return not control & set(columns.ids[inside[~trained[inside]]].tolist())

    _keep(holes, is_hole)
    is_found = columns.in_rows(turns.rows[np.logical_or.reduce(list(kinds.values()))])
    severity: Severity | None = "note" if columns.share_of(is_found) > _MOST else None
    what = " or ".join(words for words, found in kinds.items() if found.any())
    return columns.found_in(is_found, columns.first_trained, severity=severity, what=what)


@check(
    "warning",
    "{rows} train text after the token that ends an answer, where generation has stopped; end the "
    "target with that token, once",
    needs=("turns",),
)
def text_after_end_trained(columns: AuditColumns) -> Found | None:
    """Rows whose trained tokens go on after the token that ends an answer.

    White space counts in at most a third of the rows. A note where it is so in more than half of
    them. Silent about pads, rows that are trained as a whole, and those with a shifted mask.
    """
    turns, num_tokens = columns.turns, len(columns.ids)
    after = np.minimum(turns.ends + 1, num_tokens - 1)
    goes_on = turns.are_answers & (turns.ends >= 0) & (turns.ends + 1 < turns.limits)
    goes_on &= columns.trained[turns.ends] & columns.trained[after]
    goes_on &= ~turns.is_set_aside
    _, stops = columns.runs
    is_blank = goes_on.copy()
    for i in np.flatnonzero(goes_on).tolist():
        stop = min(int(stops[np.searchsorted(stops, after[i], side="right")]), int(turns.limits[i]))
        rest = columns.ids[after[i] : stop].tolist()
        goes_on[i] = set(rest) != {columns.vocabulary.pad_id}
        is_blank[i] = goes_on[i] and not columns.vocabulary.text(rest[:8]).strip()
    if columns.share_of(columns.in_rows(turns.rows[is_blank])) > _FEW:
        goes_on &= ~is_blank
    is_found = columns.in_rows(turns.rows[goes_on])
    severity: Severity | None = "note" if columns.share_of(is_found) > _MOST else None
    found = columns.found_at(after[goes_on])
    return found and Found(found.rows, found.example, severity)


@check(
    "warning",
    "{rows} end an answer with {wrong}, where the others end it with {end}; end all answers with "
    "the token at which generation stops",
    needs=("turns",),
)
def wrong_end_token(columns: AuditColumns) -> Found | None:
    """Rows with a trained answer that ends with another token than most answers do.

    Candidates are answers without an end token before the next turn, and those that end with the
    EOS where at least two thirds end with the token of the template, or the other way round. Silent
    about a row that stops within its answer, which :func:`eos_truncated` names, unless its last
    token is a control token; and where fewer than half of the rows end their answers well.
    """
    turns, vocabulary = columns.turns, columns.vocabulary
    last = turns.last_trained(turns.stops)
    is_own = turns.are_answers & (last >= turns.begins) & ~turns.is_set_aside
    ends_well = is_own & (turns.ends >= 0)
    token = columns.ids[np.where(ends_well, turns.ends, last)]
    is_late = np.isin(token, list(vocabulary.late_end_ids - {*vocabulary.end_ids}))
    is_control = np.isin(token, list(vocabulary.control_ids))
    is_cut = (last == columns.ends[turns.rows] - 1) & ~is_control
    is_wrong = is_own & ~ends_well & ~is_late & ~is_cut
    is_wrong &= ~columns.trained[np.minimum(turns.stops, len(columns.ids) - 1)] | (
        turns.stops == columns.ends[turns.rows]
    )
    kinds, counts = np.unique(token[ends_well & ~is_late], return_counts=True)
    for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
        if count <= _FEW * counts.sum():
            is_wrong |= ends_well & ~is_late & (token == kind)
    is_found = columns.in_rows(turns.rows[is_wrong])
    if not is_found.any() or columns.share_of(is_found) > _MOST:
        return None
    wrong = repr(vocabulary.text(token[is_wrong][:1].tolist()))
    end = repr(vocabulary.text(kinds[counts.argmax()].reshape(1).tolist())) if len(kinds) else ""
    if not end:
        return None
    places = np.where(ends_well, turns.ends, last)[is_wrong]
    return columns.found_at(places, wrong=wrong, end=end)


@check(
    "warning",
    "{rows} train text that no header of an answer comes before, while the others have it; render "
    "all rows with one chat template",
    needs=("turns",),
)
def answer_without_header(columns: AuditColumns) -> Found | None:
    """Rows with trained text outside of every turn, in at most a third of the rows.

    That is before the first header, or after the end of a turn. Silent about rows that are trained
    as a whole, which are texts, and those with a shifted mask.
    """
    turns, (begins, _) = columns.turns, columns.runs
    rows = columns.rows_of(begins)
    turn = np.searchsorted(turns.starts, begins, side="right") - 1
    is_inside = (turn >= 0) & (turns.rows[turn] == rows) & (begins < turns.stops[turn])
    is_outside = ~is_inside & ~columns.is_set_aside[rows]
    if columns.share_of(columns.in_rows(rows[is_outside])) > _FEW:
        return None
    return columns.found_at(begins[is_outside])


@check(
    "warning",
    "{rows} train an empty answer, which teaches the model to say nothing; drop them, or give "
    "the answers a text",
    needs=("eos",),
)
def empty_answer_trained(columns: AuditColumns) -> Found | None:
    """Rows that train an answer of nothing but its end token, with white space maybe.

    Without the headers of a chat template it is the whole target of a row, in at most a third of
    the rows. A note of rollouts.
    """
    turns, vocabulary = columns.turns, columns.vocabulary
    severity: Severity | None = "note" if columns.are_rollouts else None
    width = turns.ends - turns.begins
    is_empty = turns.are_answers & (width >= 0) & (width <= _LONGEST_BLANK)
    is_empty &= columns.trained[turns.ends] if len(turns.ends) else False
    _keep(
        is_empty,
        lambda i: (
            not vocabulary.text(columns.ids[turns.begins[i] : turns.ends[i]].tolist()).strip()
        ),
    )
    if vocabulary.role_ids:
        found = columns.found_at(turns.ends[is_empty])
    else:
        is_end = columns.trained & columns.is_end
        num_ends = np.add.reduceat(is_end, columns.starts, dtype=np.int64)
        is_found = (columns.num_trained > 0) & (num_ends == columns.num_trained)
        if columns.share_of(is_found) > _FEW:
            return None
        found = columns.found_in(is_found, columns.first_trained)
    return found and Found(found.rows, found.example, severity)


def _keep(is_found: np.ndarray, is_meant: Callable[[int], bool]) -> None:
    """Look closer at what is found, which is little, and keep of it what is meant."""
    for i in np.flatnonzero(is_found).tolist():
        is_found[i] = is_meant(i)


CHECKS = (
    mask_shifted,
    prompt_trained,
    answer_partly_trained,
    text_after_end_trained,
    wrong_end_token,
    answer_without_header,
    empty_answer_trained,
)
