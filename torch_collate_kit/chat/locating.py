"""The origin of each character of a rendered chat.

With the texts put back, a rendering in which a private-use character stands for each must be equal.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch_collate_kit.chat.record_forms import IMAGE_TYPES, other_parts
from torch_collate_kit.chat.records import REASONING, Conversation
from torch_collate_kit.chat.template import ChatTemplate, Messages, Refusal

_MAX_KNOWN_COPIES = 256
_FIRST_MARK, _LAST_MARK = 0x100000, 0x10FFFD  # the last plane of private-use characters
_MARKS = re.compile("[\U00100000-\U0010fffd]")
_EDGE = "".join(filter(re.compile(r"[\s\x00-\x1f\x7f\"\\]").match, map(chr, range(0x3001))))
_SOLID = re.compile(r"\S(?:[^\n]*\S)?")  # for a text of quotes, backslashes or tags alone
THINK_END = "</think>"


class MarkedPart(NamedTuple):
    """One text of one message: the characters that the marked copy replaces by a mark.

    ``marked`` is ``core`` in the marked copy. ``before`` and ``after`` are the characters around it
    that are not replaced and no white space. ``kind`` is "content", "part", "thinking", "name",
    "argument" or "document".
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

    part: MarkedPart
    start: int
    end: int


def has_marks(text: str) -> bool:
    """Return whether a text has one of the private-use characters, so that it cannot be marked."""
    return not text.isascii() and _MARKS.search(text) is not None


class MarkedCopy:
    """The rendering of a marked conversation, shared by all conversations of its form."""

    def __init__(self, text: str) -> None:
        self._text, self._turns = text, dict[Any, Any]()
        self._pieces: list[str] = []  # of the template, and between them one for each part
        self._order: list[int] = []

    def locate(self, text: str, parts: list[MarkedPart]) -> tuple[list[Occurrence], dict[Any, Any]]:
        """Return the places of ``parts``, and the known turns if only they differ."""
        pieces, ordered = self._pieces.copy(), [parts[i] for i in self._order]
        pieces[1::2] = [part.core for part in ordered]
        if "".join(pieces) == text:
            ends = list(itertools.accumulate(map(len, pieces)))
            places = zip(ordered, ends[:-1:2], ends[1::2], strict=True)
            return [Occurrence(p, a - len(p[5]), b + len(p[6])) for p, a, b in places], self._turns
        found = _locate(text, self._text, parts)
        cores = [(a + len(part.before), b - len(part.after)) for part, a, b in found]
        if [text[a:b] for a, b in cores] == [part.core for part, _, _ in found]:  # none is escaped
            index = {id(part): i for i, part in enumerate(parts)}
            self._order = [index[id(part)] for part, _, _ in found]
            cuts = [0, *itertools.chain(*cores), len(text)]
            self._pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
        return found, {}


def locate_parts(
    template: ChatTemplate, conversation: Conversation, messages: Messages, text: str
) -> tuple[list[MarkedPart], list[Occurrence], dict[Any, Any]]:
    """Return the texts of ``messages``, their places in ``text``, and the known turns."""
    marker = _Marker(template.tags)
    marked = [marker.message(message, i) for i, message in enumerate(messages)]
    documents = conversation.documents
    if documents is not None:
        documents = marker.copy(documents, -1, "documents", "document")
    key = repr((marked, conversation.tools, documents))
    known = template.known_copies.get(key)
    if known is not None:
        try:
            return marker.parts, *known.locate(text, marker.parts)
        except Refusal:  # a template may ask for the time; the new copy decides
            pass
    elif len(template.known_copies) >= _MAX_KNOWN_COPIES:
        template.known_copies.clear()
    copy = MarkedCopy(template.render(marked, conversation.tools, documents))
    template.known_copies[key] = copy
    return marker.parts, *copy.locate(text, marker.parts)


class _Marker:
    """Makes the marked copy of a conversation for one template, and lists its ``parts``."""

    def __init__(self, tags: re.Pattern[str]) -> None:
        self._tags = tags
        self.parts: list[MarkedPart] = []

    def copy(self, value: Any, message: int, where: str, kind: str) -> Any:
        """Return ``value`` with every string in it replaced; keys of mappings are kept."""
        if isinstance(value, str):
            return self._text(value, message, where, kind)
        if isinstance(value, Mapping):
            return {k: self.copy(v, message, f"{where}[{k!r}]", kind) for k, v in value.items()}
        if isinstance(value, list):
            return [self.copy(v, message, f"{where}[{i}]", kind) for i, v in enumerate(value)]
        return value

    def message(self, message: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Return the marked copy of a message."""
        marked = dict(message)
        content = message.get("content")
        if isinstance(content, str):
            marked["content"] = self._content(content, message["role"], index)
        elif isinstance(content, list):
            others = {id(part): name for name, part in other_parts(content)}
            marked["content"] = [
                self._part(part, message["role"], index, others.get(id(part))) for part in content
            ]
        done: dict[str, str] = {}
        for key in REASONING:
            if isinstance(text := message.get(key), str):
                if text not in done:
                    done[text] = self._text(text, index, key, "thinking")
                marked[key] = done[text]
        if "tool_calls" in message:
            marked["tool_calls"] = [
                self._call(call, index, f"tool_calls[{i}]")
                for i, call in enumerate(message["tool_calls"])
            ]
        return marked

    def _part(self, part: Any, role: str, index: int, other: str | None) -> Any:
        """Return the marked copy of a part of the content, of a type named ``other`` or known."""
        if other is not None:
            if not isinstance(part, Mapping):
                return self.copy(part, index, other, "part")
            said = {key: value for key, value in part.items() if key != "type"}
            return {**part, **self.copy(said, index, other, "part")}
        if part.get("type") in IMAGE_TYPES:
            return part
        if part.get("type") == "thinking":
            thinking = self._text(part["thinking"], index, REASONING[0], "thinking")
            return {**part, "thinking": thinking}
        return {**part, "text": self._content(part["text"], role, index)}

    def _call(self, call: dict[str, Any], index: int, where: str) -> dict[str, Any]:
        function = call["function"]
        name = self._text(function["name"], index, f"{where} name", "name")
        arguments = self.copy(function["arguments"], index, f"{where} arguments", "argument")
        return {**call, "function": {**function, "name": name, "arguments": arguments}}

    def _content(self, text: str, role: str, index: int) -> str:
        """Return a content marked, in which thinking is a part of its own."""
        if role != "assistant" or THINK_END not in text:
            return self._text(text, index, "content", "content")
        thought, end, answer = text.rpartition(THINK_END)
        opened, start, thought = thought.rpartition("<think>")
        opened = self._text(opened, index, "content", "content")
        thought = self._text(thought, index, "thinking inside content", "thinking")
        return opened + start + thought + end + self._text(answer, index, "content", "content")

    def _text(self, text: str, message: int, where: str, kind: str) -> str:
        code = _FIRST_MARK + len(self.parts)
        if not text.strip() or code > _LAST_MARK:
            return text
        mark = chr(code)
        # Templates look at white space, control characters, quotes and backslashes around a text
        # (`trim`, `tojson`), and at what looks like one of their tags: these stay as they are.
        pieces = self._tags.split(text) if "<" in text or "[" in text else [text]
        if len(pieces) == 1 and text.strip(_EDGE) == text:  # most texts
            self.parts.append(MarkedPart(message, kind, where, text, mark))
            return mark
        for i in range(0, len(pieces), 2):
            if core := pieces[i].strip(_EDGE):
                pieces[i] = pieces[i].replace(core, mark, 1)
        marked = "".join(pieces)
        if mark not in marked:
            marked = _SOLID.sub(mark, text)
        first, last = marked.find(mark), marked.rfind(mark) + 1
        before, after = marked[:first], marked[last:]
        core = text[first : len(text) - len(after)]
        self.parts.append(
            MarkedPart(
                message, kind, where, core, marked[first:last], before.lstrip(), after.rstrip()
            )
        )
        return marked


def _locate(text: str, marked: str, parts: list[MarkedPart]) -> list[Occurrence]:
    """Return the places of ``parts``, in the order of the text, by its ``marked`` rendering."""
    found: list[Occurrence] = []
    end = known = 0  # what is located: of the text, and of the marked one
    for mark in _MARKS.finditer(marked):
        place = mark.start()
        if place < known:  # inside the part before
            continue
        part, start = parts[ord(mark[0]) - _FIRST_MARK], end + place - known
        same = text[end:start] == marked[known:place]
        size = _size(text, marked, start, place, part, end) if same else None
        if size is None:
            raise _changed(parts, found, text, end)
        before, whole, replaced = size
        found.append(Occurrence(part, start - before, start + whole))
        end, known = start + whole, place + replaced
    if text[end:] != marked[known:]:
        raise _changed(parts, found, text, end)
    return found


def _size(
    text: str, marked: str, start: int, mark: int, part: MarkedPart, floor: int
) -> tuple[int, int, int] | None:
    """Return the characters before a part, from its start on, and in the marked text; or None."""
    for escaped in (False, True):
        _, _, _, core, masked, before, after = part
        if escaped:
            core, masked, before, after = map(_escape, part[3:])
            if core == part.core:
                return None
        if (
            text.startswith(core, start)
            and marked.startswith(masked, mark)
            and start - len(before) >= floor
            and text.startswith(before, start - len(before))
            and text.startswith(after, start + len(core))
            and marked.startswith(after, mark + len(masked))
        ):
            return len(before), len(core) + len(after), len(masked) + len(after)
    return None


def _changed(parts: list[MarkedPart], found: list[Occurrence], text: str, place: int) -> Refusal:
    """Return the refusal of a text that cannot be aligned after ``place``."""
    seen = {id(occurrence.part) for occurrence in found}
    part = next((part for part in parts if id(part) not in seen), None)
    where = "the messages" if part is None else f"messages[{part.message}] {part.where}"
    return Refusal(
        f"the chat template changes {where}, or depends on its text, so it is not known which "
        f"characters are its own (after {text[max(place - 20, 0) : place + 20]!r})",
        "change the record, or set another tokenizer.chat_template",
    )


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
