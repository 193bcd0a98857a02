"""A tokenizer of words, and rows that can be read by eye.

<pad> 0   <s> 1   <eos> 2   <user> 3   <assistant> 4   <think> 5   </think> 6   w7 ... w39
"""

from __future__ import annotations

from typing import Any

__all__ = ["BOS", "EOS", "PAD", "TEMPLATE", "chat", "rows_like", "word_tokenizer"]

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
