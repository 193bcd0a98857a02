"""Arguments of tool calls: JSON read without losing a key, and what a template made of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch_collate_kit.chat.template import REPEATED_KEY

__all__ = ["changed_arguments", "decoded_arguments"]


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


def changed_arguments(arguments: Any, text: str) -> str | None:
    """What happened to arguments that are a mapping; strings in it were found by their marks."""
    if not isinstance(arguments, Mapping) or not arguments:
        return None
    if json.dumps(arguments, ensure_ascii=False).replace(REPEATED_KEY, "") in text:
        return None
    if repr(arguments) in text:
        return "prints arguments as Python, not as JSON"
    for name, value in _leaves(arguments):
        written = (
            {value, json.dumps(value)}
            if isinstance(value, str)
            else {json.dumps(value), str(value)}
        )
        if not any(form in text for form in written):
            return f"drops the {name} {value!r} of its arguments"
    return None


def _leaves(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield "key", str(key).rstrip(REPEATED_KEY)
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif not isinstance(value, str):
        yield "value", value
