"""The trained part of each turn: an answer from its first token to its end, and nothing else."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.reporting.audit.check import FEW, MOST, check
from torch_collate_kit.reporting.audit.columns import AuditColumns
from torch_collate_kit.reporting.audit.findings import Found, words_of

_LONGEST_BLANK = 4  # tokens of white space that are taken for an empty answer


@check("error", "role_ids")
def mask_shifted(columns: AuditColumns) -> Found | None:
    """Find answers whose trained tokens begin and end equally late, or equally early."""
    by = columns.turns.shifts
    distances = np.unique(np.abs(by[by != 0]))
    if not len(distances):
        return None
    words = "one token" if distances.max() == 1 else f"{distances.max()} tokens"
    words = words if len(distances) == 1 else f"up to {words}"
    return columns.found_at(
        columns.first_trained[columns.turns.rows[by != 0]],
        f"the trained tokens of ROWS stand {words} too "
        f"{words_of({'late': by > 0, 'early': by < 0})}: the answer is not trained from its first "
        "token to its EOS; move the mask back",
    )


@check("warning", "role_ids")
def prompt_trained(columns: AuditColumns) -> Found | None:
    """Find trained text after the header of another role than the assistant's."""
    turns = columns.turns
    is_asked = ~turns.are_answers & ~turns.is_set_aside
    texts = np.minimum(turns.text_stops, turns.limits)
    is_trained = is_asked & (columns.num_trained_in(turns.begins, texts) > 0)
    is_end_trained = is_asked & (columns.num_trained_in(texts, turns.stops) > 0)
    is_end_trained &= turns.stops <= turns.limits
    if columns.share_of(turns.rows[is_end_trained & ~is_trained]) <= FEW:  # else on purpose
        is_trained |= is_end_trained
    return columns.found_at(
        columns.next_trained(turns.begins[is_trained]),
        "ROWS train text of the user, of a tool or of the system prompt, which the model is given "
        "at inference; train the answers alone, as tokenize_chat does",
    )


@check("warning", "role_ids", of_most="note")
def answer_partly_trained(columns: AuditColumns) -> Found | None:
    """Find answers without their first tokens, their last ones, or some between."""
    if columns.are_rollouts:
        return None
    turns, trained = columns.turns, columns.trained
    first, last = columns.next_trained(turns.begins), columns.last_trained_before(turns.stops)
    is_trained = turns.are_answers & (first < turns.stops) & ~turns.is_set_aside
    starts = is_trained & (first > turns.expected)
    columns.keep(starts, lambda i: not turns.is_markup(turns.begins[i], first[i]))
    holes = is_trained & (columns.num_trained_in(first, last + 1) < last + 1 - first)
    control = columns.vocabulary.control_ids

    def is_hole(i: int) -> bool:
        inside = np.arange(first[i], last[i])
        return not control & set(columns.ids[inside[~trained[inside]]].tolist())

    columns.keep(holes, is_hole)
    ends = is_trained & (turns.ends >= 0) & (last < turns.ends - 1)
    kinds = {
        "its first tokens are not trained": starts,
        "it is trained up to a token before its end": ends,
        "it has untrained tokens inside": holes,
    }
    return columns.found_at(
        columns.first_trained[turns.rows[starts | ends | holes]],
        f"ROWS train only a part of an answer: {words_of(kinds)}; train every answer from its "
        "first token to its end",
    )


@check("note", "role_ids", at_most=FEW)
def answer_not_trained(columns: AuditColumns) -> Found | None:
    """Find whole answers that are not trained, in rows that train another one."""
    turns = columns.turns
    is_left = turns.are_answers & (turns.ends >= 0) & ~turns.is_set_aside
    is_left &= columns.num_trained_in(turns.begins, turns.stops) == 0
    is_left &= columns.num_trained[turns.rows] > 0
    if columns.are_rollouts:
        return None
    return columns.found_at(
        turns.begins[is_left],
        "ROWS leave out an answer beside the trained ones: context on purpose, or a turn that the "
        "text of a question pretends; look at them",
    )


@check("warning", "role_ids", of_most="note")
def text_after_end_trained(columns: AuditColumns) -> Found | None:
    """Find trained tokens, other than pads, after the token that ends an answer."""
    turns = columns.turns
    after = np.minimum(turns.ends + 1, len(columns.ids) - 1)
    goes_on = turns.are_answers & (turns.ends >= 0) & (turns.ends + 1 < turns.limits)
    goes_on &= columns.trained[turns.ends] & columns.trained[after] & ~turns.is_set_aside
    stops = columns.runs[1]
    is_blank = goes_on.copy()
    for i in np.flatnonzero(goes_on).tolist():
        stop = min(int(stops[np.searchsorted(stops, after[i], side="right")]), int(turns.limits[i]))
        goes_on[i] = set(columns.ids[after[i] : stop].tolist()) != {columns.vocabulary.pad_id}
        is_blank[i] = goes_on[i] and not columns.text(after[i], min(stop, after[i] + 8)).strip()
    if columns.share_of(turns.rows[is_blank]) > FEW:
        goes_on &= ~is_blank
    return columns.found_at(
        after[goes_on],
        "ROWS train text after the token that ends an answer, where generation has stopped; end "
        "the target with that token, once",
    )


@check("warning", "role_ids", at_most=MOST)
def wrong_end_token(columns: AuditColumns) -> Found | None:
    """Find trained answers that end with another token than most answers do."""
    turns, vocabulary = columns.turns, columns.vocabulary
    last = columns.last_trained_before(turns.stops)
    is_own = turns.are_answers & (last >= turns.begins) & ~turns.is_set_aside
    ends_well = is_own & (turns.ends >= 0)
    places = np.where(ends_well, turns.ends, last)
    token = columns.ids[places]
    is_late = np.isin(token, list(vocabulary.late_end_ids - {*vocabulary.end_ids}))
    is_control = np.isin(token, list(vocabulary.control_ids))
    is_cut = (last == turns.row_ends - 1) & ~is_control  # left to eos_truncated
    is_wrong = is_own & ~ends_well & ~is_late & ~is_cut
    is_wrong &= ~columns.trained[np.minimum(turns.stops, len(columns.ids) - 1)] | (
        turns.stops == turns.row_ends
    )
    kinds, counts = np.unique(token[ends_well & ~is_late], return_counts=True)
    rare = kinds[counts <= FEW * counts.sum()]
    is_wrong |= ends_well & ~is_late & np.isin(token, rare)
    if not is_wrong.any() or not len(kinds):
        return None
    wrong, end = (vocabulary.text([int(t)]) for t in (token[is_wrong][0], kinds[counts.argmax()]))
    return columns.found_at(
        places[is_wrong],
        f"ROWS end an answer with {wrong!r}, where the others end it with {end!r}; end all answers "
        "with the token at which generation stops",
    )


@check("warning", "role_ids", at_most=FEW)
def answer_without_header(columns: AuditColumns) -> Found | None:
    """Find trained text before the first header of a row, or after the end of a turn."""
    turns, begins = columns.turns, columns.runs[0]
    rows = columns.rows_of(begins)
    turn = np.searchsorted(turns.starts, begins, side="right") - 1
    is_inside = (turn >= 0) & (turns.rows[turn] == rows) & (begins < turns.stops[turn])
    return columns.found_at(
        begins[~is_inside & ~columns.is_set_aside[rows]],
        "ROWS train text that no header of an answer comes before, while the others have it; "
        "render all rows with one chat template",
    )


@check("warning", "eos_id", of_rollouts="note")
def empty_answer_trained(columns: AuditColumns) -> Found | None:
    """Find trained answers of nothing but their end token, and white space at most."""
    message = (
        "ROWS train an empty answer, which teaches the model to say nothing; drop them, or give "
        "the answers a text"
    )
    if not columns.vocabulary.role_ids:
        num_ends = np.add.reduceat(columns.trained & columns.is_end, columns.starts, dtype=np.int64)
        is_found = (columns.num_trained > 0) & (num_ends == columns.num_trained)
        found = columns.found_at(columns.first_trained[is_found], message)
        return found if found and found.share <= FEW else None
    turns = columns.turns
    width = turns.ends - turns.begins
    is_empty = turns.are_answers & (width >= 0) & (width <= _LONGEST_BLANK)
    is_empty &= columns.trained[turns.ends]
    columns.keep(is_empty, lambda i: not columns.text(turns.begins[i], turns.ends[i]).strip())
    return columns.found_at(turns.ends[is_empty], message)
