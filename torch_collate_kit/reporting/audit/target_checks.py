"""Trained tokens that should not be, and targets that are missing or lost in a cut."""

from __future__ import annotations

import re

import numpy as np

from torch_collate_kit.reporting.audit.check import MOST, check
from torch_collate_kit.reporting.audit.columns import AuditColumns
from torch_collate_kit.reporting.audit.findings import Found, words_of
from torch_collate_kit.reporting.audit.vocabulary import THINKING_TAGS

_EMPTY_THINKING = re.compile(rf"<({'|'.join(THINKING_TAGS)})>\s*</\1>")
_WHITE_SPACE = ("\n\n", "\n", "", " ", "\n\n\n\n")


@check("error", of_rows=False)
def masks_all_zero(columns: AuditColumns) -> Found | None:
    """Find a dataset without a trained token, or chat records of which none has an answer."""
    if columns.trained_places.size:
        return None
    if len(columns.without_answer):
        return _without_answer(
            columns,
            "none of the records, ROWS, has an answer that would be trained, so there is nothing "
            "to learn from; give each a turn of the assistant",
        )
    return columns.found_in(
        columns.num_trained == 0,
        "none of the rows, ROWS, has a trained token, so the loss is 0: the loss target marks "
        "nothing; mark the answers, as tokenize_chat does",
    )


@check("warning")
def no_trained_token(columns: AuditColumns) -> Found | None:
    """Find rows without a trained token, and chat records from which no row could be made."""
    if not columns.trained_places.size:
        return None
    message = (
        "ROWS have no trained token: they take time and teach nothing; drop them, or correct "
        "their loss target"
    )
    if len(columns.without_answer):  # the other records have trained tokens
        return _without_answer(columns, message)
    return columns.found_in(columns.num_trained == 0, message)


def _without_answer(columns: AuditColumns, message: str) -> Found:
    rows = columns.without_answer
    example = f"row {rows[0]}: nothing in the record would be trained"
    return Found(rows, message, example, num_rows=columns.num_read + len(rows))


@check("warning")
def masks_all_one(columns: AuditColumns) -> Found | None:
    """Find rows of which every token is trained though they hold a prompt."""
    is_full = columns.is_fully_trained
    message = (
        "ROWS train every token, though WHY; prompts are trained too: mark the answers alone, as "
        "tokenize_chat does"
    )
    if columns.are_rollouts or not is_full.any():
        return None
    headers = columns.places_of(columns.vocabulary.header_ids)
    rows = columns.rows_of(headers)
    has_header = columns.in_rows(rows)
    headers = headers[(headers > columns.starts[rows]) & is_full[rows]]
    if len(headers):
        why = "the chat template's header before an answer shows that they have a prompt"
        width = len(columns.vocabulary.header_ids)
        return columns.found_at(headers, message.replace("WHY", why), width)
    is_masked = ~is_full & (columns.num_trained > 0) & (columns.lengths > 1)
    others = is_masked.sum()
    if others and has_header[is_masked].mean() > MOST:
        return None  # documents among chats
    is_long = is_full & (columns.lengths > 2)
    if not columns.has_target or not 0 < is_long.sum() < MOST * (others + is_long.sum()):
        return None
    return columns.found_in(
        is_long, message.replace("WHY", "the other rows leave their prompt out")
    )


@check("warning", "header_ids")
def generation_prompt_trained(columns: AuditColumns) -> Found | None:
    """Find rows that train a token of the header, other than white space around it."""
    width = len(columns.vocabulary.header_ids)
    headers = columns.headers_of_turns
    is_trained = columns.num_trained_in(headers, headers + width) > 0
    return columns.found_at(
        headers[is_trained & ~columns.is_fully_trained[columns.rows_of(headers)]],
        "ROWS train the header that the chat template writes before an answer, which the model is "
        "given at inference; begin the target after it",
        width,
    )


@check("warning", "tokenizer")
def empty_thinking_trained(columns: AuditColumns) -> Found | None:
    """Find rows in which the trained part of a turn begins with an empty thinking block."""
    vocabulary, found = columns.vocabulary, []
    blocks = [(tag, f"{tag}>{space}</{tag}") for tag in THINKING_TAGS for space in _WHITE_SPACE]
    patterns = {
        ids
        for tag, block in blocks  # from the name in the first tag to that in the last
        for ids in vocabulary.fewest_ids(f"\n<{block}>\n", block, f"</{tag}")
    }
    for pattern in patterns:
        for place in columns.places_of(pattern).tolist():
            stop = place + len(pattern)
            if columns.trained[place:stop].any():
                text = columns.text(max(place - 2, 0), stop + 2)
                if _EMPTY_THINKING.search(text) and _begins_target(columns, place):
                    found.append((place, len(pattern)))
    places, widths = np.array(sorted(found), dtype=np.int64).reshape(-1, 2).T
    return columns.found_at(
        places,
        "ROWS train an empty thinking block, which teaches the model not to think; leave it out of "
        "the target (with enable_thinking=False many templates put it into the prompt)",
        widths,
    )


def _begins_target(columns: AuditColumns, place: int) -> bool:
    """Whether at most white space is trained before ``place``, in its row and after a header."""
    header = columns.vocabulary.header_ids
    begin = int(columns.starts[columns.rows_of(place)])
    for start in range(place, begin, -1):
        after_header = header and tuple(columns.ids[:start][-len(header) :].tolist()) == header
        if after_header or not columns.trained[start - 1]:
            return True
        if columns.text(start - 1, place).strip() not in ("", "<"):
            return False
    return True


@check("warning", "max_tokens")
def target_truncated(columns: AuditColumns) -> Found | None:
    """Find rows that keep a part of their target and lose the rest when cut."""
    limits, is_lost = _cut_targets(columns)
    num_lost = columns.num_trained_in(limits[is_lost], columns.ends[is_lost]).sum()
    return columns.found_at(
        limits[is_lost],
        f"in ROWS a part of the target is beyond max_tokens={columns.max_tokens}, {num_lost:,} of "
        f'{columns.num_trained[is_lost].sum():,} trained tokens: overflow="truncate" loses them; '
        "raise max_tokens, split the rows, or drop them",
        (columns.last_trained + 1 - limits)[is_lost],
    )


@check("warning", "max_tokens")
def prompt_longer_than_row(columns: AuditColumns) -> Found | None:
    """Find rows that lose their whole target when cut."""
    first, max_tokens = columns.first_trained, columns.max_tokens
    is_lost = first >= columns.starts + (max_tokens or 0)
    return columns.found_at(
        first[is_lost],
        f"in ROWS the prompt alone fills max_tokens={max_tokens}, so a row that is cut there has "
        "no target left; raise max_tokens, or drop them",
        (columns.ends - first)[is_lost],
    )


@check("warning", "eos_id")
def eos_truncated(columns: AuditColumns) -> Found | None:
    """Find rows that were cut before, will be cut, or stop within their answer."""
    has_target, last = columns.num_trained > 0, columns.last_trained
    ends_well = np.isin(columns.ids[last], list(columns.vocabulary.late_end_ids))
    for i in (0, 1, 2):  # white space may follow the end
        ends_well |= columns.is_end[np.maximum(last - i, columns.starts)]
    ends_well &= has_target
    is_cut = columns.num_cut > 0
    is_beyond = ends_well & _cut_targets(columns)[1]
    stops = has_target & ~ends_well & (last == columns.ends - 1)
    stops &= ends_well.sum() >= MOST * has_target.sum()
    where = {
        f"which is beyond max_tokens={columns.max_tokens}": is_beyond,
        "as they stop without EOS": stops & ~is_cut,
        "which was cut off before, as num_cut_tokens says": is_cut,
    }
    # a rollout that stops was stopped by the limit of generation
    is_stopped = columns.are_rollouts and not (is_beyond | is_cut).any()
    return columns.found_at(
        np.where(has_target, last, columns.ends - 1)[is_beyond | stops | is_cut],
        f"ROWS lose the end of their answer, {words_of(where)}, so they teach the model not to "
        "stop; drop them, or raise the limit that cuts them",
        severity="note" if is_stopped else None,
    )


def _cut_targets(columns: AuditColumns) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's first token beyond the limit, and whether a part of its target is there."""
    if columns.max_tokens is None:
        return columns.ends, np.zeros(len(columns.lengths), dtype=np.bool_)
    limits = columns.starts + columns.max_tokens
    return limits, (columns.last_trained >= limits) & (columns.first_trained < limits)
