"""The texts that a record is trained as, with the trained characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch_collate_kit.chat.advice import way_out
from torch_collate_kit.chat.content_parts import is_blank
from torch_collate_kit.chat.options import ChatSetup
from torch_collate_kit.chat.record_forms import (
    ImageSource,
    check_columns,
    find_texts,
    num_images,
    read_images,
)
from torch_collate_kit.chat.records import Conversation, read_record
from torch_collate_kit.chat.rendering import Rendering, render_conversation
from torch_collate_kit.chat.template import ChatTemplate, Refusal, Spans
from torch_collate_kit.chat.turns import turn_spans
from torch_collate_kit.errors import DataError
from torch_collate_kit.vision.expansion import Expansion

__all__ = ["TextExample", "text_examples"]


class TextExample(NamedTuple):
    """A text, the spans of characters in it that are trained, and the images it has places for.

    ``expansion`` has these images once their placeholders are written out.
    """

    text: str
    spans: Spans
    images: Sequence[ImageSource] = ()
    expansion: Expansion | None = None


def text_examples(
    record: Mapping[str, Any], setup: ChatSetup, from_arrow: bool
) -> list[TextExample] | str:
    """Return the examples of a record, or the reason why it has none."""
    check_columns(record)
    texts = find_texts(record)
    if texts is not None:
        if setup.images is not None:
            read_images([], record)  # no part for an image: refused if there is one
        prompt, completion = texts
        if completion and not setup.options.allow_empty:
            _check_answer(completion, "`completion`")
        example = TextExample(prompt + completion, [(len(prompt), len(prompt + completion))])
        return [example] if completion else "no_assistant_turn"
    conversation = read_record(record, setup, from_arrow)
    if not conversation.trained:
        return "no_trained_tokens" if conversation.has_assistant else "no_assistant_turn"
    tokenizer, train_on = setup.tokenizer, setup.options.train_on
    if not setup.options.allow_empty:
        for turn in _trained_turns(conversation, train_on):
            message = conversation.messages[turn]
            if "tool_calls" not in message:
                _check_answer(message["content"], f"messages[{turn}]")
    template = ChatTemplate.of(tokenizer, conversation.kwargs, conversation.tools)
    try:
        return _examples(template, conversation, train_on)
    except Refusal as refusal:
        advice = way_out(tokenizer, conversation, train_on, refusal, _examples)
        raise (Refusal(refusal.reason, advice) if advice else refusal) from None


def _trained_turns(conversation: Conversation, train_on: str) -> list[int]:
    return conversation.trained if train_on != "last" else conversation.trained[-1:]


def _check_answer(content: Any, where: str) -> None:
    if is_blank(content):
        raise DataError(
            f"{where} is an empty answer ({content!r:.40}), so the model would be trained to say "
            "nothing; remove it, set its `weight` to 0 (of a message), or pass allow_empty=True"
        )


def _examples(
    template: ChatTemplate, conversation: Conversation, train_on: str
) -> list[TextExample]:
    turns = _trained_turns(conversation, train_on)
    try:
        rendering = render_conversation(template, conversation, turns)
        return [_text_example(rendering, turn_spans(rendering, turns))]
    except Refusal as refusal:
        if train_on != "each" or len(turns) == 1 or not refusal.rendered:
            raise
    return _example_per_turn(template, conversation, turns)


def _text_example(rendering: Rendering, spans: Spans) -> TextExample:
    """Return the rendered text with its trained spans and the images it contains."""
    images = rendering.conversation.images
    return TextExample(rendering.text, spans, images and images[: num_images(rendering.messages)])


def _example_per_turn(
    template: ChatTemplate, conversation: Conversation, turns: list[int]
) -> list[TextExample]:
    """Return an example per turn, or one for turns that a later turn continues."""
    found: list[tuple[Rendering, Spans]] = []
    for turn in reversed(turns):
        earlier = _merged(found[-1][0], turn) if found else []
        if earlier:
            rendering, spans = found[-1]
            found[-1] = rendering, earlier + spans
        else:
            rendering = render_conversation(template, conversation, [turn])
            found.append((rendering, turn_spans(rendering, [turn])))
    return [_text_example(rendering, spans) for rendering, spans in reversed(found)]


def _merged(rendering: Rendering, turn: int) -> Spans:
    """Return the span of an earlier turn if it is rendered here as at inference, else []."""
    if rendering.is_composed or rendering.problem(turn):
        return []
    try:
        return turn_spans(rendering, [turn])
    except Refusal:
        return []
