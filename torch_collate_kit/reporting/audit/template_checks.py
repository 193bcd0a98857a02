"""The chat template itself: whether the text before an answer stays as it was."""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_collate_kit.chat.preview import CASES
from torch_collate_kit.chat.template import ChatTemplate, num_shared
from torch_collate_kit.errors import DataError
from torch_collate_kit.reporting.audit.check import check
from torch_collate_kit.reporting.audit.columns import AuditColumns, Found

_SHOWN = 40


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


@check(
    "warning",
    "the chat template writes earlier messages differently once others follow ({case}; "
    "{rows}): an answer is trained in a context that the model never sees; train the last turn "
    'of each conversation (train_on="each" or "last"), or change the template',
    "template",
    of_rows=False,
)
def template_not_prefix_stable(columns: AuditColumns) -> Found | None:
    """Find an earlier turn, or the prompt before an answer, that the template changes later on.

    It concerns other data than this where no row trains an answer that another one follows, and of
    the conversations with thinking where no row thinks.
    """
    template = columns.vocabulary.template
    assert template is not None
    rows = _rows_with_followed_answers(columns)
    is_followed = len(rows) > 0 or not len(columns.lengths)  # without rows: all were refused
    for case, messages in (_CASES | _THINKING).items():
        drift = _drift(template, messages)
        if drift:
            matters = is_followed and (case not in _THINKING or _has_thinking(columns))
            return Found(rows, drift, {"case": case}, None if matters else "note")
    return None


@check(
    "note",
    "the chat template ends answers with {end}, and the EOS of the tokenizer is {eos}; "
    "generation stops only if generation_config.eos_token_id has both",
    "template",
    "eos",
    of_rows=False,
)
def eos_does_not_end_turns(columns: AuditColumns) -> Found | None:
    """Find a template that ends answers with another token than the tokenizer's EOS."""
    vocabulary = columns.vocabulary
    if len(vocabulary.end_ids) < 2:
        return None
    eos, end = (repr(vocabulary.text([token])) for token in vocabulary.end_ids)
    return Found(np.empty(0, dtype=np.int64), values={"eos": eos, "end": end})


def _rows_with_followed_answers(columns: AuditColumns) -> np.ndarray:
    """Return the numbers of the rows that train an answer before the last one: int64."""
    headers, places = columns.headers_of_turns, columns.trained_places
    rows = columns.rows_of(headers)
    is_followed = rows[:-1] == rows[1:]
    first, following = headers[:-1][is_followed], headers[1:][is_followed]
    num_trained = np.searchsorted(places, following) - np.searchsorted(places, first)
    return np.unique(columns.numbers[rows[:-1][is_followed][num_trained > 0]])


def _has_thinking(columns: AuditColumns) -> bool:
    if not len(columns.lengths):
        return True  # all rows were refused, for this maybe
    patterns = columns.vocabulary.ids_of_tag("<think")
    return any(len(columns.places_of(pattern)) for pattern in patterns)


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
            if not any(whole.startswith(text) for text in texts):
                return _difference(texts[0], whole)
    except DataError:
        return ""
    return ""


def _difference(seen: str, trained: str) -> str:
    """Return both texts from shortly before the place where they part, which is marked."""
    same = num_shared(seen, trained)
    before = seen[max(same - _SHOWN, 0) : same]
    here, there = (f"{before}\u27e6{text[same : same + _SHOWN]}\u27e7" for text in (seen, trained))
    return f"the model is asked with {here!r}, and trained with {there!r}"
