"""Contents that are lists of parts: text, thinking, images, and types that few templates write."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch_collate_kit.errors import DataError

IMAGE_TYPES = ("image", "image_url")


def read_parts(content: list[Any], where: str) -> tuple[list[Any], str | None]:
    """Return the parts without the thinking, which is the first, and it; None without thinking."""
    parts: list[Any] = []
    thinking = None
    for i, part in enumerate(content):
        place = f"{where} content[{i}]"
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if _type_of(part) == "thinking":
            if thinking is not None or parts:
                raise DataError(
                    f"{place} is thinking after {'other thinking' if not parts else 'other parts'}"
                    "; give all thinking of a message as one part, the first of its content"
                )
            thinking = text_of(part.get("thinking", part.get("text")))
            if not isinstance(thinking, str):
                raise DataError(f"{place} `thinking` must be text, got {thinking!r:.60}")
            continue
        if _type_of(part) == "text" and not _is_text(part):
            others = [name for name in part if name not in ("type", "text")]
            raise DataError(
                f"{place} is a text part without a string `text`, got {dict(part)!r:.60}; "
                + (f"rename {others[0]!r} to `text`" if others else "give one, or remove the part")
            )
        parts.append(part)
    return parts, thinking


def text_of(content: Any) -> Any:
    """Return parts that are only text as one string; anything else as it is."""
    if isinstance(content, list) and all(map(_is_text, content)):
        return "".join(part["text"] for part in content)
    return content


def other_parts(content: Any) -> list[tuple[str, Any]]:
    """Return the parts that are no text, thinking or image, each with its name for errors."""
    if not isinstance(content, list):
        return []
    return [
        (f"{part_type} part content[{i}]" if part_type else f"part content[{i}]", part)
        for i, part in enumerate(content)
        if (part_type := _type_of(part)) not in ("text", "thinking", *IMAGE_TYPES)
    ]


def lost_part(part: Any, text: str) -> bool:
    """Return whether a part says nothing, or has a number or bool that is not in ``text``."""
    said = (
        {key: value for key, value in part.items() if key != "type"}
        if isinstance(part, Mapping)
        else part
    )
    values = [leaf for name, leaf in leaves(said) if name == "value" and leaf not in (None, "")]
    return not values or not all(isinstance(v, str) or is_written(v, text) for v in values)


def is_written(value: Any, text: str) -> bool:
    """Return whether ``text`` has a value as JSON or as Python writes it."""
    return json.dumps(value) in text or str(value) in text


def leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield all that a value contains: ("key", of a mapping), ("value", anything else)."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield "key", key
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield "value", value


def _type_of(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return None
    return part.get("type", "text" if "text" in part else None)


def _is_text(part: Any) -> bool:
    return _type_of(part) == "text" and isinstance(part.get("text"), str)
