"""The places of the parts of a conversation in its text, by marks or by what is known.

What a template writes between two texts is learned from a marked rendering. Where a later text is
exactly what this lets expect, texts of messages and of the template in turn, no marks are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch_collate_kit.chat.images import num_images
from torch_collate_kit.chat.marking import Marker, Occurrence, Part, locate, locate_after
from torch_collate_kit.chat.records import Conversation
from torch_collate_kit.chat.template import ChatTemplate, Messages, Refusal

__all__ = ["locate_parts", "shape_of"]

_MAX_KNOWN_TEXTS = 10_000


def locate_parts(
    template: ChatTemplate, conversation: Conversation, messages: Messages, style: Any, text: str
) -> tuple[list[Part], list[Occurrence]]:
    """The parts of ``messages``, in the form of ``style``, and their places in ``text``.

    Raises:
        Refusal: the text cannot be told apart from the template's.
    """
    if conversation.documents is not None:
        return _by_marks(template, conversation, messages, text)
    if template.known_texts:
        marker = Marker(template.tags, makes_copy=False)
        for i, message in enumerate(messages):
            marker.message(message, i)
        written = _as_written(marker.parts)
        keys = _keys(conversation, messages, style, written)
        known = [template.known_texts.get(key) for key in keys]
        found = locate_after(text, written, known)
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
    marker = Marker(template.tags)
    marked = [marker.message(message, i) for i, message in enumerate(messages)]
    documents = conversation.documents
    if documents is not None:
        documents = marker.copy(documents, -1, "documents", "document")
    copy, _ = template.render(marked, conversation.tools, documents)
    occurrences, changed = locate(text, copy, marker.parts)
    if changed is not None:
        raise _changed(marker.parts, occurrences, text, changed)
    return marker.parts, occurrences


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
    conversation: Conversation, messages: Messages, style: Any, parts: list[Part]
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
        num_images([message]) and tuple(part["type"] for part in message["content"]),
    )


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
