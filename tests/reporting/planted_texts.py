"""Defects as edits of texts in which trained tokens stand between double brackets.

A conversation is one text, so a defect is a line: a pattern, what replaces it, and the finding.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.reporting.clean_data import CHATML, Example, chat_tokenizer, masked

__all__ = ["CALLS", "TEXTS", "conversations", "encoded", "moved", "tool_tokenizer"]

END, HEAD = r"<\|im_end\|>", r"<\|im_start\|>assistant\n"
USER = r"(<\|im_start\|>user\n)([^<]*)<\|im_end\|>"
_CALLS = (
    "{%- macro body(m) -%}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' + '
    "(c.function.arguments if c.function.arguments is string else c.function.arguments | tojson) "
    "+ '}\n</tool_call>' }}{% endfor %}{%- endmacro -%}"
)
CALLS = _CALLS + CHATML.replace("m.content", "body(m)")


def tool_tokenizer() -> Any:
    """One token per byte; the template writes tool calls as JSON between tags."""
    return chat_tokenizer(CALLS)


def conversations(count: int) -> list[str]:
    """Conversations with what real ones have: a system prompt, more turns, tools, thinking.

    >>> conversations(1)[0].count("\u27e6")
    1
    """
    return [_conversation(i) for i in range(count)]


def _turn(role: str, text: str) -> str:
    if role == "assistant":
        return f"<|im_start|>assistant\n\u27e6{text}<|im_end|>\u27e7\n"
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def _conversation(i: int) -> str:
    turns = [("system", f"Be kind, rule {i}.")] if i % 3 == 1 else []
    for turn in range(1 + (i % 4 == 2) + (i % 8 == 2)):
        thought = f"<think>\nI add {i} to {turn}.\n</think>\n\n" if i % 5 == 2 else ""
        turns.append(("user", f"What is {i} plus {turn}{', my friend' * (i % 3)}?"))
        if i % 4 == 3:
            call = f'{{"name": "add", "arguments": {{"one": {i}, "other": {turn}}}}}'
            turns.append(("assistant", f"Let me see.<tool_call>\n{call}\n</tool_call>"))
            turns.append(("tool", f'{{"sum": {i + turn}}}'))
        turns.append(("assistant", f"{thought}It is {i + turn}{', I think' * (i % 2)}."))
    return "".join(_turn(role, text) for role, text in turns)


def encoded(text: str, tokenizer: Any) -> Example:
    """The text as an example, whose marked tokens are trained."""
    parts = re.split("[\u27e6\u27e7]", text)
    return masked(tokenizer, [(part, i % 2) for i, part in enumerate(parts) if part])


def moved(e: Example, by: int) -> Example:
    """The mask moved by so many tokens."""
    mask = e["loss_mask"]
    zeros = [0] * abs(by)
    return e | {"loss_mask": zeros + mask[:-by] if by > 0 else mask[-by:] + zeros}


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
    "five tokens untrained": (PART, _sub("\u27e6(.{5})", "\\1\u27e6")),
    "only the end trained": (PART, _sub(f"\u27e6([^\u27e7]*)({END})", "\\1\u27e6\\2")),
    "only the first trained": (PART, _sub("\u27e6(.)([^\u27e7]*)\u27e7", "\u27e6\\1\u27e7\\2")),
    "half of the answer trained": (PART, _sub("\u27e6(.{6})([^\u27e7]*)\u27e7",
     "\u27e6\\1\u27e7\\2")),
    "a hole": (PART, _sub("\u27e6(..)(..)", "\u27e6\\1\u27e7\\2\u27e6")),
    "many holes": (PART, _sub("\u27e6(.)(.)(.)(.)", "\u27e6\\1\u27e7\\2\u27e6\\3\u27e7\\4\u27e6")),
    "last words untrained": (PART, _sub(f"(...)({END})\u27e7", "\u27e7\\1\u27e6\\2\u27e7")),
    "end untrained": ("eos_not_trained", _sub(f"({END})\u27e7", "\u27e7\\1")),
    "question trained": (PROMPT, _sub(USER, "\\1\u27e6\\2\u27e7<|im_end|>")),
    "question trained with its end": (PROMPT, _sub(USER, "\\1\u27e6\\2<|im_end|>\u27e7")),
    "end of the question trained": (PROMPT, _sub(USER, "\\1\\2\u27e6<|im_end|>\u27e7")),
    "last word of the question trained": (PROMPT, _sub(f"(....)({END}\n{HEAD})",
     "\u27e6\\1\u27e7\\2")),
    "first question trained": (PROMPT, _sub(USER, "\\1\u27e6\\2<|im_end|>\u27e7", 1)),
    "role swapped": (PROMPT, lambda t: _sub(USER, "\\1\u27e6\\2<|im_end|>\u27e7")(_bare(t))),
    "from the question on": (f"{PROMPT} {HEADER}", _sub("What.*",
     lambda m: f"\u27e6{_bare(m[0])}\u27e7")),
    "header trained": (HEADER, _sub(f"({HEAD})\u27e6", "\u27e6\\1")),
    "role name trained": (HEADER, _sub("assistant\n\u27e6", "\u27e6assistant\n")),
    "text after the end": (AFTER, _sub("\u27e7", "Thank you.\u27e7")),
    "end twice": (AFTER, _sub(f"({END})\u27e7", "\\1\\1\u27e7")),
    "end thrice": (AFTER, _sub(f"({END})\u27e7", "\\1\\1\\1\u27e7")),
    "line break trained": (AFTER, _sub("\u27e7\n", "\n\u27e7")),
    "another EOS after the end": (AFTER, _sub("\u27e7", "<eos>\u27e7")),
    "wrong end": (WRONG, _sub(f"{END}\u27e7", "<eos>\u27e7")),
    "pad as end": (f"{WRONG} pad_trained", _sub(f"{END}\u27e7", "<pad>\u27e7")),
    "start as end": (WRONG, _sub(f"{END}\u27e7", "<|im_start|>\u27e7")),
    "wrong end without the line": (WRONG + " eos_truncated", _sub(f"{END}\u27e7\n", "<eos>\u27e7")),
    "end left out before the line": (WRONG, _sub(f"{END}\u27e7\n", "\u27e7\n")),
    "end as text": (WRONG, _sub(f"{END}\u27e7", "< |im_end| >\u27e7")),
    "no header": (BARE, _sub(HEAD, "")),
    "no header in the last turn": (BARE, _sub(f"{HEAD}(?!.*{HEAD})", "")),
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
    "trained BOS before an answer": ("bos_inside", _sub("\u27e6", "\u27e6<bos>")),
    "start cut off": (TEMPLATE, lambda t: t[17:]),
    "question end twice": (TEMPLATE, _sub(USER, "\\1\\2<|im_end|><|im_end|>")),
    "empty answer": (EMPTY, _sub(r"\u27e6[^\u27e7]*<\|im", "\u27e6<|im")),
    "blank answer": (EMPTY, _sub(r"\u27e6[^\u27e7]*<\|im", "\u27e6 \n<|im", 1)),
    "last answer empty": (EMPTY, _sub(r"\u27e6[^\u27e6\u27e7]*\u27e7\n$",
     "\u27e6<|im_end|>\u27e7\n")),
    "thinking not closed": (THINK, _sub("\u27e6(<think>[^/]*/think>\n\n)?",
     "\u27e6<think>\nA thought. ")),
    "thinking closed only": (THINK, _sub("\u27e6(<think>[^/]*/think>\n\n)?",
     "\u27e6A thought.\n</think>\n\n")),
    "call without a brace": (CALL, _called('{"name": "add", "arguments": {}\n</tool_call>')),
    "call with a comma": (CALL, _called('{"name": "add", "arguments": {},}\n</tool_call>')),
    "call in Python": (CALL, _called("{'name': 'add', 'arguments': {}}\n</tool_call>")),
    "call not closed": (CALL, _called('{"name": "add", "arguments": {}}\n')),
    "empty thinking": ("empty_thinking_trained", _sub("\u27e6(<think>[^/]*/think>)?",
     "\u27e6<think>\n\n</think>\n\n")),
    "answer cut": ("eos_truncated", _sub("..<[^<]*$", "\u27e7")),
    "replacement characters": (GARBLED, _sub("It is", "It \ufffd is")),
}  # fmt: skip
