"""Damage of many kinds in a few of many texts: it is found, in these rows and in no others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.reporting.clean_data import Example, conversations, encoded, serious, tool_tokenizer
from torch_collate_kit import audit

NUM_ROWS = 100
END, HEAD = r"<\|im_end\|>", r"<\|im_start\|>assistant\n"
USER = r"(<\|im_start\|>user\n)([^<]*)<\|im_end\|>"


def _bare(text: str) -> str:
    return re.sub("[\u27e6\u27e7]", "", text)


def _another_template(text: str) -> str:
    text = text.replace("<|im_start|>", "### ").replace("<|im_end|>\n", "\n")
    return text.replace("<|im_end|>", "<eos>")


def _called(call: str) -> Callable[[str], str]:
    return _sub("(?=It is|Let me)", f"<tool_call>\n{call}")


def _sub(pattern: str, by: Any, count: int = 0) -> Callable[[str], str]:
    return lambda text: re.sub(pattern, by, text, count=count, flags=re.DOTALL)


PART, PROMPT, AFTER, WRONG = (
    *("answer_partly_trained", "prompt_trained", "text_after_end_trained", "wrong_end_token"),
)  # fmt: skip
BARE, TEMPLATE, EMPTY, THINK, CALL, GARBLED = (
    *("answer_without_header", "template_not_followed", "empty_answer_trained"),
    *("thinking_not_closed", "broken_tool_call", "text_garbled"),
)  # fmt: skip
HEADER = "generation_prompt_trained"
# By the kind of damage: the names of findings that describe it, and the edit of a text.
TEXTS: dict[str, tuple[str, Callable[[str], str]]] = {
    "first token untrained": (PART, _sub("\u27e6(.)", "\\1\u27e6")),
    "only the end trained": (PART, _sub(f"\u27e6([^\u27e7]*)({END})", "\\1\u27e6\\2")),
    "half of the answer trained": (PART, _sub("\u27e6(.{6})([^\u27e7]*)\u27e7",
     "\u27e6\\1\u27e7\\2")),
    "a hole": (PART, _sub("\u27e6(..)(..)", "\u27e6\\1\u27e7\\2\u27e6")),
    "last words untrained": (PART, _sub(f"(...)({END})\u27e7", "\u27e7\\1\u27e6\\2\u27e7")),
    "end untrained": ("eos_not_trained", _sub(f"({END})\u27e7", "\u27e7\\1")),
    "question trained": (PROMPT, _sub(USER, "\\1\u27e6\\2\u27e7<|im_end|>")),
    "end of the question trained": (PROMPT, _sub(USER, "\\1\\2\u27e6<|im_end|>\u27e7")),
    "first question trained": (PROMPT, _sub(USER, "\\1\u27e6\\2<|im_end|>\u27e7", 1)),
    "role swapped": (PROMPT, lambda t: _sub(USER, "\\1\u27e6\\2<|im_end|>\u27e7")(_bare(t))),
    "from the question on": (f"{PROMPT} {HEADER}", _sub("What.*",
     lambda m: f"\u27e6{_bare(m[0])}\u27e7")),
    "header trained": (HEADER, _sub(f"({HEAD})\u27e6", "\u27e6\\1")),
    "text after the end": (AFTER, _sub("\u27e7", "Thank you.\u27e7")),
    "line break trained": (AFTER, _sub("\u27e7\n", "\n\u27e7")),
    "another EOS after the end": (AFTER, _sub("\u27e7", "<eos>\u27e7")),
    "second end after the line": (AFTER, _sub("\u27e7\n", "\u27e7\n\u27e6<|im_end|>\u27e7")),
    "wrong end": (WRONG, _sub(f"{END}\u27e7", "<eos>\u27e7")),
    "pad as end": (f"{WRONG} pad_trained", _sub(f"{END}\u27e7", "<pad>\u27e7")),
    "end left out before the line": (WRONG, _sub(f"{END}\u27e7\n", "\u27e7\n")),
    "end as text": (WRONG, _sub(f"{END}\u27e7", "< |im_end| >\u27e7")),
    "no header": (BARE, _sub(HEAD, "")),
    "unknown role": (BARE, _sub(HEAD, "<|im_start|>model\n")),
    "header as text": (BARE, _sub(HEAD, "assistant: ")),
    "another template": (BARE, _another_template),
    "no template": (BARE, _sub(r".*user\n([^<]*).*\u27e6([^\u27e7]*)\u27e7\n",
     "\\1\n\u27e6\\2\u27e7")),
    "header twice": (TEMPLATE, _sub(f"({HEAD})", "\\1\\1")),
    "no line after the header": (f"{TEMPLATE} {BARE}", _sub(HEAD, "<|im_start|>assistant")),
    "space after the header": (TEMPLATE, _sub(HEAD, "<|im_start|>assistant ")),
    "question without its end": (TEMPLATE, _sub(f"{END}\n{HEAD}", "\n<|im_start|>assistant\n")),
    "end in a question": (TEMPLATE, _sub("What is", "What <|im_end|>is")),
    "turn in a question": (TEMPLATE, _sub("What is", "What <|im_start|>is")),
    "other control token in a question": (TEMPLATE, _sub("What is", "What <eos> is")),
    "BOS in a question": (f"{TEMPLATE} bos_inside", _sub("What is", "<bos>What is")),
    "BOS before an answer": ("bos_inside", _sub("\u27e6", "<bos>\u27e6")),
    "start cut off": (TEMPLATE, lambda t: t[17:]),
    "empty answer": (EMPTY, _sub(r"\u27e6[^\u27e7]*<\|im", "\u27e6<|im")),
    "last answer empty": (EMPTY, _sub(r"\u27e6[^\u27e6\u27e7]*\u27e7\n$",
     "\u27e6<|im_end|>\u27e7\n")),
    "thinking not closed": (THINK, _sub("\u27e6(<think>[^/]*/think>\n\n)?",
     "\u27e6<think>\nA thought. ")),
    "thinking closed only": (THINK, _sub("\u27e6(<think>[^/]*/think>\n\n)?",
     "\u27e6A thought.\n</think>\n\n")),
    "call without a brace": (CALL, _called('{"name": "add", "arguments": {}\n</tool_call>')),
    "call in Python": (CALL, _called("{'name': 'add', 'arguments': {}}\n</tool_call>")),
    "call not closed": (CALL, _called('{"name": "add", "arguments": {}}\n')),
    "empty thinking": ("empty_thinking_trained", _sub("\u27e6(<think>[^/]*/think>)?",
     "\u27e6<think>\n\n</think>\n\n")),
    "answer cut": ("eos_truncated", _sub("..<[^<]*$", "\u27e7")),
    "replacement characters": (GARBLED, _sub("It is", "It \ufffd is")),
}  # fmt: skip
Edit = Callable[[str, Any], Example]


def _moved(by: int) -> Edit:
    """The mask moved by so many tokens."""

    def edit(text: str, tokenizer: Any) -> Example:
        e, zeros = encoded(text, tokenizer), [0] * abs(by)
        mask = e["loss_mask"]
        return e | {"loss_mask": zeros + mask[:-by] if by > 0 else mask[-by:] + zeros}

    return edit


KINDS: dict[str, tuple[str, Edit]] = {
    name: (names, lambda text, tokenizer, edit=edit: encoded(edit(text), tokenizer))
    for name, (names, edit) in TEXTS.items()
} | {f"mask moved by {by}": ("mask_shifted", _moved(by)) for by in range(-5, 6) if by}
# What may be meant, or has no contrast, where all rows have it: no alarm. Of all else there is one.
SILENT_EVERYWHERE = {
    "first token untrained", "only the end trained", "a hole", "last words untrained",
    "end of the question trained", "text after the end", "line break trained",
    "another EOS after the end", "second end after the line", "no header", "unknown role",
    "header as text", "no template", "header twice", "no line after the header",
    "space after the header",
    "question without its end", "end in a question", "turn in a question",
    "other control token in a question", "BOS in a question", "BOS before an answer",
    "start cut off", "answer cut", "thinking not closed", "thinking closed only",
    "call without a brace", "call in Python", "call not closed", "replacement characters",
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tool_tokenizer()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return conversations(NUM_ROWS)


@pytest.fixture(scope="module")
def clean(texts: list[str], tokenizer: Any) -> list[Example]:
    return [encoded(text, tokenizer) for text in texts]


def test_clean_conversations_stay_silent(clean: list[Example], tokenizer: Any) -> None:
    assert not audit(clean, tokenizer, max_tokens=10_000).findings
    assert len(KINDS) >= 50


@pytest.mark.parametrize("step", [100, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_damaged_rows(
    kind: str, step: int, texts: list[str], clean: list[Example], tokenizer: Any
) -> None:
    names, edit = KINDS[kind]
    rows = set(range(3, NUM_ROWS, step))
    examples = [edit(texts[i], tokenizer) if i in rows else e for i, e in enumerate(clean)]
    assert all(examples[i] != clean[i] for i in rows)
    found = serious(examples, tokenizer)
    assert sorted(rows) in [found.get(name) for name in names.split()], found
    assert set().union(*found.values()) == rows, found
    assert not kind.startswith("mask moved") or found.keys() <= {"mask_shifted", HEADER}


@pytest.mark.parametrize("kind", KINDS)
def test_what_all_rows_do(kind: str, texts: list[str], tokenizer: Any) -> None:
    _, edit = KINDS[kind]
    found = serious([edit(text, tokenizer) for text in texts], tokenizer)
    assert bool(found) != (kind in SILENT_EVERYWHERE), found
    if kind.startswith("mask moved"):
        assert {"mask_shifted"} <= found.keys() <= {"mask_shifted", HEADER}
