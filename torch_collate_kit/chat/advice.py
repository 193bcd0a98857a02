"""The way out of a refusal, tried before it is advised."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch_collate_kit.chat.plain_turn import ANY_TOOL
from torch_collate_kit.chat.record_forms import num_images
from torch_collate_kit.chat.records import Conversation
from torch_collate_kit.chat.template import ChatTemplate, Refusal

__all__ = ["way_out"]

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
_MAX_TURNS = 8  # a record of more is tried in part: each turn may be a rendering of its own
_TOOLS = "give its tools, in a column `tools` or as tools=[...]: the template needs them"
_HEADS = ("system", "developer")

Examples = Callable[[ChatTemplate, Conversation, str], Any]


def way_out(
    tokenizer: Any, conversation: Conversation, train_on: str, refusal: Refusal, examples: Examples
) -> str | None:
    """Return the advice with which the record is not refused, or None.

    Of a long record only the messages around the refused turn are tried, so that a refusal does not
    cost more than the record. The advice says "try" then.
    """

    def refused(part: Conversation, mode: str) -> Refusal | None:
        try:
            examples(ChatTemplate.of(tokenizer, part.kwargs, part.tools), part, mode)
        except Refusal as other:
            return other
        return None

    code = ChatTemplate.of(tokenizer, conversation.kwargs, conversation.tools).code
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
        return _TOOLS if other is None or other.rendered else None
    verb = "pass" if part is conversation else "try"
    for mode, cure, advice in _tries(part, train_on, code, verb):
        if refused(replace(part, kwargs={**part.kwargs, **cure}), mode) is None:
            return advice
    return None


def _tries(
    part: Conversation, train_on: str, code: str, verb: str
) -> list[tuple[str, dict[str, Any], str]]:
    """Return the modes and variables to try, with the advice to use them."""
    tries: list[tuple[str, dict[str, Any], str]] = []
    may_split = train_on == "all" and len(part.trained) > 1
    if may_split:
        tries.append(("each", {}, f"{verb} train_on='each' (an example per turn)"))
    for name, value in _CURES:
        if part.kwargs.get(name) != value and re.search(rf"\b{name}\b", code):
            cure = {name: value}
            advice = f"{verb} chat_template_kwargs={cure}"
            tries.append((train_on, cure, advice))
            if may_split:
                tries.append(("each", cure, f"{advice} and train_on='each'"))
    return tries


def _around(conversation: Conversation, reason: str) -> Conversation:
    """Return the system messages and the turns around the message that ``reason`` names."""
    messages, trained = conversation.messages, conversation.trained
    named = re.search(r"messages\[(\d+)\]", reason)
    middle = sum(turn < int(named[1]) for turn in trained) if named else 0
    kept = trained[max(middle - 1, 0) : middle + 2]
    head = next((i for i, m in enumerate(messages) if m["role"] not in _HEADS), 0)
    asked = (i for i in range(kept[0], head, -1) if messages[i]["role"] == "user")
    start = next(asked, head)
    moved = start - head
    part = messages[:head] + messages[start : kept[-1] + 1]
    return replace(
        conversation,
        messages=part,
        trained=[turn - moved for turn in kept],
        images=conversation.images[: num_images(part)],
    )
