"""The texts that a record is trained as, with the trained characters, or the way out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch_collate_kit.chat.content_parts import text_of
from torch_collate_kit.chat.options import ChatSetup
from torch_collate_kit.chat.plain_turn import ANY_TOOL
from torch_collate_kit.chat.record_forms import (
    ImageSource,
    check_columns,
    find_texts,
    num_images,
    read_images,
)
from torch_collate_kit.chat.records import ROLES, Conversation, read_record
from torch_collate_kit.chat.rendering import Rendering, render_conversation
from torch_collate_kit.chat.template import ChatTemplate, Refusal, Spans
from torch_collate_kit.chat.turns import leaves_out, turn_spans
from torch_collate_kit.errors import DataError
from torch_collate_kit.vision.expansion import Expansion

# Variables that decide in public templates whether thinking is opened, kept or dropped.
_CURES = (
    ("enable_thinking", False),
    ("enable_thinking", True),
    ("thinking", True),
    ("thinking", False),
    ("preserve_thinking", True),
    ("clear_thinking", False),
    ("keep_thinking", True),
    ("keep_past_thinking", True),
    ("truncate_history_thinking", False),
    ("preserve_previous_think", True),
)
# Of a record of more turns only those around the refused one are tried, and the advice says "try":
# each turn may be a rendering of its own, and a refusal must not cost more than the record.
_MAX_TURNS = 8


class TextExample(NamedTuple):
    """A text, the spans of characters in it that are trained, and the images it has places for.

    ``expansion`` has these images once their placeholders are written out; ``is_bare``: no template
    has written the BOS.
    """

    text: str
    spans: Spans
    images: Sequence[ImageSource] = ()
    expansion: Expansion | None = None
    is_bare: bool = False


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
        text = prompt + completion
        example = TextExample(text, [(len(prompt), len(text))], is_bare=True)
        return [example] if completion else "no_assistant_turn"
    conversation = read_record(record, setup, from_arrow)
    _check_roles(conversation, setup.tokenizer)
    if not conversation.trained:
        return "no_trained_tokens" if conversation.has_assistant else "no_assistant_turn"
    train_on = setup.options.train_on
    for turn in [] if setup.options.allow_empty else _trained_turns(conversation, train_on):
        message = conversation.messages[turn]
        if "tool_calls" not in message:
            _check_answer(message["content"], f"messages[{turn}]")
    try:
        return _examples(setup.tokenizer, conversation, train_on)
    except Refusal as refusal:
        advice = _way_out(setup, conversation, train_on, refusal)
        raise (Refusal(refusal.reason, advice) if advice else refusal) from None


def _check_roles(conversation: Conversation, tokenizer: Any) -> None:
    """Refuse roles that the template does not name, whose answers would not be trained."""
    roles = [message["role"] for message in conversation.messages]
    for role in {*roles}.difference(ROLES):
        template = ChatTemplate.of(tokenizer, conversation.kwargs, conversation.tools)
        if not template.names_role(role):
            raise DataError(
                f"messages[{roles.index(role)}] has the unknown role {role!r}, which the chat "
                "template does not name, or writes as it writes assistant; rename the role of the "
                "answers to assistant, others to system, user or tool"
            )


def _trained_turns(conversation: Conversation, train_on: str) -> list[int]:
    return conversation.trained if train_on != "last" else conversation.trained[-1:]


def _check_answer(content: Any, where: str) -> None:
    text = text_of(content)
    if text is None or (isinstance(text, str) and not text.strip()):
        raise DataError(
            f"{where} is an empty answer ({content!r:.40}), so the model would be trained to say "
            "nothing; remove it, set its `weight` to 0 (of a message), or pass allow_empty=True"
        )


def _examples(tokenizer: Any, conversation: Conversation, train_on: str) -> list[TextExample]:
    """Return one example; with "each" one for the turns that a later turn continues."""
    template = ChatTemplate.of(tokenizer, conversation.kwargs, conversation.tools)
    turns = _trained_turns(conversation, train_on)
    found: list[tuple[Rendering, Spans]] = []
    try:
        rendering = render_conversation(template, conversation, turns)
        found = [(rendering, turn_spans(rendering, turns))]
    except Refusal as refusal:
        if train_on != "each" or len(turns) == 1 or not refusal.rendered:
            raise
        for turn in reversed(turns):
            earlier = _merged(*found[-1], turn) if found else []
            if earlier:
                rendering, spans = found[-1]
                found[-1] = rendering, earlier + spans
            else:
                rendering = render_conversation(template, conversation, [turn])
                found.append((rendering, turn_spans(rendering, [turn])))
        lost = [len(rendering.messages) - 1 for rendering, spans in found if not spans]
        if lost and len(lost) < len(found):
            raise leaves_out(lost[-1]) from None
    images = conversation.images
    return [
        TextExample(rendering.text, spans, images and images[: num_images(rendering.messages)])
        for rendering, spans in reversed(found)
    ]


def _merged(rendering: Rendering, spans: Spans, turn: int) -> Spans:
    """Return the span of an earlier turn if it is rendered here as at inference, else []."""
    if not spans or rendering.is_composed or rendering.problem(turn):
        return []
    try:
        return turn_spans(rendering, [turn])
    except Refusal:
        return []


def _way_out(
    setup: ChatSetup, conversation: Conversation, train_on: str, refusal: Refusal
) -> str | None:
    """Return advice that was tried and with which the record is accepted, or None."""

    def refused(part: Conversation, mode: str) -> Refusal | None:
        try:
            _examples(setup.tokenizer, part, mode)
        except Refusal as other:
            return other
        return None

    code = ChatTemplate.of(setup.tokenizer, conversation.kwargs, conversation.tools).code
    if not refusal.rendered and (conversation.tools is not None or "tools" not in code):
        return None
    part = conversation
    if len(conversation.trained) > _MAX_TURNS and train_on != "last":
        part = _around(conversation, refusal.reason)
        again = refused(part, train_on)
        if again is None or again.rendered != refusal.rendered:
            return None
    if not refusal.rendered:
        other = refused(replace(part, tools=[ANY_TOOL]), train_on)
        if other is None or other.rendered:
            return "give its tools, in a column `tools` or as tools=[...]: the template needs them"
        return None
    verb = "pass" if part is conversation else "try"
    may_split = setup.may_split and train_on == "all" and len(part.trained) > 1
    if may_split and refused(part, "each") is None:
        return f"{verb} train_on='each' (an example per turn)"
    for name, value in _CURES:
        if part.kwargs.get(name) == value or not re.search(rf"\b{name}\b", code):
            continue
        cure = {name: value}
        cured = replace(part, kwargs={**part.kwargs, **cure})
        advice = f"{verb} chat_template_kwargs={cure}"
        if refused(cured, train_on) is None:
            return advice
        if may_split and refused(cured, "each") is None:
            return f"{advice} and train_on='each'"
    return None


def _around(conversation: Conversation, reason: str) -> Conversation:
    """Return the system messages and the turns around the message that ``reason`` names."""
    messages, trained = conversation.messages, conversation.trained
    named = re.search(r"messages\[(\d+)\]", reason)
    middle = sum(turn < int(named[1]) for turn in trained) if named else 0
    kept = trained[max(middle - 1, 0) : middle + 2]
    heads = ("system", "developer")
    head = next((i for i, m in enumerate(messages) if m["role"] not in heads), 0)
    asked = (i for i in range(kept[0], head, -1) if messages[i]["role"] == "user")
    start = next(asked, head)
    part = messages[:head] + messages[start : kept[-1] + 1]
    return replace(
        conversation,
        messages=part,
        trained=[turn - start + head for turn in kept],
        images=conversation.images[: num_images(part)],
    )
