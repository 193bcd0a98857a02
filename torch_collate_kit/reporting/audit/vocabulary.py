"""What checks need to know of a tokenizer: its special tokens, and how its template ends turns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch_collate_kit.chat.plain_turn import plain_turn
from torch_collate_kit.chat.template import ChatTemplate
from torch_collate_kit.errors import DataError

__all__ = ["Vocabulary"]

_QUESTION, _THINKING, _ANSWER = "Who?", "A thought", "An answer"


class Vocabulary:
    """Of a tokenizer, of the tokenizer of a processor, or of None, which has nothing of this.

    Special tokens are ids; None, or an empty tuple, where the tokenizer does not have them.

    Raises:
        TypeError: something that cannot decode.
    """

    def __init__(self, tokenizer: Any = None, template_kwargs: dict[str, Any] | None = None):
        kwargs = dict(template_kwargs or {})
        if hasattr(tokenizer, "image_processor") and hasattr(tokenizer, "tokenizer"):
            own = getattr(tokenizer, "chat_template", None)
            own = own.get("default") if isinstance(own, dict) else own
            kwargs = {"chat_template": own, **kwargs} if own else kwargs
            tokenizer = tokenizer.tokenizer
        if tokenizer is not None and not hasattr(tokenizer, "decode"):
            raise TypeError(
                f"tokenizer must be a tokenizer or a processor, got {type(tokenizer).__name__}; "
                "load it with AutoTokenizer.from_pretrained, or leave it out"
            )
        self.tokenizer = tokenizer
        self.size = len(tokenizer) if hasattr(tokenizer, "__len__") else None
        self.bos_id: int | None = getattr(tokenizer, "bos_token_id", None)
        self.eos_id: int | None = getattr(tokenizer, "eos_token_id", None)
        self.pad_id: int | None = getattr(tokenizer, "pad_token_id", None)
        self.template: ChatTemplate | None = None
        if tokenizer is not None and (
            getattr(tokenizer, "chat_template", None) or kwargs.get("chat_template")
        ):
            self.template = ChatTemplate.of(tokenizer, kwargs, None)

    @cached_property
    def _plain_turn(self) -> tuple[str, str]:
        """What is before an answer, and the added token after it; "" if unknown.

        What begins the next question ends an answer where nothing else does.
        """
        if self.template is None:
            return "", ""
        turn = plain_turn(self.template)
        try:
            end = turn.end or next(iter(self.template.added_token.findall(turn.after)), "")
            return turn.header, end
        except DataError:
            return "", ""

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """EOS, and the token with which the chat template ends an answer."""
        ends = () if self.eos_id is None else (self.eos_id,)
        of_template = self.encode(self._plain_turn[1])
        return tuple(dict.fromkeys((*ends, *of_template))) if len(of_template) == 1 else ends

    @cached_property
    def _header(self) -> str:
        return self._plain_turn[0].partition("<think")[0].strip()

    @cached_property
    def header_ids(self) -> tuple[int, ...]:
        """The generation prompt of the chat template, without the white space around it."""
        return self.encode(self._header)

    @cached_property
    def prompt_ids(self) -> tuple[int, ...]:
        """The generation prompt as it is."""
        return self.encode(self._plain_turn[0])

    @cached_property
    def repeats_header(self) -> bool:
        """Whether the model, too, writes the header: between thinking and answer (gpt-oss)."""
        if self.template is None or not self._header:
            return False
        turn = {"role": "assistant", "content": _ANSWER}
        turn |= dict.fromkeys(("thinking", "reasoning_content"), _THINKING)
        try:
            text, _ = self.template.render([{"role": "user", "content": _QUESTION}, turn])
        except DataError:
            return False
        return self._header in text.partition(_THINKING)[2].partition(_ANSWER)[0]

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a text without special tokens around it; none without a tokenizer."""
        if not text or not callable(self.tokenizer):
            return ()
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids; the ids themselves without a tokenizer, or beyond its vocabulary."""
        is_known = self.size is None or all(0 <= token < self.size for token in ids)
        try:
            if self.tokenizer is not None and is_known:
                return str(self.tokenizer.decode(list(ids)))
        except (IndexError, KeyError, OverflowError, TypeError):  # holes in a vocabulary
            pass
        return " ".join(map(str, ids))
