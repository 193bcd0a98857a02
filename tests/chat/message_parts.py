"""What a message says: its words, its texts, and whether its arguments stand in a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["WORD", "arguments_stand", "calls", "pieces", "strings", "text_parts", "words"]

Message = dict[str, Any]

WORD = re.compile(r"[^\W\d_]+\d+")


def strings(value: Any) -> Iterator[str]:
    """Every string inside a value, keys of dicts too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from strings(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from strings(inner)


def text_parts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or []]


def calls(message: Message) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls") or []]


def words(message: Message) -> set[str]:
    said = [*text_parts(message.get("content")), message.get("reasoning_content") or ""]
    for call in calls(message):
        said += [call["name"], *strings(call["arguments"])]
    return {word for text in said for word in WORD.findall(text)}


def pieces(message: Message) -> list[str]:
    """The texts of an assistant's message; white space and <think> tags around them may change."""
    pieces = [
        piece.strip()
        for text in [*text_parts(message.get("content")), message.get("reasoning_content") or ""]
        for piece in re.split("</?think>", text)
    ]
    return [piece for piece in pieces if piece] + [call["name"] for call in calls(message)]


_PAIRS = json.JSONDecoder(object_pairs_hook=lambda pairs: ("object", pairs))


def arguments_stand(arguments: Any, text: str, verbatim: bool) -> bool:
    """Printed as they are, as the same JSON object, or item by item."""
    if isinstance(arguments, str) and (verbatim or arguments in text):
        return arguments in text
    printed = arguments if isinstance(arguments, str) else json.dumps(arguments)
    wanted = _PAIRS.decode(printed)
    for start in (match.start() for match in re.finditer("{", text)):
        try:
            if _PAIRS.raw_decode(text, start)[0] == wanted:
                return True
        except ValueError:
            continue
    return all(any(form in text for form in _spellings(leaf)) for leaf in _leaves(wanted))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for key, inner in value[1]:
            yield key
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _spellings(leaf: Any) -> list[str]:
    escaped = str(leaf).replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")  # LFM2
    strings = [str(leaf), json.dumps(leaf), json.dumps(leaf, ensure_ascii=False), escaped]
    return [string.strip('"') if isinstance(leaf, str) else string for string in strings]
