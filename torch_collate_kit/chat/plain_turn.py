"""The text that a chat template writes around a plain answer to a plain question."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch_collate_kit.chat.rendering import preferred_style
from torch_collate_kit.chat.template import ChatTemplate, Refusal, shared_prefix

__all__ = ["ANY_TOOL", "PlainTurn", "plain_turn"]

# For templates that render nothing without tools.
ANY_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object"}},
}

_TEXTS = {"user": "Q", "assistant": "an answer"}


def plain_turn(template: ChatTemplate) -> PlainTurn:
    """Return the same object for the same template, so that each fact is found out once."""
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
        self._template = template
        self._tools: list[dict[str, Any]] | None = None
        self._style = preferred_style(template, None)
        try:
            self._text("user", "assistant")
        except Refusal:
            if "tools" in template.code:
                self._tools = [ANY_TOOL]
                self._style = preferred_style(template, self._tools)

    def _text(self, *roles: str, prompt: bool = False) -> str:
        messages = [{"role": role, "content": _TEXTS[role]} for role in roles]
        styles = [self._style.apply(message) for message in messages]
        return self._template.render(styles, self._tools, prompt=prompt)

    @cached_property
    def _asked(self) -> tuple[str, str]:
        """The text of the question, without and with the generation prompt."""
        return self._text("user"), self._text("user", prompt=True)

    @cached_property
    def _answered(self) -> tuple[str, str]:
        """The text before the answer to the question, and after it."""
        before, _, after = self._text("user", "assistant").rpartition(_TEXTS["assistant"])
        return before, after

    @cached_property
    def header(self) -> str:
        """The text that the prompt adds to the question; "" if it changes what is before."""
        asked, prompt = self._asked
        return prompt[len(asked) :] if prompt.startswith(asked) else ""

    @cached_property
    def after(self) -> str:
        """The text after the answer, with another question."""
        return self._text("user", "assistant", "user").partition(_TEXTS["assistant"])[2]

    @cached_property
    def has_no_header(self) -> bool:
        """True where the answer follows the text of the question at once."""
        try:
            asked, before = self._asked[0], self._answered[0]
        except Refusal:
            return False
        return before.startswith(asked) and not before[len(asked) :].strip()

    @cached_property
    def _lead(self) -> str:
        """The added token with which the text of the question begins the header; "" if it does not.

        Command R7B, for example, writes most of the header with the question.
        """
        try:
            asked = shared_prefix(*self._asked)
        except Refusal:
            return ""
        if not self.end or self.end not in asked:
            return ""
        begun = self._template.added_token.search(asked.rpartition(self.end)[2])
        return begun[0] if begun else ""

    def lacks_header(self, prompt: str) -> bool:
        """Return whether a prompt lacks the header, which only some messages end with."""
        return bool(self._lead) and self._lead not in prompt.rpartition(self.end or "")[2]

    @cached_property
    def openers(self) -> list[str]:
        """The added tokens of the header; without one the last token before the answer."""
        added = self._template.added_token
        try:
            header, (before, _) = self.header, self._answered
        except Refusal:
            return []
        return added.findall(header) if header else added.findall(before)[-1:]

    @cached_property
    def end(self) -> str | None:
        """The added token at which generation stops; None if the template does not tell.

        That is EOS, if the template writes it after the answer, or else the last added token before
        the next message or the end of the text. It is EOS where the answer cannot be rendered.
        """
        eos, bos = self._template.eos_token, self._template.bos_token
        try:
            closing = self._answered[1]
        except Refusal:
            return eos
        try:
            shared = shared_prefix(closing, self.after)
        except Refusal:
            shared = closing
        tokens = self._template.added_token.finditer(closing)
        written = [token for token in tokens if token[0] == eos or token[0] != bos]
        # Some write other tokens after the last answer: one more (Phi-3), or another (gpt-oss).
        found = [t[0] for t in written if t.end() <= len(shared)] or [t[0] for t in written]
        if eos in found:
            return eos
        while len(found) > 1 and found[-1] in self.openers and shared != closing:
            found.pop()  # the next message begins like the prompt that ends every text
        return found[-1] if found and found[-1] not in self.openers else None
