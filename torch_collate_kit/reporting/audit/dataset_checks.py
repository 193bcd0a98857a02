"""The dataset as a whole: rows that no collator accepts, images not read, the chat template."""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_collate_kit.chat.preview import CASES
from torch_collate_kit.chat.template import ChatTemplate, num_shared
from torch_collate_kit.errors import DataError
from torch_collate_kit.reporting.audit.check import check
from torch_collate_kit.reporting.audit.columns import AuditColumns
from torch_collate_kit.reporting.audit.findings import Found

_SHOWN = 40
_NONE = np.empty(0, dtype=np.int64)


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


@check("error", of_rows=False)
def placeholders_disagree_with_grids(columns: AuditColumns) -> Found | None:
    """Find rows that a reader refuses with their images, and accepts without them."""
    return _refused(columns, "in ROWS the images and the text do not belong together", True)


@check("error", of_rows=False)
def refused(columns: AuditColumns) -> Found | None:
    """Find rows that the readers refuse."""
    message = "ROWS are refused by every collator, and were not looked at further"
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
    tags = columns.vocabulary.ids_of_tag("<think")
    none_read = not len(columns.lengths)  # all were refused, for this maybe
    for case, messages in (_CASES | _THINKING).items():
        drift = _drift(template, messages)
        if drift:
            # else it concerns other data than this: without answers that another one follows
            concerns = case not in _THINKING or len(columns.places_of(*tags)) > 0
            matters = none_read or (len(rows) > 0 and concerns)
            message = (
                "the chat template writes earlier messages differently once others follow "
                f"({case}; ROWS): an answer is trained in a context that the model never sees; "
                'train the last turn of each conversation (train_on="each" or "last"), or change '
                "the template"
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
