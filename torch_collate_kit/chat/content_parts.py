"""Contents that are lists of parts: text, thinking, images, and types that few templates write."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch_collate_kit.errors import DataError

__all__ = ["IMAGE_TYPES", "is_blank", "lost_part", "other_parts", "read_parts", "text_of"]

IMAGE_TYPES = ("image", "image_url")


def read_parts(content: list[Any], where: str) -> tuple[list[Any], str | None]:
    """Return the parts without the thinking, and the thinking; None if there is none.

    Raises:
        DataError: a text part without ``text``; thinking that is no text, is given twice or follows
            other parts, since templates write it first and once.
    """
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
            thinking = _thinking_of(part, place)
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


def is_blank(content: Any) -> bool:
    """Return whether a content says nothing: None, or no text but white space.

    >>> is_blank([{"type": "text", "text": " "}]), is_blank([{"type": "image"}])
    (True, False)
    """
    text = text_of(content)
    return text is None or (isinstance(text, str) and not text.strip())


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
    """Return whether a part says nothing, or has a number or bool that is not in ``text``.

    Its strings are found by their marks.
    """
    leaves = [leaf for leaf in _leaves(part) if leaf is not None and leaf != ""]
    values = [leaf for leaf in leaves if not isinstance(leaf, str)]
    return not leaves or not all(json.dumps(v) in text or str(v) in text for v in values)


def _type_of(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return None
    return part.get("type", "text" if "text" in part else None)


def _is_text(part: Any) -> bool:
    return _type_of(part) == "text" and isinstance(part.get("text"), str)


def _thinking_of(part: Mapping[str, Any], place: str) -> str:
    """Return the text of a thinking part, whose key is ``thinking`` or ``text``."""
    thinking = text_of(part.get("thinking", part.get("text")))
    if not isinstance(thinking, str):
        raise DataError(f"{place} `thinking` must be text, got {thinking!r:.60}")
    return thinking


def _leaves(value: Any, *, inside: bool = False) -> Iterator[Any]:
    """Yield the values of a part and of all that it contains, without its type."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if inside or key != "type":
                yield from _leaves(item, inside=True)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item, inside=True)
    else:
        yield value
