"""Where each character of a rendered chat came from.

A conversation is rendered twice: as it is, and with every text of every message replaced,
character by character, by a private-use character that stands for this text alone. The two results
have the same length and agree wherever the template writes. So each character is known to come from
one text of one message, or from the template; and a text that did not arrive is known, too.

Not replaced is what templates look at: white space and control characters (``trim``), quotes and
backslashes (``tojson``), and what looks like a tag in the template's source (``</think>``).

What a template writes between two texts is learned from a marked rendering. Where a later text is
exactly what this lets expect, texts of messages and of the template in turn, no marks are needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch_collate_kit.chat.content_parts import IMAGE_TYPES, other_parts, text_of
from torch_collate_kit.chat.records import Conversation
from torch_collate_kit.chat.template import REASONING, ChatTemplate, Messages, Refusal, Style

__all__ = ["Occurrence", "Part", "has_marks", "locate_parts", "shape_of"]

_MAX_KNOWN_TEXTS = 10_000
_FIRST_MARK, _LAST_MARK = 0x100000, 0x10FFFD  # the last plane of private-use characters
_MARKS = re.compile("[\U00100000-\U0010fffd]")
_KEPT = r"\s\x00-\x1f\x7f\"\\"
# Begins and ends with a replaced character; blanks between are replaced, too.
_RUN = re.compile(rf"[^{_KEPT}](?:[^\x00-\x1f\x7f\"\\]*[^{_KEPT}])?")
_EDGE = "".join(filter(re.compile(f"[{_KEPT}]").match, map(chr, range(0x3001))))
_SOLID = re.compile(r"\S(?:[^\n]*\S)?")  # for a text of quotes, backslashes or tags alone
_THINK_END = "</think>"


class Part(NamedTuple):
    """One text of one message, from its first to its last replaced character.

    ``before`` and ``after`` are the characters around them that are not replaced and no white
    space. ``kind`` is "content", "part", "thinking", "name", "argument" or "document".
    """

    message: int
    kind: str
    where: str
    core: str
    marked: str
    before: str = ""
    after: str = ""


class Occurrence(NamedTuple):
    """A place of a part in the rendered text."""

    part: Part
    start: int
    end: int


def has_marks(text: str) -> bool:
    """Whether a text has one of the private-use characters, so that it cannot be marked."""
    return not text.isascii() and _MARKS.search(text) is not None


def locate_parts(
    template: ChatTemplate, conversation: Conversation, messages: Messages, style: Style, text: str
) -> tuple[list[Part], list[Occurrence]]:
    """The parts of ``messages``, in the form of ``style``, and their places in ``text``.

    Raises:
        Refusal: the text cannot be told apart from the template's.
    """
    if conversation.documents is not None:
        return _by_marks(template, conversation, messages, text)
    if template.known_texts:
        marker = _Marker(template.tags, makes_copy=False)
        for i, message in enumerate(messages):
            marker.message(message, i)
        written = _as_written(marker.parts)
        keys = _keys(conversation, messages, style, written)
        known = [template.known_texts.get(key) for key in keys]
        found = _locate_after(text, written, known)
        if found is not None:
            return written, found
    parts, occurrences = _by_marks(template, conversation, messages, text)
    written = _as_written(parts)
    _learn(template, _keys(conversation, messages, style, written), text, written, occurrences)
    return parts, occurrences


def _as_written(parts: list[Part]) -> list[Part]:
    """The parts with the thinking of a message before its text, as most templates write it."""
    return sorted(parts, key=lambda part: (part.message, part.where != "reasoning_content"))


def _by_marks(
    template: ChatTemplate, conversation: Conversation, messages: Messages, text: str
) -> tuple[list[Part], list[Occurrence]]:
    """The same by a rendering of the marked copy."""
    marker = _Marker(template.tags)
    marked = [marker.message(message, i) for i, message in enumerate(messages)]
    documents = conversation.documents
    if documents is not None:
        documents = marker.copy(documents, -1, "documents", "document")
    copy, _ = template.render(marked, conversation.tools, documents)
    return marker.parts, _locate(text, copy, marker.parts)


def _learn(
    template: ChatTemplate,
    keys: Iterator[Any],
    text: str,
    parts: list[Part],
    occurrences: list[Occurrence],
) -> None:
    """Keep what the template writes between the parts, if it writes each once and in order."""
    if [id(occurrence.part) for occurrence in occurrences] != [id(part) for part in parts]:
        return
    if len(template.known_texts) > _MAX_KNOWN_TEXTS:
        template.known_texts.clear()
    end = 0
    for occurrence, key in zip(occurrences, keys, strict=False):  # the last key is the end's
        template.known_texts[key] = text[end : occurrence.start]
        end = occurrence.end
    template.known_texts[next(keys)] = text[end:]


def _keys(
    conversation: Conversation, messages: Messages, style: Style, parts: list[Part]
) -> Iterator[Any]:
    """For each part, and the end, what the template's text before it probably depends on.

    Whether it does is seen in every text, so a key that is too simple costs time and no more.
    """
    shapes = [shape_of(message) for message in messages]
    last_user = max((i for i, shape in enumerate(shapes) if shape[0] == "user"), default=-1)
    where, message = repr(conversation.tools), -1
    around: Any = None
    for part in parts:
        if part.message != message:
            between = tuple(shapes[max(message, 0) : part.message + 1])
            message = part.message
            is_last = message + 1 == len(messages)
            around = style, conversation.tools is None, between, message > last_user, is_last
        yield around, where, part.where
        where = part.where
    yield around, where, tuple(shapes[max(message, 0) :])


def shape_of(message: dict[str, Any]) -> tuple[Any, ...]:
    """What of a message decides what a template writes around its texts."""
    return (
        message["role"],
        bool(message.get("content")),
        bool(message.get("reasoning_content")),
        len(message.get("tool_calls", ())),
        _part_types(message.get("content")),
    )


def _part_types(content: Any) -> tuple[Any, ...]:
    """The types of the parts, if they are not all text."""
    if not isinstance(content, list) or isinstance(text_of(content), str):
        return ()
    return tuple(part.get("type") if isinstance(part, Mapping) else None for part in content)


class _Marker:
    """Makes the marked copy of a conversation for one template, or only lists its ``parts``."""

    def __init__(self, tags: re.Pattern[str], *, makes_copy: bool = True) -> None:
        self._tags, self._makes_copy = tags, makes_copy
        self.parts: list[Part] = []

    def copy(self, value: Any, message: int, where: str, kind: str) -> Any:
        """``value`` with every string in it replaced; keys of mappings are kept."""
        if isinstance(value, str):
            return self._text(value, message, where, kind)
        if isinstance(value, Mapping):
            return {k: self.copy(v, message, f"{where}[{k!r}]", kind) for k, v in value.items()}
        if isinstance(value, list):
            return [self.copy(v, message, f"{where}[{i}]", kind) for i, v in enumerate(value)]
        return value

    def message(self, message: Mapping[str, Any], index: int) -> dict[str, Any]:
        """The marked copy of a message."""
        marked = dict(message)
        content = message.get("content")
        if isinstance(content, str):
            marked["content"] = self._content(content, message["role"], index)
        elif isinstance(content, list):
            others = {id(part): name for name, part in other_parts(content)}
            marked["content"] = [
                self._other_part(part, index, others[id(part)])
                if id(part) in others
                else self._part(part, message["role"], index)
                for part in content
            ]
        done: dict[str, str] = {}
        for key in REASONING:
            if isinstance(text := message.get(key), str):
                if text not in done:
                    done[text] = self._text(text, index, key, "thinking")
                marked[key] = done[text]
        if "tool_calls" in message:
            calls = enumerate(message["tool_calls"])
            marked["tool_calls"] = [
                self._call(call, index, f"tool_calls[{i}]") for i, call in calls
            ]
        return marked

    def _part(self, part: dict[str, Any], role: str, index: int) -> dict[str, Any]:
        """The marked copy of a part of the content: text, thinking or an image."""
        if part.get("type") in IMAGE_TYPES:
            return part
        if part.get("type") == "thinking":
            thinking = self._text(part["thinking"], index, REASONING[0], "thinking")
            return {**part, "thinking": thinking}
        return {**part, "text": self._content(part["text"], role, index)}

    def _other_part(self, part: Any, index: int, where: str) -> Any:
        if not isinstance(part, Mapping):
            return self.copy(part, index, where, "part")
        return {
            key: value if key == "type" else self.copy(value, index, f"{where}[{key!r}]", "part")
            for key, value in part.items()
        }

    def _call(self, call: dict[str, Any], index: int, where: str) -> dict[str, Any]:
        function = call["function"]
        name = self._text(function["name"], index, f"{where} name", "name")
        arguments = self.copy(function["arguments"], index, f"{where} arguments", "argument")
        return {**call, "function": {**function, "name": name, "arguments": arguments}}

    def _content(self, text: str, role: str, index: int) -> str:
        """Thinking that is written into the content is a part of its own."""
        if role != "assistant" or _THINK_END not in text:
            return self._text(text, index, "content", "content")
        thinking, end, answer = text.rpartition(_THINK_END)
        opened, start, thinking = thinking.rpartition("<think>")
        return (
            self._text(opened, index, "content", "content")
            + start
            + self._text(thinking, index, "thinking inside content", "thinking")
            + end
            + self._text(answer, index, "content", "content")
        )

    def _text(self, text: str, message: int, where: str, kind: str) -> str:
        code = _FIRST_MARK + len(self.parts)
        if not text.strip() or code > _LAST_MARK:
            return text
        has_tags = ("<" in text or "[" in text) and self._tags.search(text) is not None
        if not self._makes_copy and not has_tags and (core := text.strip(_EDGE)):
            before, after = text[: -len(text.lstrip(_EDGE))], text[len(text.rstrip(_EDGE)) :]
            self.parts.append(Part(message, kind, where, core, "", before.lstrip(), after.rstrip()))
            return text
        mark = chr(code)

        def replace(run: re.Match[str]) -> str:
            return mark * (run.end() - run.start())

        if has_tags:
            pieces = self._tags.split(text)
            pieces[::2] = [_RUN.sub(replace, piece) for piece in pieces[::2]]
            marked = "".join(pieces)
        else:
            marked = _RUN.sub(replace, text)
        if mark not in marked:
            marked = _SOLID.sub(replace, text)
        first, last = marked.find(mark), marked.rfind(mark) + 1
        before, after = text[:first].lstrip(), text[last:].rstrip()
        core, marked_core = text[first:last], marked[first:last]
        self.parts.append(Part(message, kind, where, core, marked_core, before, after))
        return marked


def _locate(text: str, marked: str, parts: list[Part]) -> list[Occurrence]:
    """The places of ``parts``, in the order of the text, by its ``marked`` rendering."""
    found: list[Occurrence] = []
    end = 0
    while (mark := _MARKS.search(marked, end)) is not None:
        part = parts[ord(mark[0]) - _FIRST_MARK]
        place = _match(text, marked, mark.start(), part, end)
        if place is None or text[end : place.start] != marked[end : place.start]:
            raise _changed(parts, found, text, end)
        found.append(place)
        end = place.end
    if text[end:] != marked[end:]:
        raise _changed(parts, found, text, end)
    return found


def _changed(parts: list[Part], found: list[Occurrence], text: str, place: int) -> Refusal:
    """The refusal of a text that cannot be aligned after ``place``."""
    seen = {id(occurrence.part) for occurrence in found}
    part = next((part for part in parts if id(part) not in seen), None)
    where = "the messages" if part is None else f"messages[{part.message}] {part.where}"
    return Refusal(
        f"the chat template changes {where}, or depends on its text, so it is not known which "
        f"characters are its own (after {text[max(place - 20, 0) : place + 20]!r})",
        "change the record, or set another tokenizer.chat_template",
    )


def _locate_after(text: str, parts: list[Part], known: list[str | None]) -> list[Occurrence] | None:
    """The places of ``parts`` in a text that is made of them and of texts of the template.

    ``known`` has what the template writes before each part, and at the end. None if the text is
    another one.
    """
    found = []
    end = 0
    for part, before in zip(parts, known[:-1], strict=True):
        if before is None or not text.startswith(before, end):
            return None
        start, whole = end + len(before), part.before + part.core + part.after
        if not text.startswith(whole, start):
            whole = _escape(whole)
            if not text.startswith(whole, start):
                return None
        end = start + len(whole)
        found.append(Occurrence(part, start, end))
    return found if text[end:] == known[-1] else None


def _match(text: str, marked: str, start: int, part: Part, floor: int) -> Occurrence | None:
    for escaped in (False, True):
        core, marked_core, before, after = (
            _escape(s) if escaped else s for s in (part.core, part.marked, part.before, part.after)
        )
        if escaped and core == part.core:
            return None
        end = start + len(core)
        if not (text.startswith(core, start) and marked.startswith(marked_core, start)):
            continue
        first = start - len(before)
        if first >= floor and text.startswith(before, first) and text.startswith(after, end):
            return Occurrence(part, first, end + len(after))
    return None


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
