"""What checks need to know of a tokenizer: its special tokens, and how its template ends turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_collate_kit.chat.plain_turn import plain_turn
from torch_collate_kit.chat.template import ChatTemplate, chat_template
from torch_collate_kit.errors import DataError

__all__ = ["Vocabulary"]

_QUESTION, _THINKING, _ANSWER = "Who?", "A thought", "An answer"


@dataclass(frozen=True)
class Vocabulary:
    """Special tokens by id; None, or an empty tuple, where the tokenizer does not have them."""

    tokenizer: Any = None
    size: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    template: ChatTemplate | None = None
    end_ids: tuple[int, ...] = ()
    """EOS, and the token with which the chat template ends an answer."""
    header_ids: tuple[int, ...] = ()
    """The generation prompt of the chat template, without the white space around it."""
    prompt_ids: tuple[int, ...] = ()
    """The generation prompt as it is."""
    repeats_header: bool = False
    """Whether the model, too, writes the header: between its thinking and its answer (gpt-oss)."""

    @classmethod
    def of(cls, tokenizer: Any, template_kwargs: dict[str, Any] | None = None) -> Vocabulary:
        """Of a tokenizer, of the tokenizer of a processor, or of None.

        Raises:
            TypeError: something that cannot decode.
        """
        if tokenizer is None:
            return cls()
        kwargs = dict(template_kwargs or {})
        if hasattr(tokenizer, "image_processor") and hasattr(tokenizer, "tokenizer"):
            own = getattr(tokenizer, "chat_template", None)
            own = own.get("default") if isinstance(own, dict) else own
            kwargs = {"chat_template": own, **kwargs} if own else kwargs
            tokenizer = tokenizer.tokenizer
        if not hasattr(tokenizer, "decode"):
            raise TypeError(
                f"tokenizer must be a tokenizer or a processor, got {type(tokenizer).__name__}; "
                "load it with AutoTokenizer.from_pretrained, or leave it out"
            )
        bos, eos, pad = (
            getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")
        )
        size = len(tokenizer) if hasattr(tokenizer, "__len__") else None
        ends = () if eos is None else (eos,)
        template = _template_of(tokenizer, kwargs)
        if template is None:
            return cls(tokenizer, size, bos, eos, pad, end_ids=ends)
        prompt, end = _plain_turn(template)
        end_ids = _encoded(tokenizer, end)
        if len(end_ids) == 1:
            ends = tuple(dict.fromkeys((*ends, *end_ids)))
        header = prompt.partition("<think")[0].strip()
        headers = _encoded(tokenizer, header), _encoded(tokenizer, prompt)
        repeats = _repeats(template, header)
        return cls(tokenizer, size, bos, eos, pad, template, ends, *headers, repeats)

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a text without special tokens around it; none without a tokenizer."""
        return _encoded(self.tokenizer, text)

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids; the ids themselves without a tokenizer, or beyond its vocabulary."""
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        is_known = self.size is None or all(0 <= token < self.size for token in ids)
        try:
            return str(self.tokenizer.decode(list(ids))) if is_known else " ".join(map(str, ids))
        except (IndexError, KeyError, OverflowError, TypeError):  # holes in a vocabulary
            return " ".join(map(str, ids))


def _template_of(tokenizer: Any, kwargs: dict[str, Any]) -> ChatTemplate | None:
    if not getattr(tokenizer, "chat_template", None) and not kwargs.get("chat_template"):
        return None
    return chat_template(tokenizer, kwargs, None)


def _plain_turn(template: ChatTemplate) -> tuple[str, str]:
    """What is before an answer, and the added token after it; "" if unknown.

    What begins the next question ends an answer where nothing else does.
    """
    turn = plain_turn(template)
    try:
        return turn.header, turn.end or next(iter(template.added_token.findall(turn.after)), "")
    except DataError:
        return "", ""


def _repeats(template: ChatTemplate, header: str) -> bool:
    """Whether a turn with thinking has the header of an answer once more, after the thinking."""
    turn = {"role": "assistant", "content": _ANSWER}
    turn |= dict.fromkeys(("thinking", "reasoning_content"), _THINKING)
    try:
        text, _ = template.render([{"role": "user", "content": _QUESTION}, turn])
    except DataError:
        return False
    return header != "" and header in text.partition(_THINKING)[2].partition(_ANSWER)[0]


def _encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    if not text or not callable(tokenizer):
        return ()
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
