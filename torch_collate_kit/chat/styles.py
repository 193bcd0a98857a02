"""The form in which a template needs messages: contents, and arguments of tool calls."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from torch_collate_kit.chat.records import text_of
from torch_collate_kit.chat.template import REPEATED_KEY

__all__ = ["FORMS", "Style", "decoded_arguments", "styled"]

FORMS = {
    "content": ("text", "parts"),
    "empty": ("given", "none", "left out", "text"),
    "arguments": ("given", "mapping", "text"),
}


class Style(NamedTuple):
    """How texts, empty contents beside calls, and arguments are given: one of ``FORMS`` each."""

    content: str = "text"
    empty: str = "given"
    arguments: str = "given"


def styled(message: dict[str, Any], style: Style) -> dict[str, Any]:
    """The message in a form that a template may need. What it says is the same."""
    content = message["content"]
    if style.content == "text" and isinstance(content, str) and "tool_calls" not in message:
        return message
    styled = dict(message)
    if not content and "tool_calls" in message:
        if style.empty == "left out":
            del styled["content"]
        elif style.empty != "given":
            styled["content"] = None if style.empty == "none" else ""
    elif style.content == "text":
        styled["content"] = text_of(content or "")
    elif not isinstance(content, list):
        styled["content"] = [{"type": "text", "text": content or ""}]
    if "tool_calls" in message:
        styled["tool_calls"] = [_styled_call(call, style) for call in message["tool_calls"]]
    return styled


def _styled_call(call: dict[str, Any], style: Style) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if style.arguments == "mapping" and isinstance(arguments, str):
        decoded = decoded_arguments(arguments)
        arguments = arguments if decoded is None else decoded
    elif style.arguments == "text" and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def decoded_arguments(arguments: str) -> dict[str, Any] | None:
    """The mapping that a JSON string holds, repeated keys included."""
    try:
        found = json.loads(arguments, object_pairs_hook=_with_repeated_keys)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _with_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        while key in found:
            key += REPEATED_KEY
        found[key] = value
    return found
