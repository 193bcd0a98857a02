"""What a chat template writes around an answer that is only text."""

from __future__ import annotations

import re
from functools import cached_property

from torch_collate_kit.chat.rendering import preferred_style
from torch_collate_kit.chat.template import ChatTemplate, Refusal

__all__ = ["PlainTurn", "plain_turn", "tag_of"]

_TEXTS = {"user": "Q", "assistant": "an answer"}
_OPENING, _CLOSING = {"begin", "start", "open"}, {"end", "close"}


def plain_turn(template: ChatTemplate) -> PlainTurn:
    """The same object for the same template, so that each fact is found out once."""
    if template.plain_turn is None:
        template.plain_turn = PlainTurn(template)
    found: PlainTurn = template.plain_turn
    return found


class PlainTurn:
    """The texts of a template before and after an answer to a question, found out when asked for.

    Raises:
        Refusal: the template cannot render the question or the answer.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template, self._style = template, preferred_style(template, None)

    def _text(self, *roles: str, prompt: bool = False) -> str:
        messages = [{"role": role, "content": _TEXTS[role]} for role in roles]
        styles = [self._style.apply(message) for message in messages]
        return self._template.render(styles, prompt=prompt)[0]

    @cached_property
    def header(self) -> str:
        """What the generation prompt adds after the question; "" if it changes what is before."""
        asked = self._text("user")
        prompt = self._text("user", prompt=True)
        return prompt[len(asked) :] if prompt.startswith(asked) else ""

    @cached_property
    def after(self) -> str:
        """The text after the answer, with another question."""
        return self._text("user", "assistant", "user").partition(_TEXTS["assistant"])[2]

    @cached_property
    def end(self) -> str | None:
        """The first added token after the answer; None if there is none.

        It is the EOS token where the answer cannot be rendered.
        """
        try:
            text, asked = self._text("user", "assistant"), self._text("user")
        except Refusal:
            return self._template.eos_token
        where = text.rfind(_TEXTS["assistant"])
        added = self._template.added_token
        # The first tag of the header is closed by the end of the turn, the others before it.
        inside = added.findall(text, len(asked), where)[1:]
        opened = {name for name, side in map(tag_of, inside) if side == "open"}
        for token in added.findall(text, where):
            name, side = tag_of(token)
            if token == self._template.eos_token or side == "open" or name not in opened:
                return token
        return None


def tag_of(token: str) -> tuple[str, str]:
    """The name of a tag, and whether it opens or closes.

    >>> tag_of("<|tool_call_end|>"), tag_of("</think>"), tag_of("<tool_call|>")
    (('tool_call', 'close'), ('think', 'close'), ('tool_call', 'close'))
    >>> tag_of("<|eot_id|>")
    ('eot_id', 'open')
    """
    words = re.split(r"[_▁ -]+", token.strip("<>[]|\uff5c/").lower())
    side = "open"
    ends_like_gemma = token.endswith("|>") and not token.startswith("<|")
    if token[1:2] == "/" or ends_like_gemma or _CLOSING & set(words):
        side = "close"
    name = "_".join(word for word in words if word not in _OPENING | _CLOSING)
    return name, side if name else "open"
