"""Data with nothing wrong in it, from which defects are made; self-made, no hub."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.vision.processors import tiny_tokenizer
from torch_collate_kit import audit
from torch_collate_kit.reporting import AuditReport

Example = dict[str, Any]


def serious(data: Any, tokenizer: Any = None, **options: Any) -> dict[str, list[int]]:
    """The rows of each error and warning, of a report or of data to audit."""
    report = data if isinstance(data, AuditReport) else audit(data, tokenizer, **options)
    found = {f.name: f.rows.tolist() for f in report.findings if f.severity != "note"}
    assert report.ok == (not found)
    return found


# ---- rows of words, which can be read by eye
# <pad> 0   <s> 1   <eos> 2   <user> 3   <assistant> 4   <think> 5   </think> 6   w7 ... w39

PAD, BOS, EOS, USER, ASSISTANT = range(5)
_SPECIAL = ("<pad>", "<s>", "<eos>", "<user>", "<assistant>", "<think>", "</think>")
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '> ' + m.content + ' <eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


def word_tokenizer(template: str | None = TEMPLATE, *, pad: str = "<pad>") -> Any:
    """40 words with the ids above."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*_SPECIAL, *(f"w{i}" for i in range(len(_SPECIAL), 40))]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w39"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=pad, bos_token="<s>", eos_token="<eos>"
    )
    tokenizer.add_tokens(list(_SPECIAL), special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def chat(question: list[int], answer: list[int], *, eos: bool = True) -> dict[str, list[int]]:
    """A row of one turn, of which the answer is trained.

    >>> chat([7, 8], [9])
    {'input_ids': [3, 7, 8, 2, 4, 9, 2], 'loss_mask': [0, 0, 0, 0, 0, 1, 1]}
    """
    prompt, target = [USER, *question, EOS, ASSISTANT], [*answer, *([EOS] if eos else [])]
    return {"input_ids": prompt + target, "loss_mask": [0] * len(prompt) + [1] * len(target)}


def rows_like(count: int = 6) -> list[dict[str, list[int]]]:
    """Rows with nothing wrong in them: other questions, other answers."""
    return [chat([7 + i, 8], [20 + i, 9]) for i in range(count)]


def as_labels(example: Example) -> Example:
    """The same example with its target as labels."""
    pairs = zip(example["input_ids"], example["loss_mask"], strict=True)
    others = {key: value for key, value in example.items() if key != "loss_mask"}
    return others | {"labels": [token if kept else -100 for token, kept in pairs]}


# ---- conversations of bytes

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CALLS = (
    "{%- macro body(m) -%}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' + '
    "(c.function.arguments if c.function.arguments is string else c.function.arguments | tojson) "
    "+ '}\n</tool_call>' }}{% endfor %}{%- endmacro -%}"
)


def chat_tokenizer(template: str = CHATML, **settings: Any) -> Any:
    """One token per byte; ``<|im_end|>`` ends a turn and the text.

    >>> tokenizer = chat_tokenizer()
    >>> tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)
    (0, 1, 4, 261)
    """
    tokenizer = tiny_tokenizer([])
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<pad>"
    tokenizer.chat_template = template
    for name, value in settings.items():
        setattr(tokenizer, name, value)
    return tokenizer


def tool_tokenizer() -> Any:
    """The same with a template that writes tool calls as JSON between tags."""
    return chat_tokenizer(_CALLS + CHATML.replace("m.content", "body(m)"))


@dataclass(frozen=True)
class Clean:
    """Conversations of one question and one answer: ``input_ids`` and a full ``loss_mask``."""

    examples: list[Example]
    tokenizer: Any

    @classmethod
    def made(cls, count: int = 40) -> Clean:
        """Sums, of about 90 tokens; every question and every answer is there once."""
        tokenizer = _shared_tokenizer()
        return cls([_sum(tokenizer, i) for i in range(count)], tokenizer)

    def with_template(self, template: str) -> Clean:
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.chat_template = template
        return Clean(self.examples, tokenizer)


_shared_tokenizer = cache(chat_tokenizer)  # which is copied before it is changed


def _sum(tokenizer: Any, i: int) -> Example:
    extra = ", and say how you know" * (i % 5)
    question = f"What is {7 * i} plus {i + 14}{extra}?"
    return single_turn(
        tokenizer, question, f"It is {8 * i + 14}, I think.{' I counted.' * (i % 3)}"
    )


def single_turn(tokenizer: Any, question: str, answer: str) -> Example:
    return encoded(turn("user", question) + turn("assistant", answer), tokenizer)


def masked(tokenizer: Any, parts: Iterable[tuple[str, int]]) -> Example:
    """An example of texts, each with its weight in the loss."""
    ids: list[int] = []
    mask: list[int] = []
    for text, weight in parts:
        found = tokenizer.encode(text, add_special_tokens=False)
        ids += found
        mask += [weight] * len(found)
    return {"input_ids": ids, "loss_mask": mask}


def encoded(text: str, tokenizer: Any) -> Example:
    """The text as an example, whose tokens between double brackets are trained."""
    parts = re.split("[\u27e6\u27e7]", text)
    return masked(tokenizer, [(part, i % 2) for i, part in enumerate(parts) if part])


def turn(role: str, text: str) -> str:
    if role == "assistant":
        return f"<|im_start|>assistant\n\u27e6{text}<|im_end|>\u27e7\n"
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def conversations(count: int) -> list[str]:
    """Texts of what real ones have: a system prompt, more turns, tools, thinking."""
    return [_conversation(i) for i in range(count)]


def _conversation(i: int) -> str:
    turns = [("system", f"Be kind, rule {i}.")] if i % 3 == 1 else []
    for asked in range(1 + (i % 4 == 2) + (i % 8 == 2)):
        thought = f"<think>\nI add {i} to {asked}.\n</think>\n\n" if i % 5 == 2 else ""
        turns.append(("user", f"What is {i} plus {asked}{', my friend' * (i % 3)}?"))
        if i % 4 == 3:
            call = f'{{"name": "add", "arguments": {{"one": {i}, "other": {asked}}}}}'
            turns.append(("assistant", f"Let me see.<tool_call>\n{call}\n</tool_call>"))
            turns.append(("tool", f'{{"sum": {i + asked}}}'))
        turns.append(("assistant", f"{thought}It is {i + asked}{', I think' * (i % 2)}."))
    return "".join(turn(role, text) for role, text in turns)
