"""Single tokens (ends, pads, BOS, labels), and the trained part of each turn."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.ragged import span_indices
from torch_collate_kit.reporting.audit.checks import FEW, MOST, check
from torch_collate_kit.reporting.audit.columns import AuditColumns
from torch_collate_kit.reporting.audit.findings import Found, Severity, words_of

_MANY_UNKNOWN = 0.1  # of the tokens of a row, or of the trained ones
_LONGEST_GAP = 3  # tokens from an end to another one
_UNSIGNED = [(1 << bits) - 100 for bits in (8, 16, 32)]
_LONGEST_BLANK = 4  # tokens of white space that are taken for an empty answer


@check("error", "eos_id")
def eos_never_trained(columns: AuditColumns) -> Found | None:
    """Find a dataset in which no trained token ends an answer."""
    labels, ends = columns.labels, columns.vocabulary.end_ids
    is_end = columns.is_end
    if len(labels):
        is_end = np.logical_or.reduce([labels == token for token in ends])
    if (is_end & columns.trained).any():
        return None
    has_target = (columns.num_trained > 0) & ~columns.has_shift  # mask_shifted
    severity: Severity = "warning"
    if not columns.has_target:
        which = "that are trained as a whole"
        way_out = "add it to the end of every text, unless a text continues in the next row"
    elif not columns.are_rollouts and (columns.num_trained[has_target] == 1).all():
        which = "with a single trained token"
        way_out = "that is right if the token is a class; else add it to the end of every answer"
    else:
        which, way_out = "with a target", "add it to the end of every answer, and train it"
        severity = "warning" if columns.are_rollouts else "error"
    if columns.are_classes:
        severity = "note"
    return columns.found_at(
        columns.last_trained[has_target],
        f"no trained token is {_ends(columns)}, in ROWS {which}, so the model never learns to "
        f"stop; {way_out}",
        severity=severity,
    )


@check("warning", "eos_id")
def eos_not_trained(columns: AuditColumns) -> Found | None:
    """Find untrained ends of trained answers, where other ends are trained."""
    vocabulary = columns.vocabulary
    is_masked = vocabulary.pad_id == vocabulary.eos_id  # eos_masked_as_pad has the reason
    if is_masked or not columns.is_end[columns.trained_places].any():
        return None
    return columns.found_at(
        _untrained_ends(columns),
        f"ROWS have {_ends(columns)} after an answer but do not train it, while other answers do; "
        "extend their target by one token",
    )


@check("error", "eos_id", "pad_id")
def eos_masked_as_pad(columns: AuditColumns) -> Found | None:
    """Find untrained EOS tokens after trained answers, where the pad token is the EOS."""
    vocabulary = columns.vocabulary
    if vocabulary.pad_id != vocabulary.eos_id:
        return None
    places = _untrained_ends(columns)
    return columns.found_at(
        places[columns.ids[places] == vocabulary.eos_id],
        "ROWS do not train the EOS after their answer: the pad token is the EOS token, and a "
        "collator that hides pads hid it too; mask by position, or set another pad token",
    )


def _untrained_ends(columns: AuditColumns) -> np.ndarray:
    """Return the tokens, int64, that end a trained answer and are not trained."""
    turns, is_end, trained = columns.turns, columns.is_end, columns.trained
    places = np.flatnonzero(is_end[1:] & ~trained[1:] & trained[:-1] & ~is_end[:-1]) + 1
    if len(places):
        places = places[~columns.has_shift[columns.rows_of(places)]]  # mask_shifted
        places = places[~np.isin(places, turns.ends[~turns.are_answers])]
    if columns.are_rollouts:  # before a tool's answer the end may be the template's
        return places[np.isin(places, columns.ends - 1)]
    return places[~columns.begins_row(places)]


def _ends(columns: AuditColumns) -> str:
    vocabulary = columns.vocabulary
    return " or ".join(repr(vocabulary.text([token])) for token in vocabulary.end_ids)


@check("error", "pad_id")
def pad_trained(columns: AuditColumns) -> Found | None:
    """Find trained pads; where the pad is the EOS, those after the first at the end of a row."""
    pad = columns.vocabulary.pad_id
    is_pad = columns.ids == pad
    if pad in columns.vocabulary.end_ids:
        others = np.append(-1, np.flatnonzero(~is_pad))
        last = others[np.searchsorted(others, columns.ends) - 1]  # the last token that is not a pad
        firsts = np.maximum(last + 2, columns.starts + 1)
        is_pad[:] = False
        is_pad[span_indices(firsts, np.maximum(columns.ends - firsts, 0))] = True
    return columns.found_at(
        np.flatnonzero(is_pad & columns.trained),
        f"ROWS train pad tokens (id {pad}), which must not be trained: tokenize without padding, "
        "collators pad",
    )


@check("warning", "pad_id")
def padded_rows(columns: AuditColumns) -> Found | None:
    """Find rows that begin or end with two untrained pads; a single one may be an EOS."""
    pad, ids = columns.vocabulary.pad_id, columns.ids
    rows = columns.lengths > 2
    firsts = np.sort(np.concatenate([columns.starts[rows], columns.ends[rows] - 2]))
    is_run = (ids[firsts] == pad) & (ids[firsts + 1] == pad) & ~columns.trained[firsts + 1]
    return columns.found_at(
        firsts[is_run],
        f"ROWS are padded already (id {pad}), and collators take these pads for text; tokenize "
        "without padding",
        width=2,
    )


@check("warning", "bos_id")
def double_bos(columns: AuditColumns) -> Found | None:
    """Find rows whose first two tokens are BOS."""
    bos = columns.vocabulary.bos_id
    starts = columns.starts[columns.lengths > 1]
    is_twice = (columns.ids[starts] == bos) & (columns.ids[starts + 1] == bos)
    return columns.found_at(
        starts[is_twice],
        f"ROWS begin with two BOS tokens (id {bos}), which no model has seen: the chat template "
        "writes one, and the tokenizer another; pass add_special_tokens=False",
        width=2,
    )


@check("warning", "bos_id")
def bos_inside(columns: AuditColumns) -> Found | None:
    """Find BOS tokens within texts, other than after an end, a pad or another BOS."""
    vocabulary = columns.vocabulary
    places = columns.places_of_id(vocabulary.bos_id or 0)
    places = places[~columns.begins_row(places)]
    before = [*vocabulary.end_ids, vocabulary.bos_id, vocabulary.pad_id]
    begins = np.isin(columns.ids[places - 1], [token for token in before if token is not None])
    begins |= columns.is_end[np.maximum(places - 2, 0)]  # white space after an end
    found = places[~begins]
    is_rare = columns.in_rows(columns.rows_of(found)).sum() <= FEW * len(columns.lengths)
    if vocabulary.bos_id == vocabulary.eos_id or not is_rare:
        return None
    return columns.found_at(
        found,
        f"ROWS have a BOS token (id {vocabulary.bos_id}) within their text, while the others begin "
        "with it or have none: parts of a row were tokenized one by one; pass "
        "add_special_tokens=False",
    )


@check("warning", "bos_id")
def bos_missing(columns: AuditColumns) -> Found | None:
    """Find a dataset without a BOS, where the template writes one, or the tokenizer adds it."""
    vocabulary = columns.vocabulary
    if vocabulary.bos_id == vocabulary.eos_id or len(columns.places_of_id(vocabulary.bos_id or 0)):
        return None
    of_template, of_tokenizer = vocabulary.begins_with_bos
    # A text without a header at its start is not a chat, if all chats begin with one
    headers = columns.turns.starts
    is_chat = columns.in_rows(columns.rows_of(headers[columns.begins_row(headers)]))
    if vocabulary.template is not None and not (vocabulary.role_ids and vocabulary.names_system):
        is_chat |= not of_template
    is_bare = np.where(is_chat, of_template, of_tokenizer) & (columns.num_cut == 0)
    return columns.found_at(
        columns.starts[is_bare],
        f"ROWS do not begin with BOS (id {vocabulary.bos_id}), and no row has one, though "
        f"{'the chat template writes it' if of_template else 'the tokenizer adds it to a text'}: "
        "the model sees it at inference; put it before every text",
    )


@check("warning", "tokenizer", "unk_id")
def unknown_tokens(columns: AuditColumns) -> Found | None:
    """Find rows in which many tokens, or many trained ones, are the unknown token."""
    places = columns.places_of_id(columns.vocabulary.unk_id or 0)
    trained, is_many = places[columns.trained[places]], np.zeros(len(columns.lengths), np.bool_)
    for found, totals in ((places, columns.lengths), (trained, columns.num_trained)):
        counts = np.bincount(columns.rows_of(found), minlength=len(totals))
        is_many |= (counts > 1) & (counts >= _MANY_UNKNOWN * totals)
    return columns.found_at(
        places[is_many[columns.rows_of(places)]],
        f"ROWS have many tokens for unknown text (id {columns.vocabulary.unk_id}), which decode to "
        "nothing; use the model's tokenizer, or drop texts in scripts that it does not cover",
    )


@check("warning", "eos_id", of_rollouts="note")
def end_repeated(columns: AuditColumns) -> Found | None:
    """Find rows whose last token is the end of their answer once more, and not trained."""
    ids, last, first = columns.ids, columns.ends - 1, columns.last_trained
    pad, before = columns.vocabulary.pad_id, np.maximum(last - 1, columns.starts)
    is_found = (columns.num_trained > 0) & columns.is_end[first] & (ids[first] == ids[last])
    is_found &= (first < last) & (last - first <= _LONGEST_GAP)
    if (is_found & (ids[last] == pad)).any() and ((ids[before] == pad) & (first < before)).any():
        return None  # padded_rows
    columns.keep(is_found, lambda i: not columns.text(first[i] + 1, last[i]).strip())
    return columns.found_at(
        last[is_found],
        "ROWS have the end of their answer once more as their last token, where generation has "
        "stopped; tokenize without adding an EOS to what the chat template writes",
    )


@check("note", "bos_id")
def bos_in_some_rows(columns: AuditColumns) -> Found | None:
    """Find rows without a BOS at the start, where at least half of the rows have one."""
    vocabulary = columns.vocabulary
    has_bos = columns.ids[columns.starts] == vocabulary.bos_id
    if vocabulary.bos_id == vocabulary.eos_id or has_bos.sum() * 2 < len(has_bos):
        return None
    return columns.found_at(
        columns.starts[~has_bos],
        f"ROWS do not begin with BOS (id {vocabulary.bos_id}), while the others do; tokenize all "
        "rows the same way",
    )


@check("error", "size")
def id_out_of_vocabulary(columns: AuditColumns) -> Found | None:
    """Find ids and labels that are not below the size of the vocabulary."""
    size = columns.vocabulary.size or 0
    tokens = np.maximum(columns.ids, columns.labels) if len(columns.labels) else columns.ids
    places = np.flatnonzero(tokens >= size)
    if not len(places):
        return None
    first, beyond = places[0], int(columns.ids[places[0]])
    return columns.found_at(
        places,
        f"ROWS have ids that the tokenizer does not have, such as "
        f"{beyond if beyond >= size else tokens[first]}: its vocabulary has {size:,} tokens; use "
        "the tokenizer that made the ids, or add the missing tokens to it",
    )


@check("error", "labels")
def labels_shifted(columns: AuditColumns) -> Found | None:
    """Find rows whose labels are the ids of the next tokens, or of those before."""
    to_next, to_last = columns.shifted_labels
    kinds = {"labels[i] is input_ids[i + 1]": to_next, "labels[i] is input_ids[i - 1]": to_last}
    return columns.found_at(
        columns.first_trained[to_next | to_last],
        f"the labels of ROWS are input_ids shifted by one ({words_of(kinds)}), so every token is "
        "trained towards a wrong one: models and collators shift labels themselves; give labels "
        "that equal input_ids at the same place",
    )


@check("warning", "labels")
def labels_not_input_ids(columns: AuditColumns) -> Found | None:
    """Find labels that are not the id at the same place, in rows that are not shifted."""
    is_shifted = np.logical_or(*columns.shifted_labels)
    places = columns.other_labels[~is_shifted[columns.rows_of(columns.other_labels)]]
    wrapped = np.isin(columns.labels[places], _UNSIGNED).any()
    why = "; -100 was stored unsigned, which a signed column holds as it is" if wrapped else ""
    return columns.found_at(
        places,
        f"{len(places):,} labels of ROWS are other ids than input_ids at the same place; a model "
        "that predicts the next token is trained towards its own text: set them to input_ids, or "
        f"-100{why}",
    )


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
        f"in ROWS the loss mask starts {words} "
        f"{words_of({'late': by > 0, 'early': by < 0})}: the answer is not trained from its first "
        "token to its EOS; shift it back",
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
    """Find answers whose first, last or inner tokens are not trained."""
    if columns.are_rollouts:
        return None
    turns, trained = columns.turns, columns.trained
    first, last = columns.next_trained(turns.begins), columns.last_trained_before(turns.stops)
    is_trained = turns.are_answers & (first < turns.stops) & ~turns.is_set_aside
    starts = is_trained & (first > turns.expected)
    starts &= np.append(0, columns.is_continued[:-1])[turns.rows] == 0  # else it goes on here
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
        "text of a question imitates; look at them",
    )


@check("warning", "role_ids", of_most="note")
def text_after_end_trained(columns: AuditColumns) -> Found | None:
    """Find trained tokens, other than pads, after the token that ends an answer."""
    turns, after, stops = columns.turns, _after_ends(columns), columns.runs[1]
    goes_on = (after >= 0) & ~turns.is_set_aside
    is_next = after == turns.ends + 1
    is_blank = goes_on.copy()
    for i in np.flatnonzero(goes_on).tolist():
        stop = min(int(stops[np.searchsorted(stops, after[i], side="right")]), int(turns.limits[i]))
        is_pad = set(columns.ids[after[i] : stop].tolist()) == {columns.vocabulary.pad_id}
        goes_on[i] = not (is_pad and is_next[i])
        is_blank[i] = goes_on[i] and not columns.text(after[i], min(stop, after[i] + 8)).strip()
    if columns.share_of(turns.rows[is_blank]) > FEW:
        goes_on &= ~is_blank
    return columns.found_at(
        after[goes_on],
        "ROWS train text after the token that ends an answer, where generation has stopped; end "
        "the target with that token, once",
    )


def _after_ends(columns: AuditColumns) -> np.ndarray:
    """Return the trained token after the trained end of each answer: the next, or an end; or -1."""
    turns, following = columns.turns, columns.next_trained(columns.turns.ends + 1)
    is_end = np.append(columns.is_end, False)[following]
    is_end &= following <= turns.ends + _LONGEST_GAP
    found = turns.are_answers & (turns.ends >= 0) & columns.trained[turns.ends]
    found &= ((following == turns.ends + 1) | is_end) & (following < turns.limits)
    return np.where(found, following, -1)


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
    is_inside |= np.isin(begins, _after_ends(columns))  # text_after_end_trained
    return columns.found_at(
        begins[~is_inside & ~columns.is_set_aside[rows]],
        "ROWS train text without the header of an answer before it, which the others have; "
        "render all rows with one chat template",
    )


@check("warning", "eos_id", of_rollouts="note")
def empty_answer_trained(columns: AuditColumns) -> Found | None:
    """Find trained answers that hold only white space and their end token."""
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
