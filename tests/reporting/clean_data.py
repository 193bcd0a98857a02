"""Data with nothing wrong in it, from which defects are made; self-made, no hub."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.vision.processors import tiny_tokenizer

__all__ = ["CHATML", "Clean", "chat_tokenizer", "with_target"]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
Example = dict[str, Any]


def chat_tokenizer(template: str = CHATML, *, pad: str = "<pad>") -> Any:
    """One token per byte; ``<|im_end|>`` ends a turn and the text.

    >>> tokenizer = chat_tokenizer()
    >>> tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)
    (0, 1, 4, 261)
    """
    tokenizer = tiny_tokenizer([])
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", pad
    tokenizer.chat_template = template
    return tokenizer


@dataclass(frozen=True)
class Clean:
    """Conversations of one question and one answer: ``input_ids`` and a full ``loss_mask``."""

    examples: list[Example]
    tokenizer: Any

    @classmethod
    def made(cls, count: int = 40, tokenizer: Any = None) -> Clean:
        """Sums, of about 90 tokens; every question and every answer is there once.

        >>> clean = Clean.made(2)
        >>> trained = [i for i, m in zip(*clean.examples[0].values(), strict=True) if m]
        >>> clean.tokenizer.decode(trained)
        'It is 14, I think.<|im_end|>'
        """
        tokenizer = tokenizer or _shared_tokenizer()
        return cls([conversation(tokenizer, i) for i in range(count)], tokenizer)

    @property
    def header(self) -> list[int]:
        return list(self.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def rows(self, start: int = 3, step: int = 10) -> set[int]:
        """Rows to damage: every tenth one."""
        return set(range(start, len(self.examples), step))

    def all_rows(self) -> set[int]:
        return set(range(len(self.examples)))

    def with_eos_as_pad(self) -> Clean:
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.pad_token = tokenizer.eos_token
        return Clean(self.examples, tokenizer)


@cache
def _shared_tokenizer() -> Any:
    """One for all, which is copied before it is changed."""
    return chat_tokenizer()


def conversation(tokenizer: Any, i: int) -> Example:
    extra = ", and say how you know" * (i % 5)
    question = f"What is {7 * i} plus {i + 14}{extra}?"
    answer = f"It is {8 * i + 14}, I think.{' I counted.' * (i % 3)}"
    return single_turn(tokenizer, question, answer)


def single_turn(tokenizer: Any, question: str, answer: str) -> Example:
    parts = [
        (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", 0),
        (f"{answer}<|im_end|>", 1),
        ("\n", 0),
    ]
    return masked(tokenizer, parts)


def masked(tokenizer: Any, parts: Iterable[tuple[str, int]]) -> Example:
    """An example of texts, each with its weight in the loss."""
    ids: list[int] = []
    mask: list[int] = []
    for text, weight in parts:
        found = tokenizer.encode(text, add_special_tokens=False)
        ids += found
        mask += [weight] * len(found)
    return {"input_ids": ids, "loss_mask": mask}


def with_target(example: Example, form: str) -> Example:
    """The same example with another form of its target.

    >>> with_target({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, "labels")
    {'input_ids': [5, 6, 7], 'labels': [-100, 6, 7]}
    >>> with_target({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, "num_actions")
    {'input_ids': [5, 6, 7], 'loss_mask': [1, 1], 'num_actions': 2}
    """
    others = {key: value for key, value in example.items() if key != "loss_mask"}
    ids, mask = example["input_ids"], example["loss_mask"]
    if form == "labels":
        return others | {"labels": [t if m else -100 for t, m in zip(ids, mask, strict=True)]}
    if form == "num_actions":
        first = mask.index(1) if 1 in mask else len(mask) // 2
        return others | {"loss_mask": mask[first:], "num_actions": len(mask) - first}
    return others | {form: list(mask)}
