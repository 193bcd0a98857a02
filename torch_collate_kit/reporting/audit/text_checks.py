"""The texts of turns: control tokens, thinking, tool calls, bytes without a character."""

from __future__ import annotations

import json
import re
from collections import Counter

import numpy as np

from torch_collate_kit.reporting.audit.checks import EVERY, FEW, MOST, check
from torch_collate_kit.reporting.audit.columns import AuditColumns
from torch_collate_kit.reporting.audit.findings import Found
from torch_collate_kit.reporting.audit.vocabulary import THINKING_TAGS

_NONE = np.empty(0, dtype=np.int64)
_LONGEST_SEPARATOR = 16  # tokens between two turns that are looked at
_LARGEST_ID = 1 << 22
_REPLACEMENT = "\ufffd"
_RARE, _MANY_RARE, _LOST = 1e-5, 0.1, 0.015  # of all tokens; of the tokens of a row
_MANY_PARTIAL = 0.25  # of all tokens: one per byte
# UTF-8 read as Windows-1252 or Latin-1: sequences that no language has before a quote or the like
_REST = "\x80-\xbf" + bytes(range(128, 160)).decode("cp1252", "ignore")
_MISREAD = re.compile(
    f"[\xc2\xc3](?![\xab\xbb\u2013\u2014\u2018-\u201d\u2022\u2026\u2039\u203a])[{_REST}]"
    "|\xe2[\x80-\x84\u201a\u201e\u20ac]|\xef\xbf\xbd|\xf0[\x9f\u0178]"
    f"|(?:[\xc4-\xdf][{_REST}]){{2}}|(?:[\xe3-\xe9][{_REST}]{{2}}){{2}}"
)
_MOST_READ, _SAMPLED = 1000, 500_000  # rows that are tokenized again; tokens at each end


@check("warning", "role_ids")
def template_not_followed(columns: AuditColumns) -> Found | None:
    """Find turns that differ from the template's, of kinds in at most a third of the rows."""
    found: dict[str, np.ndarray] = {}
    num_rows = int(columns.in_rows(columns.turns.rows).sum()) * (not columns.are_classes)
    for find in (_forged, _control_tokens, _separators, _unfinished, _line_breaks, _cut_starts):
        for what, places in find(columns).items():
            rows = columns.rows_of(places)
            is_kept = ~columns.has_image[rows]
            if columns.are_rollouts:  # in whose responses an environment may write anything
                is_kept &= places < columns.responses[rows]
            if is_kept.any() and columns.in_rows(rows[is_kept]).sum() <= FEW * num_rows:
                found[what] = places[is_kept]
    return columns.found_by(
        found,
        "ROWS are not as the chat template writes them: WHAT; render all rows with the template, "
        "and take control tokens out of the texts",
    )


def _forged(columns: AuditColumns) -> dict[str, np.ndarray]:
    """Return rows of records with a message that begins or ends turns by itself."""
    is_forged = np.isin(columns.numbers, columns.forged)
    return {"the text of a message begins or ends turns": columns.starts[is_forged]}


def _control_tokens(columns: AuditColumns) -> dict[str, np.ndarray]:
    """Return control tokens inside texts; in answers only those that begin or end turns."""
    vocabulary, turns = columns.vocabulary, columns.turns
    borders = {*vocabulary.border_ids}
    others = vocabulary.control_ids - vocabulary.template_ids - {vocabulary.pad_id}
    places = columns.places_of_ids(borders | others)
    turn = turns.holding(places)
    is_answer = (turn >= 0) & turns.are_answers[turn]
    is_border = np.isin(columns.ids[places], list(borders))
    is_inside = np.where(is_answer, is_border & (not vocabulary.repeats_header), turn >= 0)
    places = places[is_inside]
    return {
        f"{vocabulary.text([token])!r} is inside a text": places[columns.ids[places] == token]
        for token in set(columns.ids[places].tolist())
    }


def _separators(columns: AuditColumns) -> dict[str, np.ndarray]:
    """Return where text follows the end of a turn, before the next header."""
    turns, vocabulary = columns.turns, columns.vocabulary
    starts, stops = turns.stops, turns.limits
    which = np.flatnonzero((turns.ends >= 0) & (stops > starts))
    if not len(which):
        return {}
    first = columns.ids[starts[which]]
    usual = int(np.bincount(first).argmax())
    which = which[(first != usual) | (stops[which] - starts[which] > 1)]
    ends = columns.ids[turns.ends[which]]
    is_tail = (ends == vocabulary.pad_id) & (stops[which] == turns.row_ends[which])
    is_repeated = (columns.ids[starts[which]] == ends) & ~is_tail
    meant = [vocabulary.pad_id, vocabulary.eos_id, vocabulary.bos_id]
    meant_texts = [vocabulary.text([token]) for token in meant if token is not None]

    def is_text(turn: int) -> bool:
        start = int(starts[turn])
        text = columns.text(start, min(int(stops[turn]), start + _LONGEST_SEPARATOR))
        for written in meant_texts:
            text = text.replace(written, "")
        return bool(text.strip())

    texts = [turn for turn in which[~is_repeated].tolist() if is_text(turn)]
    return {
        "text stands between two turns": starts[texts],
        "a turn has its end twice": starts[which[is_repeated]],
    }


def _unfinished(columns: AuditColumns) -> dict[str, np.ndarray]:
    """Return turns without the end that most of their kind have, and those without a text."""
    turns = columns.turns
    is_open = (turns.ends < 0) & (turns.limits < turns.row_ends)
    is_closed = turns.ends >= 0
    counts = np.bincount(turns.kinds[is_open | is_closed], minlength=1)
    closed = np.bincount(turns.kinds[is_closed], minlength=len(counts))
    is_usual = closed > (1 - FEW) * counts
    width = turns.limits - turns.begins
    is_short = is_open & (width <= 4)
    columns.keep(is_short, lambda i: not columns.text(turns.begins[i], turns.limits[i]).strip())
    is_open[is_open] &= is_usual[turns.kinds[is_open]]
    return {
        "a header is followed by another one": turns.starts[is_short],
        "a turn has no end": turns.limits[is_open & ~turns.are_answers & ~is_short] - 1,
    }


def _line_breaks(columns: AuditColumns) -> dict[str, np.ndarray]:
    """Return headers without the line break that follows most headers of their kind."""
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
    broken, all_of = (np.bincount(kinds, weights=weights) for weights in (is_break, None))
    odd = has_text[~is_break & (broken > (1 - FEW) * all_of)[kinds]]
    return {"a header is not followed by a line break": turns.starts[odd]}


def _cut_starts(columns: AuditColumns) -> dict[str, np.ndarray]:
    """Return the starts of rows that begin with neither a header nor BOS and a header."""
    turns, vocabulary = columns.turns, columns.vocabulary
    rows, first = np.unique(turns.rows, return_index=True)
    starts, stops = columns.starts[rows], turns.starts[first]
    places = starts[stops > starts]
    if not vocabulary.names_system or not len(places):
        return {}
    ids, meant = columns.ids, [*vocabulary.control_ids, vocabulary.pad_id or 0]
    stops = stops[stops > starts]
    is_meant = np.isin(ids[places], meant) & np.isin(ids[stops - 1], meant)
    return {"a row begins within a text": places[~is_meant]}


@check("warning", "role_ids", of_rollouts="note", of_most="note")
def thinking_not_closed(columns: AuditColumns) -> Found | None:
    """Find turns that begin with an opening tag without its closing tag, or the reverse."""
    found = [_thinking_with_one_tag(columns, tag) for tag in THINKING_TAGS]
    unclosed, unopened = (np.concatenate(places) for places in zip(*found, strict=True))
    return columns.found_by(
        {"it is not closed": unclosed, "it is not opened": unopened},
        "ROWS train thinking with one of its two tags: WHAT, so a model learns to think without an "
        "end, or an answer is taken for thinking; give both tags",
    )


def _thinking_with_one_tag(columns: AuditColumns, tag: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the first tokens of turns with only the opening tag, and with only the closing one."""
    turns = columns.turns
    tags = (columns.vocabulary.ids_of_tag(side + tag) for side in ("<", "</"))
    opens, closes = (columns.places_of(*ids) for ids in tags)
    if not len(opens) and not len(closes):
        return opens, closes
    numbers = np.arange(len(turns.starts))
    has_open, has_close = (np.isin(numbers, turns.holding(places)) for places in (opens, closes))
    is_trained = columns.num_trained_in(turns.begins, turns.text_stops) > 0
    is_trained &= turns.are_answers & (not columns.are_classes)
    is_open = is_trained & has_open & ~has_close
    first = np.append(opens, 0)[np.searchsorted(opens, turns.begins)]
    columns.keep(is_open, lambda i: turns.is_markup(turns.begins[i], first[i]))
    is_late = is_trained & has_close & ~has_open
    if is_late.sum() > MOST * (is_trained & has_close).sum():
        last = np.append(closes, 0)[np.searchsorted(closes, turns.begins)]

        def ends_line(i: int) -> bool:  # else a text may be about the tag
            return columns.text(last[i], last[i] + 8).partition(f"</{tag}>")[2].startswith("\n")

        columns.keep(is_late, ends_line)
    is_late &= columns.share_of(turns.rows[is_late]) <= FEW
    return turns.begins[is_open], turns.begins[is_late]


@check("warning", "role_ids")
def broken_tool_call(columns: AuditColumns) -> Found | None:
    """Find trained calls between the template's tags that are not JSON, where most are."""
    vocabulary, turns = columns.vocabulary, columns.turns
    if vocabulary.call_tags is None:
        return None
    tag, close = vocabulary.call_tags
    places = columns.places_of(*vocabulary.ids_of_tag(tag[:-1]))
    turn = turns.holding(places)
    is_trained = (
        (turn >= 0) & turns.are_answers[turn] & (turns.ends[turn] >= 0) & columns.trained[places]
    )
    places, turn = places[is_trained], turn[is_trained]
    following = np.append(places[1:], len(columns.ids))
    stops = np.minimum(following, turns.ends[turn])
    spans = [columns.ids[slice(*ends)].tolist() for ends in zip(places, stops, strict=True)]
    calls = [text.partition(tag)[2].strip() for text in vocabulary.texts(spans)]
    is_call = [call[:1] in ("{", "[") or "call" in tag.lower() for call in calls]
    known = {call: _is_json(call, close) for call in set(calls)}
    broken = [i for i, call in enumerate(calls) if is_call[i] and not known[call]]
    if not broken or len(broken) > MOST * sum(is_call):
        return None
    return columns.found_at(
        places[broken],
        f"ROWS train a tool call that cannot be read as JSON, such as {calls[broken[0]][:60]!r}; "
        "drop them, or correct the call",
        width=40,
    )


def _is_json(written: str, close: str) -> bool:
    """Whether a call is a JSON value and the closing tag."""
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(written)
    except (ValueError, RecursionError):
        return False
    return written[end:].lstrip().startswith(close)


@check("warning", "tokenizer", of_rollouts="note", targets=EVERY)
def text_garbled(columns: AuditColumns) -> Found | None:
    """Find tokens that decode to U+FFFD, and rows that their own text is not tokenized to."""
    if int(columns.ids.max()) >= _LARGEST_ID:
        return None
    found = {
        "they are shown as U+FFFD": _replaced(columns),
        "their text has other tokens": _foreign(columns),
    }
    rows = columns.rows_of(np.concatenate(list(found.values())))
    if len(np.unique(rows)) > FEW * len(columns.lengths):
        return None
    return columns.found_by(
        found,
        "ROWS have tokens that are not text of this tokenizer (WHAT); use the tokenizer that made "
        "the ids, and correct texts that were cut within a character or read in a wrong encoding",
    )


def _replaced(columns: AuditColumns) -> np.ndarray:
    """Return tokens inside rows that do not make a whole character with their neighbours."""
    vocabulary = columns.vocabulary
    if np.isin(columns.ids[:_SAMPLED], vocabulary.partial_ids).mean() > _MANY_PARTIAL:
        return _NONE
    odd = columns.places_of_ids(vocabulary.partial_ids.tolist())
    if not len(odd):
        return odd
    breaks = np.flatnonzero((np.diff(odd) > 1) | columns.begins_row(odd[1:])) + 1
    firsts, lasts = odd[np.append(0, breaks)], odd[np.append(breaks - 1, -1)] + 1
    which = np.flatnonzero(~np.isin(lasts, columns.ends))  # a row may be cut within a character
    found = [i for i in which.tolist() if _REPLACEMENT in columns.text(firsts[i], lasts[i])]
    return firsts[found]


@check("warning", "tokenizer", of_rollouts="note", targets=EVERY)
def text_misread(columns: AuditColumns) -> Found | None:
    """Find rows with UTF-8 that was read as Latin-1 or Windows-1252."""
    places = columns.places_of_ids(columns.vocabulary.ids_with(f"[\xc2-\xf4{_REPLACEMENT}]"))
    counts = np.bincount(columns.rows_of(places), minlength=len(columns.lengths))
    rows = np.argsort(-counts / columns.lengths, kind="stable")[:_MOST_READ]
    rows = np.sort(rows[counts[rows] > 0]).tolist()
    found = [i for i in rows if _MISREAD.search(columns.text(*columns.offsets[i : i + 2]))]
    return columns.found_at(
        columns.starts[found],
        "ROWS have UTF-8 that was read in another encoding (such as \xc3\xa9 for \xe9); read their "
        "files again with encoding='utf-8'",
    )


def _foreign(columns: AuditColumns) -> np.ndarray:
    """Return the first token of rows with rare tokens that their own text is not tokenized to."""
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
