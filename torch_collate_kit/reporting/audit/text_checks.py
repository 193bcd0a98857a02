"""What the texts of turns hold: control tokens, thinking, tool calls, bytes without a character."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np

from torch_collate_kit.reporting.audit.check import check
from torch_collate_kit.reporting.audit.columns import AuditColumns, Found
from torch_collate_kit.reporting.audit.findings import Severity
from torch_collate_kit.reporting.audit.vocabulary import THINKING_TAGS

__all__ = ["CHECKS"]

_FEW, _MOST = 1 / 3, 0.5  # of the rows: an exception; what the others do
_LONGEST_SEPARATOR = 16  # tokens between two turns that are looked at
_LARGEST_ID = 1 << 22
_REPLACEMENT = "\ufffd"
_RARE, _MANY_RARE, _LOST = 1e-5, 0.1, 0.015  # of all tokens; of the tokens of a row
_MANY_PARTIAL = 0.25  # of all tokens: one per byte
_MOST_READ, _SAMPLED = 1000, 500_000  # rows that are tokenized again; tokens at each end


@check(
    "warning",
    "{rows} are not as the chat template writes them: {what}; render all rows with the template, "
    "and take control tokens out of the texts",
    needs=("turns",),
)
def template_not_followed(columns: AuditColumns) -> Found | None:
    """Rows with something about their turns that the chat template does not write.

    A control token inside a text, text between two turns, a turn without its end or without its
    text, other white space after a header than most have, and a row that begins within a text. Each
    of them counts in at most a third of the rows. Silent about rows with images, and about
    responses of rollouts, whose environment may write anything.
    """
    found: dict[str, np.ndarray] = {}
    num_rows = int(columns.in_rows(columns.turns.rows).sum())
    for find in (_control_tokens, _separators, _unfinished, _line_breaks, _cut_starts):
        for what, places in find(columns).items():
            rows = columns.rows_of(places)
            is_kept = ~columns.has_image[rows]
            if columns.are_rollouts:
                is_kept &= places < columns.responses[rows]
            if is_kept.any() and columns.in_rows(rows[is_kept]).sum() <= _FEW * num_rows:
                found[what] = places[is_kept]
    if not found:
        return None
    places = np.unique(np.concatenate(list(found.values())))
    return columns.found_at(places, what=" or ".join(dict.fromkeys(found)))


def _control_tokens(columns: AuditColumns) -> dict[str, np.ndarray]:
    """Inside texts: those that begin or end turns, and in prompts those of no template.

    Of each token by itself, since one that many rows have is meant.
    """
    vocabulary, turns = columns.vocabulary, columns.turns
    borders = {ids[0] for ids in vocabulary.role_ids} | {*vocabulary.end_ids}
    borders &= {*vocabulary.added_ids}
    others = vocabulary.control_ids - vocabulary.template_ids - {vocabulary.pad_id}
    places = columns.places_of_ids(borders | others)
    turn = turns.holding(places)
    is_answer = (turn >= 0) & turns.are_answers[turn]
    is_border = np.isin(columns.ids[places], list(borders))
    is_inside = np.where(is_answer, is_border & (not vocabulary.repeats_header), turn >= 0)
    places = places[is_inside]
    by_id = {
        token: places[columns.ids[places] == token] for token in set(columns.ids[places].tolist())
    }
    return {f"{vocabulary.text([token])!r} stands inside a text": of for token, of in by_id.items()}


def _separators(columns: AuditColumns) -> dict[str, np.ndarray]:
    """Text after the end of a turn, and before the next header."""
    turns, vocabulary = columns.turns, columns.vocabulary
    starts, stops = turns.stops, turns.limits
    which = np.flatnonzero((turns.ends >= 0) & (stops > starts))
    if not len(which):
        return {}
    first = columns.ids[starts[which]]
    usual = int(np.bincount(first).argmax())
    which = which[(first != usual) | (stops[which] - starts[which] > 1)]
    meant = {vocabulary.pad_id, vocabulary.eos_id, vocabulary.bos_id}
    known: dict[bytes, bool] = {}
    texts, repeated = [], []
    for turn in which.tolist():
        start, stop = int(starts[turn]), int(stops[turn])
        end = int(columns.ids[turns.ends[turn]])
        is_tail = vocabulary.pad_id == end and stop == turns.row_ends[turn]
        if columns.ids[start] == end and not is_tail:
            repeated.append(start)
            continue
        ids = columns.ids[start : min(stop, start + _LONGEST_SEPARATOR)]
        key = ids.tobytes()
        if key not in known:
            others = [token for token in ids.tolist() if token not in meant]
            known[key] = not vocabulary.text(others).strip()
        if not known[key]:
            texts.append(start)
    return {
        "text stands between two turns": np.array(texts, dtype=np.int64),
        "the end of a turn is there twice": np.array(repeated, dtype=np.int64),
    }


def _unfinished(columns: AuditColumns) -> dict[str, np.ndarray]:
    """Turns that another follows, without the end that most turns of their kind have; or empty."""
    turns = columns.turns
    is_open = (turns.ends < 0) & (turns.limits < turns.row_ends)
    is_closed = turns.ends >= 0
    counts = np.bincount(turns.kinds[is_open | is_closed], minlength=1)
    closed = np.bincount(turns.kinds[is_closed], minlength=len(counts))
    is_usual = closed > (1 - _FEW) * counts
    width = turns.limits - turns.begins
    is_short = is_open & (width <= 4)
    for i in np.flatnonzero(is_short).tolist():
        text = columns.vocabulary.text(columns.ids[turns.begins[i] : turns.limits[i]].tolist())
        is_short[i] = not text.strip()
    is_open[is_open] &= is_usual[turns.kinds[is_open]]
    return {
        "a header is followed by another one": turns.starts[is_short],
        "a turn has no end": turns.limits[is_open & ~turns.are_answers & ~is_short] - 1,
    }


def _line_breaks(columns: AuditColumns) -> dict[str, np.ndarray]:
    """Headers without the white space that comes after most headers of their kind."""
    turns, vocabulary = columns.turns, columns.vocabulary
    has_text = np.flatnonzero(turns.begins < turns.limits)
    tokens = columns.ids[turns.begins[has_text]]
    unique, which = np.unique(tokens, return_inverse=True)
    if not len(unique):
        return {}
    known = unique if vocabulary.size is None else np.minimum(unique, vocabulary.size - 1)
    texts = vocabulary.texts(known[:, None].tolist())
    is_break = np.array([text[:1] == "\n" for text in texts])[which]
    kinds = turns.kinds[has_text]
    broken, all_of = (np.bincount(kinds, weights=of) for of in (is_break, None))
    odd = has_text[~is_break & (broken > (1 - _FEW) * all_of)[kinds]]
    return {"a header is not followed by a line break": turns.starts[odd]}


def _cut_starts(columns: AuditColumns) -> dict[str, np.ndarray]:
    """Rows with turns that do not begin with a header, BOS apart."""
    turns, vocabulary = columns.turns, columns.vocabulary
    rows, first = np.unique(turns.rows, return_index=True)
    starts, stops = columns.starts[rows], turns.starts[first]
    places = starts[stops > starts]
    if not vocabulary.roles.names_system or not len(places):
        return {}
    ids, meant = columns.ids, [*vocabulary.control_ids, vocabulary.pad_id or 0]
    stops = stops[stops > starts]
    is_meant = np.isin(ids[places], meant) & np.isin(ids[stops - 1], meant)
    return {"a row begins within a text": places[~is_meant]}


@check(
    "warning",
    "{rows} train thinking with one of its two tags: {what}, so a model learns to think without an "
    "end, or an answer is taken for thinking; give both tags",
    needs=("turns",),
)
def thinking_not_closed(columns: AuditColumns) -> Found | None:
    """Rows with a turn that begins with an opening tag of thinking and lacks the closing one.

    Or that has the closing tag alone, in at most a third of the rows: before a line break, or where
    most turns with it have both. A note of rollouts, which may be stopped while they
    think, and where it is so in more than half of all rows. Silent about tags within a text.
    """
    found: dict[str, list[np.ndarray]] = {"it is not closed": [], "it is not opened": []}
    turns = columns.turns
    for tag in THINKING_TAGS:
        opens, closes = (_places_of_tag(columns, side + tag) for side in ("<", "</"))
        if not len(opens) and not len(closes):
            continue
        num_opens, num_closes = (
            np.bincount(turns.holding(of)[turns.holding(of) >= 0], minlength=len(turns.starts))
            for of in (opens, closes)
        )
        is_trained = turns.are_answers & (turns.num_trained(turns.begins, turns.text_stops) > 0)
        is_open = is_trained & (num_opens > num_closes) & (num_closes == 0)
        for i in np.flatnonzero(is_open).tolist():
            first = int(opens[np.searchsorted(opens, turns.begins[i])])
            is_open[i] = turns.is_markup(int(turns.begins[i]), first)
        is_late = is_trained & (num_closes > num_opens) & (num_opens == 0)
        if is_late.sum() > _MOST * (is_trained & (num_closes > 0)).sum():
            for i in np.flatnonzero(is_late).tolist():  # a text may be about such a tag
                place = int(closes[np.searchsorted(closes, turns.begins[i])])
                text = columns.vocabulary.text(columns.ids[place : place + 8].tolist())
                is_late[i] = text.partition(f"</{tag}>")[2].startswith("\n")
        found["it is not closed"].append(turns.begins[is_open])
        if columns.share_of(columns.in_rows(turns.rows[is_late])) <= _FEW:
            found["it is not opened"].append(turns.begins[is_late])
    whole = {what: np.concatenate(of) for what, of in found.items() if of}
    places = np.unique(np.concatenate([*whole.values(), np.empty(0, dtype=np.int64)]))
    is_found = columns.in_rows(columns.rows_of(places))
    is_meant = columns.are_rollouts or columns.share_of(is_found) > _MOST
    severity: Severity | None = "note" if is_meant else None
    what = " or ".join(words for words, of in whole.items() if len(of))
    result = columns.found_at(places, what=what)
    return result and Found(result.rows, result.example, severity, result.values)


def _places_of_tag(columns: AuditColumns, tag: str) -> np.ndarray:
    patterns = columns.vocabulary.ids_of_tag(tag)
    found = [columns.places_of(pattern) for pattern in patterns]
    return np.unique(np.concatenate([*found, np.empty(0, dtype=np.int64)]))


@check(
    "warning",
    "{rows} train a tool call that cannot be read as JSON, such as {call}; drop them, or correct "
    "the call",
    needs=("turns",),
)
def broken_tool_call(columns: AuditColumns) -> Found | None:
    """Rows with a trained tool call between the tags of the template that is no whole JSON value.

    Silent where the template does not write calls as JSON after a tag, where more than half of the
    calls are none, and about turns without an end.
    """
    vocabulary, turns = columns.vocabulary, columns.turns
    if vocabulary.roles.call is None:
        return None
    tag, close = vocabulary.roles.call
    places = _places_of_tag(columns, tag[:-1])
    turn = turns.holding(places)
    is_trained = (
        (turn >= 0) & turns.are_answers[turn] & (turns.ends[turn] >= 0) & columns.trained[places]
    )
    places, turn = places[is_trained], turn[is_trained]
    following = np.append(places[1:], len(columns.ids))
    stops = np.minimum(following, turns.ends[turn])
    spans = [
        columns.ids[a:b].tolist() for a, b in zip(places.tolist(), stops.tolist(), strict=True)
    ]
    calls = [text.partition(tag)[2].strip() for text in vocabulary.texts(spans)]
    is_call = [call[:1] in ("{", "[") or "call" in tag.lower() for call in calls]
    known = {call: _is_json(call, close) for call in set(calls)}
    broken = [i for i, call in enumerate(calls) if is_call[i] and not known[call]]
    if not broken or len(broken) > _MOST * sum(is_call):
        return None
    return columns.found_at(places[broken], 40, call=repr(calls[broken[0]][:60]))


def _is_json(written: str, close: str) -> bool:
    """Whether a call is a JSON value, and the closing tag if there is one."""
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(written)
    except (ValueError, RecursionError):
        return False
    return written[end:].lstrip().startswith(close)


@check(
    "warning",
    "{rows} have tokens that are no text of this tokenizer ({what}); use the tokenizer that made "
    "the ids, and correct texts that were cut within a character or read in a wrong encoding",
    needs=("tokenizer",),
)
def text_garbled(columns: AuditColumns) -> Found | None:
    """Rows with tokens that decode to U+FFFD, together with their neighbours, in at most a third.

    Or rows with many tokens that are rare in the dataset, of which 1.5% and two at least do not
    come back when their text is tokenized again: ids of another tokenizer. Silent at the end of a
    row, which may be cut there, and where a quarter of the tokens are single bytes. A note of
    rollouts.
    """
    if int(columns.ids.max()) >= _LARGEST_ID:
        return None
    found = {
        "they are shown as U+FFFD": _replaced(columns),
        "their text has other tokens": _foreign(columns),
    }
    is_found = columns.in_rows(columns.rows_of(np.concatenate(list(found.values()))))
    if is_found.sum() > _FEW * len(columns.lengths):
        return None
    severity: Severity | None = "note" if columns.are_rollouts else None
    what = " or ".join(words for words, places in found.items() if len(places))
    places = np.sort(np.concatenate(list(found.values())))
    result = columns.found_at(places, what=what)
    return result and Found(result.rows, result.example, severity, result.values)


def _replaced(columns: AuditColumns) -> np.ndarray:
    """int64, tokens that with their neighbours are no whole character."""
    vocabulary = columns.vocabulary
    if np.isin(columns.ids[:_SAMPLED], vocabulary.partial_ids).mean() > _MANY_PARTIAL:
        return np.empty(0, dtype=np.int64)
    odd = columns.places_of_ids(vocabulary.partial_ids.tolist())
    if not len(odd):
        return odd
    breaks = np.flatnonzero((np.diff(odd) > 1) | columns.begins_row(odd[1:])) + 1
    firsts, lasts = odd[np.append(0, breaks)], odd[np.append(breaks - 1, -1)] + 1
    which = np.flatnonzero(~np.isin(lasts, columns.ends))  # a row may be cut within a character
    known: dict[bytes, bool] = {}

    def is_broken(run: int) -> bool:
        ids = columns.ids[firsts[run] : lasts[run]]
        key = ids.tobytes()
        if key not in known:
            known[key] = _REPLACEMENT in vocabulary.text(ids.tolist())
        return known[key]

    found = [run for run in which.tolist() if is_broken(run)]
    return firsts[found]


def _foreign(columns: AuditColumns) -> np.ndarray:
    """int64, the first token of rows that their own text is not tokenized to.

    What is rare is counted in the first and the last 500,000 tokens.
    """
    sample = columns.ids
    if len(sample) > 2 * _SAMPLED:
        sample = np.concatenate([sample[:_SAMPLED], sample[-_SAMPLED:]])
    counts = np.bincount(sample)
    rare = np.flatnonzero(counts <= max(_RARE * len(sample), 2))
    places = columns.places_of_ids(rare.tolist())
    num_rare = np.bincount(columns.rows_of(places), minlength=len(columns.lengths))
    shares = num_rare / columns.lengths
    rows = np.flatnonzero((shares > _MANY_RARE) & (columns.lengths >= 8))
    rows = rows[np.argsort(-shares[rows], kind="stable")][:_MOST_READ]
    size = columns.vocabulary.size or _LARGEST_ID
    found = []
    for row in np.sort(rows).tolist():
        ids = columns.ids[columns.starts[row] : columns.ends[row]].tolist()
        if max(ids) >= size:
            continue
        again = Counter(columns.vocabulary.encode(columns.vocabulary.text(ids)))
        if (Counter(ids) - again).total() > max(_LOST * len(ids), 1):
            found.append(int(columns.starts[row]))
    return np.array(found, dtype=np.int64)


CHECKS = (template_not_followed, thinking_not_closed, broken_tool_call, text_garbled)
