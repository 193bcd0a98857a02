"""Reading a preference record: the forms that people have -> a prompt and its answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from torch_collate_kit.chat.record_forms import text_of
from torch_collate_kit.chat.records import drop_none
from torch_collate_kit.errors import DataError

PAIR = ("chosen", "rejected")
NUMBERS = ("margin", "score_chosen", "score_rejected")
_OF_TEMPLATE = ("system", "tools", "documents", "chat_template_kwargs")
_MOST = float(np.finfo(np.float32).max)
EMPTY_PROMPT = (
    "the prompt is empty, or its tokens merge with those of the answers: nothing predicts their "
    "first token; give a `prompt` that ends in a space or newline, or begin it with the BOS"
)
_OTHER_PROMPTS = ("instruction", "question", "query", "input", "conversations")


class PreferenceRecord(NamedTuple):
    """A prompt with each of its answers, as records that ``tokenize_chat`` reads."""

    sides: dict[str, dict[str, Any]]
    """By the column that the answer is from."""
    values: dict[str, Any]
    """The label (a bool), or those of the margin and scores (floats) that the record has."""


def read_preference(record: Mapping[str, Any]) -> PreferenceRecord:
    """Return the sides of a record, which is not changed. Columns that are None are ignored."""
    given = {name: value for name, value in record.items() if value is not None}
    names = _answer_columns(given)
    prompt, answers = _split(given.get("prompt"), {name: given[name] for name in names}, given)
    others = {name: given[name] for name in _OF_TEMPLATE if name in given}
    if "weight" in record:
        others["weight"] = record["weight"]  # checked with the record
    sides = {k: {**others, "prompt": prompt, "completion": answer} for k, answer in answers.items()}
    if names == PAIR:
        return PreferenceRecord(sides, {n: _number(n, record[n]) for n in NUMBERS if n in record})
    return PreferenceRecord(sides, {"label": _label(given["label"])})


def _answer_columns(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns with answers: two of a pair, or one with a label."""
    sides = [name for name in (*PAIR, "completion") if name in given]
    has_label = "label" in given
    if sides == [*PAIR] and not has_label:
        return PAIR
    if sides == ["completion"] and has_label:
        return ("completion",)
    if len(sides) > 1 and (has_label or len(sides) == 3):
        extra = "label" if has_label else "completion"
        raise DataError(
            f"`{'`, `'.join(sides)}`{' and `label`' if has_label else ''} are given: a pair has "
            f"`chosen` and `rejected` alone, and a `label` is for a `completion`; remove `{extra}`"
        )
    if sides == ["completion"]:
        raise DataError(
            "`completion` has no `label`; give True for a good answer and False for a bad one, or "
            "use tokenize_chat_dataset for SFT"
        )
    if len(sides) == 1:
        other = PAIR[1 - PAIR.index(sides[0])]
        raise DataError(
            f"`{sides[0]}` is given without `{other}`: a pair has two sides; add it, remove the "
            "record, or for KTO give `completion` and `label`"
        )
    raise DataError(
        f"no answers in the columns {sorted(given)}; give `chosen` and `rejected`, or `prompt`, "
        "`completion` and `label` (KTO)"
    )


def _split(
    prompt: Any, sides: dict[str, Any], given: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the prompt and the answers after it, all strings or all lists of messages."""
    kinds = {name: _kind(name, side) for name, side in sides.items()}
    if prompt is not None:
        kinds["prompt"] = _kind("prompt", prompt)
    are_messages = kinds[next(iter(sides))] is list
    of_string = are_messages and kinds.get("prompt") is str
    if len(set(kinds.values()) - ({str} if of_string else set())) > 1:
        raise DataError(
            f"{_listed(kinds)}: give all as strings, or all as lists of messages; only `prompt` "
            "may be a string beside messages"
        )
    for name, side in sides.items():
        if not len(side) or (not are_messages and not side.strip()):
            raise DataError(
                f"`{name}` is empty ({side!r:.40}): there is nothing to prefer; give the answer a "
                "text, or remove the record"
            )
    if prompt is None:
        _check_prompt_is_inside(sides, given)
        count = _num_common(list(sides.values()))
    elif not are_messages:
        count = 0
    elif of_string and all(side[0].get("role") == "assistant" for side in sides.values()):
        prompt, count = [{"role": "user", "content": prompt}], 0
    elif of_string:
        count = _num_common(list(sides.values()))
        _check_is_said(prompt, next(iter(sides.values()))[:count])
    else:  # datasets that repeat the prompt in each side have it once here
        said = [drop_none(message) for message in prompt]
        repeated = all(list(map(drop_none, side[: len(said)])) == said for side in sides.values())
        count = len(said) if repeated else 0
    first = next(iter(sides.values()))
    if prompt is None and not count and not are_messages:
        raise DataError(EMPTY_PROMPT)
    prompt = first[:count] if count or prompt is None else prompt
    return prompt, {name: side[count:] for name, side in sides.items()}


def _kind(name: str, value: Any) -> type:
    if isinstance(value, str):
        return str
    if isinstance(value, (list, tuple)) and all(isinstance(m, Mapping) for m in value):
        return list
    if isinstance(value, (list, tuple)):
        found = next(m for m in value if not isinstance(m, Mapping))
        raise DataError(
            f"`{name}` is a list that holds {found!r:.40}, but its entries are messages with "
            "`role` and `content`; give one answer per column, as text or as messages"
        )
    raise DataError(
        f"`{name}` must be a string or a list of messages, got {value!r:.60} of type "
        f"{type(value).__name__}; convert it, or put a single message into a list"
    )


def _listed(kinds: Mapping[str, type]) -> str:
    words = {True: "a string", False: "a list of messages"}
    return ", ".join(f"`{name}` is {words[kind is str]}" for name, kind in kinds.items())


def _check_prompt_is_inside(sides: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse answers without a prompt: a single one, or beside a column that may be it."""
    others = [name for name in _OTHER_PROMPTS if name in given]
    if len(sides) == 1 or others:
        way_out = f"rename `{others[0]}` to `prompt`" if others else "give one"
        if "conversations" in others:
            way_out += ", as messages with `role` and `content`"
        raise DataError(f"`{'`, `'.join(sides)}` without a `prompt`; {way_out}")


def _num_common(sides: Sequence[Sequence[Any]]) -> int:
    """Return the number of turns, or characters, of the prompt that the sides begin with."""
    common = 0
    for common, (one, *others) in enumerate(zip(*sides, strict=False)):
        if any(one != other and drop_none(one) != drop_none(other) for other in others):
            is_text = isinstance(sides[0], str)
            return common - 1 if is_text and common and sides[0][common - 1] == " " else common
    return common


def _check_is_said(prompt: str, messages: Sequence[Any]) -> None:
    """Check that a prompt beside lists of messages is in the ones before the answers."""
    texts = [text_of(message.get("content")) for message in messages]
    if not any(isinstance(text, str) and prompt.strip() in text for text in texts):
        raise DataError(
            f"`prompt` {prompt!r:.60} is in none of the {len(messages)} messages before the "
            "answers; remove the column if they have all of the prompt, or give it as messages "
            "and only the answers beside it"
        )


def _label(value: Any) -> bool:
    if isinstance(value, (bool, np.bool_, Real)) and value in (0, 1):
        return bool(value)
    raise DataError(
        f"`label` is {value!r:.40}; it is True (or 1) for a good answer and False (or 0) for a bad "
        "one"
    )


def _number(name: str, value: Any) -> float:
    is_number = isinstance(value, Real) and not isinstance(value, (bool, np.bool_))
    if not is_number or not math.isfinite(value) or abs(value) > _MOST:
        raise DataError(
            f"`{name}` is {value!r:.40}, but it must be a finite number; remove the record, or the "
            "column if not all records have one"
        )
    return float(value)
