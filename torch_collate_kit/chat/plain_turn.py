"""The text that a chat template writes around a plain answer to a plain question."""

from __future__ import annotations

from typing import Any

from torch_collate_kit._checks import computed_once
from torch_collate_kit.chat.rendering import preferred_style
from torch_collate_kit.chat.template import ChatTemplate, Refusal, num_shared

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

    Texts that the template cannot render are "".
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._tools: list[dict[str, Any]] | None = None
        if "tools" in template.code and not self._text("user", "assistant"):
            self._tools = [ANY_TOOL]

    def _text(self, *roles: str, prompt: bool = False) -> str:
        style = preferred_style(self._template, self._tools)
        messages = [style.apply({"role": role, "content": _TEXTS[role]}) for role in roles]
        try:
            return self._template.render(messages, self._tools, prompt=prompt)
        except Refusal:
            return ""

    @computed_once
    def _asked(self) -> tuple[str, str]:
        """The text of the question, without and with the generation prompt."""
        return self._text("user"), self._text("user", prompt=True)

    @computed_once
    def _answered(self) -> tuple[str, str]:
        """The text before the answer to the question, and after it."""
        before, _, after = self._text("user", "assistant").rpartition(_TEXTS["assistant"])
        return before, after

    def begins_with(self, text: str) -> bool:
        """Return whether the template begins a conversation with a text."""
        return bool(text) and self._text("user", "assistant").startswith(text)

    @computed_once
    def header(self) -> str:
        """The text that the prompt adds to the question; "" if it changes what is before."""
        asked, prompt = self._asked
        return prompt[len(asked) :] if prompt.startswith(asked) else ""

    @computed_once
    def after(self) -> str:
        """The text after the answer, with another question."""
        return self._text("user", "assistant", "user").partition(_TEXTS["assistant"])[2]

    @computed_once
    def has_no_header(self) -> bool:
        """True where the answer follows the text of the question at once."""
        asked, before = self._asked[0], self._answered[0]
        return bool(asked) and before.startswith(asked) and not before[len(asked) :].strip()

    def lacks_header(self, prompt: str) -> bool:
        """Return whether a prompt lacks the header, which only some messages end with.

        Command R7B, for example, writes most of the header with the question: the added token with
        which that text begins the header is looked for.
        """
        asked, end = self._asked[0], self.end
        asked = asked[: num_shared(*self._asked)]
        if not end or end not in asked:
            return False
        begun = self._template.added_token.search(asked.rpartition(end)[2])
        return begun is not None and begun[0] not in prompt.rpartition(end)[2]

    @computed_once
    def openers(self) -> list[str]:
        """The added tokens of the header; without one the last token before the answer."""
        added = self._template.added_token
        return added.findall(self.header) if self.header else added.findall(self._answered[0])[-1:]

    @computed_once
    def end(self) -> str | None:
        """The added token at which generation stops; None if the template does not tell.

        That is EOS, if the template writes it after the answer, or else the last added token before
        the next message or the end of the text. It is EOS where the answer cannot be rendered.
        """
        eos, bos, closing = self._template.eos_token, self._template.bos_token, self._answered[1]
        if not any(self._answered):
            return eos
        shared = num_shared(closing, self.after) if self.after else len(closing)
        tokens = self._template.added_token.finditer(closing)
        written = [token for token in tokens if token[0] == eos or token[0] != bos]
        # Some write other tokens after the last answer: one more (Phi-3), or another (gpt-oss).
        found = [t[0] for t in written if t.end() <= shared] or [t[0] for t in written]
        if eos in found:
            return eos
        while len(found) > 1 and found[-1] in self.openers and shared != len(closing):
            found.pop()  # the next message begins like the prompt that ends every text
        return found[-1] if found and found[-1] not in self.openers else None
