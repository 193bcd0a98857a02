"""Which texts a conversation is trained as, and which characters of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch_collate_kit.chat.images import ImageSource, num_images
from torch_collate_kit.chat.records import Conversation
from torch_collate_kit.chat.rendering import Rendering, render_conversation
from torch_collate_kit.chat.template import ChatTemplate, Refusal, Spans, chat_template
from torch_collate_kit.chat.turns import turn_spans
from torch_collate_kit.errors import DataError

__all__ = ["TextExample", "text_examples"]

# Variables that decide in public templates whether thinking is opened, kept or dropped.
_CURES: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"enable_thinking": True},
    {"thinking": True},
    {"thinking": False},
    {"preserve_thinking": True},
    {"clear_thinking": False},
    {"keep_thinking": True},
    {"keep_past_thinking": True},
    {"truncate_history_thinking": False},
    {"preserve_previous_think": True},
]


class TextExample(NamedTuple):
    """A text, the spans of characters in it that are trained, and the images it has places for."""

    text: str
    spans: Spans
    images: Sequence[ImageSource] = ()


def text_examples(tokenizer: Any, conversation: Conversation, train_on: str) -> list[TextExample]:
    """The examples of a conversation with at least one turn to train."""
    if conversation.texts is not None:
        prompt, completion = conversation.texts
        return [TextExample(prompt + completion, [(len(prompt), len(prompt + completion))])]
    template = chat_template(tokenizer, conversation.kwargs, conversation.tools)
    try:
        return _examples(template, conversation, train_on)
    except Refusal as refusal:
        cure = _cure(tokenizer, conversation, train_on) if refusal.rendered else None
        raise (Refusal(refusal.reason, cure) if cure else refusal) from None


def _examples(
    template: ChatTemplate, conversation: Conversation, train_on: str
) -> list[TextExample]:
    turns = conversation.trained if train_on != "last" else conversation.trained[-1:]
    try:
        return [_example(template, conversation, turns)]
    except Refusal as refusal:
        if train_on != "each" or len(turns) == 1 or not refusal.rendered:
            raise
    return _example_per_turn(template, conversation, turns)


def _example(template: ChatTemplate, conversation: Conversation, turns: list[int]) -> TextExample:
    rendering = render_conversation(template, conversation, turns[-1] + 1, turns)
    spans = turn_spans(rendering, turns)  # may append the token that ends the last turn
    return _text_example(rendering, spans)


def _text_example(rendering: Rendering, spans: Spans) -> TextExample:
    """Images after the last message that was rendered are left out."""
    images = rendering.conversation.images
    return TextExample(rendering.text, spans, images and images[: num_images(rendering.messages)])


def _example_per_turn(
    template: ChatTemplate, conversation: Conversation, turns: list[int]
) -> list[TextExample]:
    """One example per turn, as at inference; a turn that a later one continues is part of it."""
    found: list[tuple[Rendering, Spans]] = []
    for turn in reversed(turns):
        if found:
            rendering, spans = found[-1]
            earlier = _merged(rendering, turn)
            if earlier is not None:
                found[-1] = rendering, earlier + spans
                continue
        rendering = render_conversation(template, conversation, turn + 1, [turn])
        found.append((rendering, turn_spans(rendering, [turn])))
    return [_text_example(rendering, spans) for rendering, spans in reversed(found)]


def _merged(rendering: Rendering, turn: int) -> Spans | None:
    if rendering.is_composed or rendering.problem(turn):
        return None
    try:
        return turn_spans(rendering, [turn]) or None
    except Refusal:
        return None


def _cure(tokenizer: Any, conversation: Conversation, train_on: str) -> str | None:
    """The way out that was tried and works."""
    template = chat_template(tokenizer, conversation.kwargs, conversation.tools)
    tries: list[tuple[str, dict[str, Any], str]] = []
    if train_on == "all" and len(conversation.trained) > 1:
        tries.append(("each", {}, "pass train_on='each' (an example per turn)"))
    for cure in _CURES:
        [(name, value)] = cure.items()
        if conversation.kwargs.get(name) != value and re.search(rf"\b{name}\b", template.code):
            advice = f"pass chat_template_kwargs={cure}"
            tries.append((train_on, cure, advice))
            if train_on == "all" and len(conversation.trained) > 1:
                tries.append(("each", cure, f"{advice} and train_on='each'"))
    for mode, cure, advice in tries:
        changed = replace(conversation, kwargs={**conversation.kwargs, **cure})
        try:
            _examples(chat_template(tokenizer, changed.kwargs, changed.tools), changed, mode)
        except DataError:
            continue
        return advice
    return None
