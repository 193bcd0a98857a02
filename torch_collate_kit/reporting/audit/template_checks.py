"""The chat template itself: whether what comes before an answer stays as it was."""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_collate_kit.chat.preview import CASES
from torch_collate_kit.chat.template import ChatTemplate
from torch_collate_kit.errors import DataError
from torch_collate_kit.reporting.audit.columns import AuditColumns, Found
from torch_collate_kit.reporting.audit.findings import Severity

__all__ = ["eos_does_not_end_turns", "template_not_prefix_stable"]

_SEVERAL_TURNS = ("two turns", "system", "tool call", "thinking twice")
_SHOWN = 40


def template_not_prefix_stable(columns: AuditColumns) -> Found | None:
    """That the template changes an earlier turn, or the prompt before an answer, later on.

    Needs a chat template. Small conversations of two turns, with a system message, with a tool call
    and with thinking, are rendered as a whole and up to each answer: each must begin with what it
    was asked with. One that the template cannot render is passed over; so is the one with thinking
    if the data has none. It is a note where no row has two answers, because then nothing follows an
    answer.
    """
    template = columns.vocabulary.template
    assert template is not None
    for case in _SEVERAL_TURNS:
        if case == "thinking twice" and not _has_thinking(columns):
            continue
        drift = _drift(template, CASES[case])
        if drift:
            rows = _rows_of_several_turns(columns)
            is_followed = len(rows) > 0 or not len(columns.lengths)  # none: all were refused
            severity: Severity | None = None if is_followed else "note"
            values = {"case": f'a conversation ("{case}")'}
            return Found(rows, None, severity, values, drift)
    return None


def eos_does_not_end_turns(columns: AuditColumns) -> Found | None:
    """That the template ends an answer with another token than the tokenizer's EOS.

    Needs a tokenizer with an EOS and a chat template that writes a token after an answer.
    """
    vocabulary = columns.vocabulary
    if len(vocabulary.end_ids) < 2:
        return None
    eos, end = (repr(vocabulary.text([token])) for token in vocabulary.end_ids)
    nothing = np.empty(0, dtype=np.int64)
    return Found(nothing, values={"eos": eos, "end": end}, example="")


def _rows_of_several_turns(columns: AuditColumns) -> np.ndarray:
    """int64, rows with the header of an answer twice."""
    counts = np.bincount(columns.rows_of(columns.headers), minlength=len(columns.lengths))
    return np.flatnonzero(counts > 1)


def _has_thinking(columns: AuditColumns) -> bool:
    ids = columns.vocabulary.encode("<think>")
    return bool(len(ids) == 1 and (columns.ids == ids[0]).any())


def _drift(template: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    """Where the text up to a turn is not the beginning of the whole text; "" if it always is."""
    try:
        [whole], _ = template.render([messages])
        for turn in range(1, len(messages)):
            is_asked = messages[turn]["role"] == "assistant"
            switches: list[dict[str, Any]] = [{}, *(template.switches if is_asked else [])]
            before = [messages[:turn]]
            texts = [
                template.render(before, prompt=is_asked, switch=switch)[0][0].rstrip()
                for switch in switches
            ]
            if not any(whole.startswith(text) for text in texts):
                return _difference(texts[0], whole)
    except DataError:
        return ""
    return ""


def _difference(seen: str, trained: str) -> str:
    """Both texts from shortly before the place where they part, which is marked."""
    pairs = zip(seen, trained, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(seen), len(trained)))
    before = seen[max(same - _SHOWN, 0) : same]
    here, there = (f"{before}\u27e6{text[same : same + _SHOWN]}\u27e7" for text in (seen, trained))
    return f"the model is asked with {here!r}, and trained with {there!r}"
