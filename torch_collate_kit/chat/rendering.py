"""One rendering of a conversation, in which the origin of every character is known."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch_collate_kit._checks import computed_once
from torch_collate_kit.chat.locating import MarkedPart, Occurrence, has_marks, locate_parts
from torch_collate_kit.chat.record_forms import lost_part, num_images, other_parts
from torch_collate_kit.chat.records import Conversation
from torch_collate_kit.chat.template import (
    FORMS,
    ChatTemplate,
    Messages,
    Refusal,
    Spans,
    Style,
    changed_arguments,
    decoded_arguments,
)

_PRINTED_PART = re.compile(r"""['"](?:text|type|thinking)['"]: ['"]?$""")
_WRITTEN_KINDS = frozenset({"content", "thinking"})
_AS_LIST = "the chat template prints messages[{}] content as a list"
_CHANGE_TEMPLATE = "set a tokenizer.chat_template that writes it, or remove it from the record"

_FUNCTION = {"name": "f", "arguments": '{"k": "v"}'}
_CALL = {"type": "function", "id": "abcdefghi", "function": _FUNCTION}
_ASKED = {"role": "user", "content": "Q"}
_ANSWER = {"role": "assistant", "content": "A"}
_PROBES: list[Messages] = [
    [_ASKED, {"role": "assistant", "content": None, "tool_calls": [_CALL]}],
    [_ASKED, _ANSWER],
]
_THINKING_PROBE: Messages = [_ASKED, {**_ANSWER, "thinking": "T", "reasoning_content": "T"}]


@dataclass
class Rendering:
    """The text of a conversation, in one style, and where its parts are."""

    template: ChatTemplate
    conversation: Conversation
    messages: Messages
    style: Style
    text: str
    tagged: Spans | None
    parts: list[MarkedPart]
    occurrences: list[Occurrence]
    known_turns: dict[Any, Any]
    """Places of turns, filled by the texts that differ from this one in nothing but their parts."""
    is_composed: bool = False

    def move_last_turn(self, start: int, prompt: str) -> None:
        """Replace the text before ``start`` by ``prompt``."""
        shift = len(prompt) - start
        self.text = prompt + self.text[start:]
        self.occurrences = [
            Occurrence(part, first + shift, last + shift) for part, first, last in self.occurrences
        ]
        if self.tagged is not None:
            self.tagged = [(first + shift, last + shift) for first, last in self.tagged]
        self.is_composed = True

    def render(
        self,
        count: int,
        *,
        prompt: bool = False,
        switch: Mapping[str, Any] | None = None,
        then: Messages | None = None,
    ) -> str:
        """Return the text of the first ``count`` messages, with the prompt or messages after it."""
        if count == len(self.messages) and not prompt and not then:
            return self.text
        return self.template.render(
            self.messages[:count] + (then or []),
            self.conversation.tools,
            self.conversation.documents,
            prompt=prompt,
            switch=switch,
        )

    @computed_once
    def own(self) -> dict[int, list[int]]:
        """For each message, where in ``occurrences`` its parts stand for the first time."""
        seen: set[int] = set()
        found: dict[int, list[int]] = {}
        for i, (part, _, _) in enumerate(self.occurrences):
            if id(part) not in seen:
                seen.add(id(part))
                found.setdefault(part.message, []).append(i)
        return found

    @computed_once
    def times(self) -> Counter[int]:
        """The number of times each part is in the text, by the id of the part."""
        return Counter(id(occurrence.part) for occurrence in self.occurrences)

    @computed_once
    def missing(self) -> list[MarkedPart]:
        """The parts that are not in the text."""
        return [] if self._in_order else [p for p in self.parts if id(p) not in self.times]

    @computed_once
    def _in_order(self) -> bool:
        """True if the text has every part once, in the order of ``parts``: most do."""
        return [occurrence.part for occurrence in self.occurrences] == self.parts

    def text_of(self, turn: int) -> str:
        """Return the text between other messages that has the turn."""
        start, end = self.region(turn)
        return self.text[start:end]

    def region(self, turn: int) -> tuple[int, int]:
        """Return the end of the message before the turn, and the start of the next after it."""
        own = self.own.get(turn)
        if own is None:
            return 0, len(self.text)
        before, after = own[0], own[-1] + 1
        start = self.occurrences[before - 1].end if before else 0
        more = after < len(self.occurrences)
        return start, self.occurrences[after].start if more else len(self.text)

    def problem(self, turn: int) -> str | None:
        """Return which part of a message is not in the text as the model would write it."""
        found = [f"drops its {part.where}" for part in self.missing if part.message == turn]
        if not self._in_order:
            own = self.own.get(turn, [])
            run = self.occurrences[own[0] : own[-1] + 1] if own else []
            if any(part.message != turn for part, _, _ in run):
                found.append("writes it in pieces")
            for part, _, _ in run:
                if part.kind != "name" and self.times[id(part)] > 1:
                    found.append(f"writes its {part.where} twice")
        for call in self.messages[turn].get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            text = "" if isinstance(arguments, str) else self.text_of(turn)
            if changed := changed_arguments(arguments, text):
                found.append(changed)
        return f"messages[{turn}]: the chat template {found[0]}" if found else None


def render_conversation(
    template: ChatTemplate, conversation: Conversation, trained: list[int]
) -> Rendering:
    """Render the messages up to the last trained turn, in the first style that shows all."""
    refusals: list[Refusal] = []
    for style in _styles(template, conversation, trained[-1] + 1):
        try:
            return _render(template, conversation, trained, style)
        except Refusal as refusal:
            refusals.append(refusal)
    shown = next((refusal for refusal in refusals if refusal.rendered), refusals[0])
    raise _named(shown, conversation.messages[: trained[-1] + 1])


def _named(refusal: Refusal, messages: Messages) -> Refusal:
    """Return the refusal, naming a part other than text if that may be the cause."""
    for i, message in enumerate(messages):
        may_be = not refusal.rendered or f"messages[{i}]" in refusal.reason
        for name, _ in other_parts(message["content"]) if may_be else ():
            if name not in refusal.reason:
                reason = f"messages[{i}] has a {name}, and {refusal.reason}"
                return Refusal(reason, "give it as text, or remove it", rendered=refusal.rendered)
    return refusal


def _styles(template: ChatTemplate, conversation: Conversation, count: int) -> Iterator[Style]:
    """Yield the styles that make a difference, the one that suits the template first."""
    preferred = preferred_style(template, conversation.tools)
    yield preferred
    calls = [message for message in conversation.messages[:count] if "tool_calls" in message]
    differs = {
        "content": True,
        "empty": not all(message["content"] for message in calls),
        "arguments": bool(calls),
        "thinking": any("reasoning_content" in m for m in conversation.messages[:count]),
    }
    for name, forms in FORMS.items():
        for form in forms:
            if differs[name] and form != getattr(preferred, name):
                yield preferred._replace(**{name: form})


def preferred_style(template: ChatTemplate, tools: list[dict[str, Any]] | None) -> Style:
    """Return the style that suits the template, found once with and once without tools."""
    has_tools = tools is not None
    if has_tools not in template.preferred:
        styles = [Style(*forms) for forms in itertools.product(*list(FORMS.values())[:-1])]
        tries = ((probe, style) for probe in _PROBES for style in styles)
        found = next(
            (style for probe, style in tries if _is_whole(template, probe, tools, style)), Style()
        )
        thinking = (found._replace(thinking=form) for form in FORMS["thinking"])
        whole = (style for style in thinking if _is_whole(template, _THINKING_PROBE, tools, style))
        template.preferred[has_tools] = next(whole, found)
    return template.preferred[has_tools]


def _is_whole(template: ChatTemplate, messages: Messages, tools: Any, style: Style) -> bool:
    """Return whether the second message is written whole in this style."""
    try:
        _render(template, Conversation(messages, tools=tools), [1], style)
    except Refusal:
        return False
    return True


def _render(
    template: ChatTemplate, conversation: Conversation, trained: list[int], style: Style
) -> Rendering:
    messages = [style.apply(message) for message in conversation.messages[: trained[-1] + 1]]
    text, tagged = template.render_tagged(messages, conversation.tools, conversation.documents)
    if has_marks(text):
        raise Refusal(
            "a message has one of the private-use characters U+100000 to U+10FFFD",
            "replace or remove it",
        )
    if conversation.placeholder:
        _check_images(text, messages, conversation.placeholder)
    located = locate_parts(template, conversation, messages, text)
    rendering = Rendering(template, conversation, messages, style, text, tagged, *located)
    _check_context(rendering, set(trained))
    _check_parts(rendering)
    for turn in trained:
        if problem := rendering.problem(turn):
            raise Refusal(problem, _CHANGE_TEMPLATE)
    for i, message in enumerate(messages if "None" in text else ()):
        if message.get("content", "") is None and "None" in rendering.text_of(i):
            raise Refusal(f"the chat template prints None as the content of messages[{i}]")
    return rendering


def _check_images(text: str, messages: Messages, placeholder: str) -> None:
    """Refuse a text that has not one placeholder for each image."""
    count, found = num_images(messages), text.count(placeholder)
    if count == found:
        return
    for i, message in enumerate(messages):
        if placeholder in repr(message):
            raise Refusal(
                f"messages[{i}] has the text {placeholder!r}, which stands for an image",
                "remove it, or give strings with <image> markers and a column `images`",
            )
    raise Refusal(
        f"the chat template writes {found} placeholders {placeholder!r} for {count} images",
        "set a chat_template that writes one for each {'type': 'image'} part",
    )


def _check_parts(rendering: Rendering) -> None:
    """Refuse a text that lacks a part other than text, such as the pages of a document."""
    for i, message in enumerate(rendering.messages):
        for name, part in other_parts(message.get("content")):
            text = rendering.text_of(i)
            if lost_part(part, text):
                lost = f"messages[{i}] {name} of the role {message['role']!r}"
                raise Refusal(f"the chat template drops {lost}", _CHANGE_TEMPLATE)
            printed = (repr(part), json.dumps(part, ensure_ascii=False))
            if message["role"] == "assistant" and any(form in text for form in printed):
                raise Refusal(f"{_AS_LIST.format(i)}, with its {name}", "give it as a string")


def _check_context(rendering: Rendering, trained: set[int]) -> None:
    """Refuse a text that lacks a message, tool or document that the answers depend on."""
    for part in rendering.missing:
        role = "" if part.message < 0 else rendering.messages[part.message]["role"]
        may_miss = role == "assistant" and part.kind in ("content", "thinking")
        if part.message not in trained and not may_miss:
            named = f"messages[{part.message}] {part.where} of the role {role!r}"
            where = part.where if part.message < 0 else named
            raise Refusal(f"the chat template drops {where}", _CHANGE_TEMPLATE)
    has_parts = [isinstance(message.get("content"), list) for message in rendering.messages]
    for part, start, end in rendering.occurrences:
        if part.kind in _WRITTEN_KINDS and has_parts[part.message]:
            if _PRINTED_PART.search(rendering.text[max(start - 16, 0) : start]):
                raise Refusal(_AS_LIST.format(part.message), "give the content as a string")
        elif part.kind == "argument":
            around = rendering.text[start - 1 : start] + rendering.text[end : end + 1]
            if around in ("{}", '""') and decoded_arguments(part.core) is not None:
                raise Refusal(
                    f"messages[{part.message}]: the chat template does not write its {part.where} "
                    "as the JSON that they are",
                    "give them as a dict",
                )
    for tool in rendering.conversation.tools or ():
        name = tool.get("function", tool).get("name") if isinstance(tool, Mapping) else None
        if isinstance(name, str) and name not in rendering.text:
            raise Refusal(
                f"the chat template drops the tool {name!r}",
                "remove `tools`, or set a tokenizer.chat_template that writes them",
            )
