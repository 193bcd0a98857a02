"""The check decorator, and checks of the dataset as a whole and of its targets."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from torch_collate_kit._checks import plural
from torch_collate_kit.batch.placement import TargetKind
from torch_collate_kit.chat.preview import CASES
from torch_collate_kit.chat.template import ChatTemplate, num_shared
from torch_collate_kit.chat.turns import plain_turn
from torch_collate_kit.errors import DataError
from torch_collate_kit.reporting.audit.columns import AuditColumns
from torch_collate_kit.reporting.audit.findings import Finding, Found, Severity, words_of
from torch_collate_kit.reporting.audit.vocabulary import THINKING_TAGS, Vocabulary

_Run: TypeAlias = Callable[[AuditColumns], Found | None]

EVERY: tuple[TargetKind, ...] = ("next_token", "same_token", None)
FEW, MOST = 1 / 3, 0.5  # of the rows with a target: an exception; what the others do

_NEEDS = {  # attributes of the columns or of their vocabulary, in words
    "max_tokens": "max_tokens=",
    **dict.fromkeys(("labels", "classes", "scores", "logprobs", "uids", "unk_id"), ""),
    "tokenizer": "a tokenizer",
    "size": "a tokenizer with a size",
    "bos_id": "a tokenizer with a BOS token",
    "eos_id": "a tokenizer with an EOS token",
    "pad_id": "a tokenizer with a pad token",
    "header_ids": "a tokenizer whose chat template has a generation prompt",
    "role_ids": "a tokenizer whose chat template begins answers with an added token",
    "template": "a tokenizer with a chat template",
}
_SHOWN = 40
_NONE = np.empty(0, dtype=np.int64)
_EMPTY_THINKING = re.compile(rf"<({'|'.join(THINKING_TAGS)})>\s*</\1>")
_WHITE_SPACE = ("\n\n", "\n", "", " ", "\n\n\n\n")


@dataclass(frozen=True)
class Check:
    """A function that looks for one thing, and the severity of its finding.

    Attributes:
        run: the function; its name is that of the finding.
        severity: of the finding, unless what was found has its own.
        needs: attributes that must have a value for the check to run.
        of_rows: whether it reads rows, and is skipped without any.
        of_rollouts: the severity for rollouts, where it differs.
        of_most: the severity if more than half of the rows have it.
        at_most: the largest share of the rows with a target; above it nothing is reported.
        targets: the kinds of targets that it is for.
    """

    run: _Run
    severity: Severity
    needs: tuple[str, ...] = ()
    of_rows: bool = True
    of_rollouts: Severity | None = None
    of_most: Severity | None = None
    at_most: float = float("inf")
    targets: tuple[TargetKind, ...] = ("next_token",)

    @property
    def name(self) -> str:
        """Name of the finding."""
        return self.run.__name__

    def missing(self, columns: AuditColumns) -> str | None:
        """Return the first unmet need in words; "" if there is nothing to check."""
        if columns.targets not in self.targets:
            others = f"targets={' or '.join(map(repr, self.targets))}"
            return "" if columns.targets == "next_token" else others
        if self.of_rows and not len(columns.lengths):
            return ""
        for need in self.needs:
            owner = columns if hasattr(columns, need) else columns.vocabulary
            value = getattr(owner, need)
            if value is None or (isinstance(value, np.ndarray | tuple | dict) and not len(value)):
                return _NEEDS[need]
        return None

    def finding(self, columns: AuditColumns) -> Finding | None:
        """Run the check."""
        if "role_ids" in self.needs and not len(columns.turns.starts):
            return None
        found = self.run(columns)
        if found is None or found.share > self.at_most:
            return None
        total = columns.num_read if found.num_rows is None else found.num_rows
        rows = f"{len(found.rows):,} of {plural(total, 'row')}"
        message = _printable(found.message.replace("ROWS", rows, 1))
        severity = found.severity or (self.of_rollouts if columns.are_rollouts else None)
        severity = severity or (self.of_most if found.share > MOST else None) or self.severity
        return Finding(self.name, severity, message, found.rows, _printable(found.example))


def check(severity: Severity, *needs: str, **options: Any) -> Callable[[_Run], Check]:
    """Turn a function into the check of its name; the options are fields of :class:`Check`."""
    return lambda run: Check(run, severity, needs, **options)


def _printable(text: str) -> str:
    """Return ``text`` with control characters escaped, so that data cannot steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _talk(*answers: str, system: str = "") -> list[dict[str, Any]]:
    """Return a conversation with a question before each answer."""
    messages = [{"role": "system", "content": system}] if system else []
    for i, answer in enumerate(answers):
        messages += [
            {"role": "user", "content": f"Question {i + 1}?"},
            {"role": "assistant", "content": answer},
        ]
    return messages


_CASES = {
    "three turns": _talk("One.", "Two.", "Three."),
    "three turns after a system message": _talk("One.", "Two.", "Three.", system="Be kind."),
    "a tool call": [*CASES["tool call"], *_talk("Yes.")],
}
_THINKING = {
    "thinking as reasoning_content": CASES["thinking twice"],
    "thinking within the text": _talk(*(f"<think>\nHm.\n</think>\n\n{i}." for i in range(2))),
}


@check("error", of_rows=False, targets=EVERY)
def placeholders_disagree_with_grids(columns: AuditColumns) -> Found | None:
    """Find rows that a reader refuses with their images, and accepts without them."""
    return _refused(columns, "in ROWS the images and the text do not belong together", True)


@check("error", of_rows=False, targets=EVERY)
def refused(columns: AuditColumns) -> Found | None:
    """Find rows that the readers refuse."""
    message = "every collator refuses ROWS, which were not looked at further"
    return _refused(columns, message, False)


def _refused(columns: AuditColumns, message: str, of_images: bool) -> Found | None:
    rows = [row for row in columns.refused if row.of_images == of_images]
    if not rows:
        return None
    numbers, reason = np.array([row.number for row in rows], dtype=np.int64), rows[0].message
    num_rows = len(columns.refused) + columns.num_read
    return Found(numbers, f"{message}: {reason}", reason, num_rows=num_rows)


@check("note", of_rows=False)
def images_not_checked(columns: AuditColumns) -> Found | None:
    """Find images without a processor."""
    message = (
        "there are images, and only a processor says how many tokens they take; pass the "
        "processor in place of the tokenizer"
    )
    return Found(_NONE, message) if columns.has_unread_images else None


@check("error", "max_tokens", targets=EVERY[1:])
def text_longer_than_positions(columns: AuditColumns) -> Found | None:
    """Find texts of more tokens than ``max_tokens``, the positions of a two-way model."""
    return columns.found_in(
        columns.lengths > (columns.max_tokens or 0),
        f"ROWS have more than max_tokens={columns.max_tokens} tokens, so that the model has no "
        "position for the rest, or it is cut; cut them when tokenizing, or split them",
    )


@check("error", "classes", targets=EVERY[1:])
def one_class(columns: AuditColumns) -> Found | None:
    """Find labels that all are the same, from which there is nothing to learn."""
    if len(columns.classes) < 2 or (columns.classes != columns.classes[0]).any():
        return None
    message = f"all {len(columns.classes):,} labels are {columns.classes[0]:g}; read them again"
    return Found(_NONE, message)


@check("warning", "template", of_rows=False)
def template_not_prefix_stable(columns: AuditColumns) -> Found | None:
    """Find an earlier turn, or the prompt before an answer, that the template changes later on."""
    template = columns.vocabulary.template
    assert template is not None
    headers = columns.headers_of_turns
    of_headers = columns.rows_of(headers)
    is_followed = of_headers[:-1] == of_headers[1:]
    is_followed &= columns.num_trained_in(headers[:-1], headers[1:]) > 0
    rows = np.unique(columns.numbers[of_headers[:-1][is_followed]])
    opened = columns.places_of(*columns.vocabulary.ids_of_tag("<think"))
    num_thoughts = len(opened) - len(columns.places_of(*_empty_blocks(columns.vocabulary, "think")))
    none_read = not len(columns.lengths)  # all were refused, for this maybe
    for case, messages in (_CASES | _THINKING).items():
        drift = _drift(template, messages)
        if drift:
            # else it concerns other data than this: without answers that another one follows
            rows = rows if case not in _THINKING or num_thoughts > 0 else _NONE
            matters = none_read or len(rows) > 0
            message = (
                "the chat template writes earlier messages differently once others follow "
                f"({case}{'' if none_read else '; ROWS'}): an answer is trained in a context that "
                "the model never sees; train the last turn of each conversation "
                '(train_on="each" or "last"), or change the template'
            )
            return Found(rows, message, drift, None if matters else "note")
    return None


@check("note", "template", "eos_id", of_rows=False)
def eos_does_not_end_turns(columns: AuditColumns) -> Found | None:
    """Find a template that ends answers with another token than the tokenizer's EOS."""
    vocabulary = columns.vocabulary
    if len(vocabulary.end_ids) < 2:
        return None
    eos, end = (vocabulary.text([token]) for token in vocabulary.end_ids)
    message = (
        f"the chat template ends answers with {end!r}, and the EOS of the tokenizer is {eos!r}; "
        "generation stops only if generation_config.eos_token_id has both"
    )
    return Found(_NONE, message)


def _drift(template: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    """Return how the whole text differs from the text up to a turn; "" if it does not."""
    try:
        whole = template.render(messages)
        for turn in range(1, len(messages)):
            is_asked = messages[turn]["role"] == "assistant"
            switches: list[dict[str, Any]] = [{}, *(template.switches if is_asked else [])]
            texts = [
                template.render(messages[:turn], prompt=is_asked, switch=switch).rstrip()
                for switch in switches
            ]
            if not is_asked and template.eos_token:  # with which every text may end (Phi-3)
                texts = [texts[0].removesuffix(template.eos_token).rstrip()]
            if not any(whole.startswith(text) for text in texts):
                same = num_shared(texts[0], whole)
                shown = max(same - _SHOWN, 0)
                here, there = (
                    f"{text[shown:same]}\u27e6{text[same : same + _SHOWN]}\u27e7"
                    for text in (texts[0], whole)
                )
                return f"the model is asked with {here!r}, and trained with {there!r}"
    except DataError:
        return ""
    return ""


@check("error", of_rows=False, targets=EVERY[:2])
def masks_all_zero(columns: AuditColumns) -> Found | None:
    """Find a dataset without a trained token, or chat records without any answer."""
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


@check("warning", targets=EVERY[:2])
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
    """Find rows that train every token although they hold a prompt."""
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
    found = []
    for pattern in _empty_blocks(columns.vocabulary, *THINKING_TAGS):
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


def _empty_blocks(vocabulary: Vocabulary, *tags: str) -> set[tuple[int, ...]]:
    """Return the ids of empty blocks, from the name in the first tag to that in the last."""
    blocks = [(tag, f"{tag}>{space}</{tag}") for tag in tags for space in _WHITE_SPACE]
    found = (vocabulary.fewest_ids(f"\n<{of}>\n", of, f"</{tag}") for tag, of in blocks)
    return set().union(*found)


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
    stops &= columns.ids[last] != columns.vocabulary.pad_id  # pad_trained
    is_tile = stops & (columns.is_continued > 0)
    stops &= ~is_tile
    template, turns = columns.vocabulary.template, columns.turns
    is_open = stops & columns.in_rows(turns.rows[turns.are_answers])
    is_open &= template is not None and plain_turn(template).writes_no_end
    is_rare = ends_well.sum() >= MOST * (has_target & ~is_tile).sum()
    if not is_rare:  # else eos_never_trained has them
        stops &= ~columns.is_set_aside & (columns.is_end & columns.trained).any()
    where = {
        f"which is beyond max_tokens={columns.max_tokens}": is_beyond,
        "as they stop without EOS": stops & ~is_cut & ~is_open,
        "which was cut off before, as num_cut_tokens says": is_cut,
        f"as the chat template writes none, and tokenize_chat does ({is_open.sum():,})": is_open,
        f"which another window has ({is_tile.sum():,})": is_tile,
    }
    lost = is_beyond | is_cut | is_open
    way_out = f"they teach the model not to stop; {'drop them' if is_rare else 'add it'}, or raise "
    way_out = way_out + "the limit that cuts them" if (lost | stops).any() else "nothing is lost"
    # a rollout that stops was stopped by the limit of generation
    is_stopped = columns.are_rollouts or not (is_rare and stops.any())
    return columns.found_at(
        np.where(has_target, last, columns.ends - 1)[lost | stops | is_tile],
        f"ROWS lose the end of their answer, {words_of(where)}, so {way_out}",
        severity="note" if is_stopped and not lost.any() else None,
    )


def _cut_targets(columns: AuditColumns) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's first token over the limit, and whether its target is cut there."""
    if columns.max_tokens is None:
        return columns.ends, np.zeros(len(columns.lengths), dtype=np.bool_)
    limits = columns.starts + columns.max_tokens
    return limits, (columns.last_trained >= limits) & (columns.first_trained < limits)
