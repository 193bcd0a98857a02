"""What is trained, and should not be; what is not, or is lost in a cut, and should be."""

from __future__ import annotations

import re

import numpy as np

from torch_collate_kit.ragged import span_indices
from torch_collate_kit.reporting.audit.check import check
from torch_collate_kit.reporting.audit.columns import AuditColumns, Found
from torch_collate_kit.reporting.audit.vocabulary import THINKING_TAGS, Vocabulary

__all__ = ["CHECKS"]

_EMPTY_THINKING = re.compile(rf"<({'|'.join(THINKING_TAGS)})>\s*</\1>")
_WHITE_SPACE = ("\n\n", "\n", "", " ", "\n\n\n\n")
_USUAL = 0.5  # of the rows with a target: if so many end it with EOS, the others should
_MIXED = 0.5  # of the rows; where fewer are fully trained than are not, the rest says it is a slip


@check(
    "warning",
    "{rows} have no trained token: they take time and teach nothing; drop them, or correct "
    "their loss target",
)
def no_trained_token(columns: AuditColumns) -> Found | None:
    """Rows without a trained token, and chat records from which no row could be made.

    The first token of a row does not count, since nothing predicts it. Silent where no row at all
    has one, which :func:`masks_all_zero` says.
    """
    if not columns.trained_places.size:
        return None
    if len(columns.without_answer):  # the other records have trained tokens
        return _without_answer(columns)
    return columns.found_in(columns.num_trained == 0)


@check(
    "error",
    "none of the {things}, {rows}, has {what}",
    of_rows=False,
)
def masks_all_zero(columns: AuditColumns) -> Found | None:
    """That no row of the dataset has a trained token, or no chat record an answer."""
    if columns.trained_places.size:
        return None
    if len(columns.without_answer):
        what = (
            "an answer that would be trained, so there is nothing to learn from; give each a turn "
            "of the assistant"
        )
        return _without_answer(columns, things="records", what=what)
    what = (
        "a trained token, so the loss is 0: the loss target marks nothing; mark the answers, as "
        "tokenize_chat does"
    )
    everything = np.ones(len(columns.lengths), dtype=np.bool_)
    return columns.found_in(everything, things="rows", what=what)


def _without_answer(columns: AuditColumns, **values: str) -> Found:
    """The records that gave no row."""
    rows = columns.without_answer
    example = f"row {rows[0]}: nothing in the record would be trained"
    return Found(rows, example, values=values, num_rows=columns.num_read + len(rows))


@check(
    "warning",
    "{rows} train every token, though {why}; prompts are trained too: mark the answers alone, "
    "as tokenize_chat does",
)
def masks_all_one(columns: AuditColumns) -> Found | None:
    """Rows of which every token is trained though they hold a prompt.

    The evidence is one of two: after its first token the row has the header that the chat template
    writes before an answer; or the rows say what is trained, and most of the others leave a prompt
    out. Silent where all rows are trained as a whole and none looks like a chat (pretraining), of
    documents among chats (rows without that header, where most rows with a mask have it), and of
    rollouts, whose prompts are never trained.
    """
    is_full = columns.is_fully_trained
    if columns.are_rollouts or not is_full.any():
        return None
    headers = columns.headers
    rows = columns.rows_of(headers)
    has_header = np.zeros(len(is_full), dtype=np.bool_)
    has_header[rows] = True
    headers = headers[(headers > columns.starts[rows]) & is_full[rows]]
    if len(headers):
        width = len(columns.vocabulary.header_ids)
        why = "the chat template's header before an answer shows that they have a prompt"
        return columns.found_at(headers, width, why=why)
    is_masked = ~is_full & (columns.num_trained > 0) & (columns.lengths > 1)
    others = is_masked.sum()
    if others and has_header[is_masked].mean() > _MIXED:
        return None
    is_long = is_full & (columns.lengths > 2)
    if not columns.has_target or not 0 < is_long.sum() < _MIXED * (others + is_long.sum()):
        return None
    return columns.found_in(is_long, why="the other rows leave their prompt out")


@check(
    "warning",
    "{rows} train the header that the chat template writes before an answer, which the model "
    "is given at inference; begin the target after it",
    needs=("header",),
)
def generation_prompt_trained(columns: AuditColumns) -> Found | None:
    """Rows that train a token of the header before an answer, such as ``<|im_start|>assistant``.

    White space around the header is not looked at, because it may be part of a token of the answer.
    Silent about rows that are trained as a whole, which :func:`masks_all_one` names.
    """
    width = len(columns.vocabulary.header_ids)
    headers = columns.headers_of_turns
    headers = headers[~columns.is_fully_trained[columns.rows_of(headers)]]
    is_trained = np.zeros(len(headers), dtype=np.bool_)
    for i in range(width):
        is_trained |= columns.trained[headers + i]
    return columns.found_at(headers[is_trained], width)


@check(
    "warning",
    "{rows} train an empty thinking block, which teaches the model not to think; leave it out "
    "of the target (with enable_thinking=False many templates put it into the prompt)",
    needs=("tokenizer",),
)
def empty_thinking_trained(columns: AuditColumns) -> Found | None:
    """Rows that begin what is trained of a turn with a thinking block that has no text in it.

    Candidates are the ids of ``<think></think>`` with usual white space between the tags; each is
    decoded, and must read so. Silent about other tags than think, thinking and reasoning, and about
    a block after a text, which may be about such tags.
    """
    vocabulary = columns.vocabulary
    found: list[tuple[int, int]] = []
    for pattern in _thinking_patterns(vocabulary):
        for place in columns.places_of(pattern).tolist():
            stop = place + len(pattern)
            if columns.trained[place:stop].any():
                text = vocabulary.text(columns.ids[max(place - 2, 0) : stop + 2].tolist())
                if _EMPTY_THINKING.search(text) and _begins_target(columns, place):
                    found.append((place, len(pattern)))
    if not found:
        return None
    found.sort()
    return columns.found_at(np.array([place for place, _ in found]), found[0][1])


def _begins_target(columns: AuditColumns, place: int) -> bool:
    """Whether at most white space is trained before ``place``, in its row and after a header."""
    vocabulary, header = columns.vocabulary, columns.vocabulary.header_ids
    begin = int(columns.starts[columns.rows_of(place)])
    for start in range(place, begin, -1):
        after_header = header and tuple(columns.ids[:start][-len(header) :].tolist()) == header
        if after_header or not columns.trained[start - 1]:
            return True
        if vocabulary.text(columns.ids[start - 1 : place].tolist()).strip() not in ("", "<"):
            return False
    return True


def _thinking_patterns(vocabulary: Vocabulary) -> set[tuple[int, ...]]:
    """The ids of empty blocks, from the name in the first tag to that in the last.

    What surrounds the names may be merged with other text into one token.
    """
    patterns = set()
    for tag in THINKING_TAGS:
        for space in _WHITE_SPACE:
            ids = vocabulary.encode(f"\n<{tag}>{space}</{tag}>\n")
            tails = vocabulary.texts([ids[i:] for i in range(len(ids))])
            heads = vocabulary.texts([ids[:i] for i in range(len(ids) + 1)])
            close = f"</{tag}"
            starts = [
                i
                for i, text in enumerate(tails)
                if tag in text.partition("</")[0] and close in text
            ]
            stops = [i for i, text in enumerate(heads) if close in text]
            if starts and stops:
                patterns.add(ids[starts[-1] : stops[0]])
    return patterns


@check(
    "warning",
    "in {rows} a part of the target is beyond max_tokens={max_tokens}, {lost} of {targets} "
    'trained tokens: overflow="truncate" loses them; raise max_tokens, split the rows, or drop '
    "them",
    needs=("max_tokens",),
)
def target_truncated(columns: AuditColumns) -> Found | None:
    """Rows that keep a part of their target and lose the rest when cut at ``max_tokens``.

    Silent about rows that lose all of it, which :func:`prompt_longer_than_row` names, and about
    rows of which only untrained tokens are cut.
    """
    limits, is_lost = _cut_targets(columns)
    lost = span_indices(limits[is_lost], (columns.ends - limits)[is_lost])
    return columns.found_in(
        is_lost,
        limits,
        columns.last_trained + 1,
        lost=f"{np.count_nonzero(columns.trained[lost]):,}",
        targets=f"{columns.num_trained[is_lost].sum():,}",
        max_tokens=columns.max_tokens,
    )


@check(
    "warning",
    "in {rows} the prompt alone fills max_tokens={max_tokens}, so a row that is cut there has "
    "no target left; raise max_tokens, or drop them",
    needs=("max_tokens",),
)
def prompt_longer_than_row(columns: AuditColumns) -> Found | None:
    """Rows whose first trained token is beyond ``max_tokens``, so that no target is left.

    Silent about rows without a target.
    """
    first, max_tokens = columns.first_trained, columns.max_tokens
    is_lost = first >= columns.starts + (max_tokens or 0)
    return columns.found_in(is_lost, first, columns.ends, max_tokens=max_tokens)


@check(
    "warning",
    "{rows} lose the end of their answer, {where}, so they teach the model not to stop; drop "
    "them, or raise the limit that cuts them",
    needs=("eos",),
)
def eos_truncated(columns: AuditColumns) -> Found | None:
    """Rows whose answer is there but for its EOS.

    Either the column ``num_cut_tokens`` says how many tokens a row has lost; or the last trained
    token is an EOS beyond ``max_tokens``, with a part of the target before it; or the row ends
    within its answer, while at least half of the rows end theirs with EOS,
    after which white space may follow, of a token or two. A rollout that ends without EOS was
    stopped by the limit of generation, which is a note and not a warning. Silent where few rows
    train an EOS at all: that is
    :func:`~torch_collate_kit.reporting.audit.token_checks.eos_never_trained`.
    """
    has_target = columns.num_trained > 0
    ends_well = has_target & _is_near_end(columns, columns.last_trained)
    late_ends = list(columns.vocabulary.late_end_ids)
    ends_well |= has_target & np.isin(columns.ids[columns.last_trained], late_ends)
    is_cut = columns.num_cut > 0
    is_beyond = ends_well & _cut_targets(columns)[1]
    stops = has_target & ~ends_well & (columns.last_trained == columns.ends - 1)
    if ends_well.sum() < _USUAL * has_target.sum():
        stops[:] = False
    where = [f"which is beyond max_tokens={columns.max_tokens}"] * bool(is_beyond.any())
    where += ["as they stop without EOS"] * bool((stops & ~is_cut).any())
    where += ["which was cut off before, as num_cut_tokens says"] * bool(is_cut.any())
    is_stopped = columns.are_rollouts and not (is_beyond | is_cut).any()
    return columns.found_in(
        is_beyond | stops | is_cut,
        np.where(has_target, columns.last_trained, columns.ends - 1),
        severity="note" if is_stopped else None,
        where=" or ".join(where),
    )


def _cut_targets(columns: AuditColumns) -> tuple[np.ndarray, np.ndarray]:
    """The first token of each row beyond ``max_tokens``, and where a part of the target is.

    int64 and bool [N].
    """
    if columns.max_tokens is None:
        return columns.ends, np.zeros(len(columns.lengths), dtype=np.bool_)
    limits = columns.starts + columns.max_tokens
    return limits, (columns.last_trained >= limits) & (columns.first_trained < limits)


def _is_near_end(columns: AuditColumns, places: np.ndarray) -> np.ndarray:
    """bool [N], whether the token of each row, or one of the two before it, ends an answer."""
    found = columns.is_end[places]
    for i in (1, 2):
        found |= columns.is_end[np.maximum(places - i, columns.starts)]
    return found


CHECKS = (
    masks_all_zero,
    no_trained_token,
    masks_all_one,
    generation_prompt_trained,
    empty_thinking_trained,
    target_truncated,
    prompt_longer_than_row,
    eos_truncated,
)
