"""Messages and images of a record, in any of the forms in which people write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from torch_collate_kit.chat.content_parts import IMAGE_TYPES
from torch_collate_kit.errors import DataError
from torch_collate_kit.vision.images import decoded_base64

__all__ = [
    "ImageSource",
    "check_columns",
    "find_messages",
    "find_texts",
    "num_images",
    "read_images",
]

_NO_CHAT_TEXT = ("system", "tools", "documents")

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
_MARKER = "<image>"
_KEYS = ("image", "path", "url", "image_url", "base64")
_OTHER_MEDIA = ("video", "audio")


def check_columns(example: Mapping[str, Any]) -> None:
    """Check that a record is no preference data, whose bad answers would be trained, too.

    A ``label`` marks KTO data beside ``prompt`` and ``completion``, and wherever it is true or
    false; other values beside messages are taken for a topic or the like.

    Raises:
        DataError: there is a column ``label``, ``chosen`` or ``rejected``.
    """
    for name in ("chosen", "rejected"):
        if example.get(name) is not None:
            raise DataError(
                f"`{name}` is a column of preference data, which are no SFT data; keep the good "
                "answers as `prompt` and `completion`, or as `messages`, and remove the columns "
                "`chosen` and `rejected`"
            )
    label = example.get("label")
    if label is None:
        return
    has_messages = any(example.get(n) is not None for n in ("messages", "conversations"))
    is_mark = isinstance(label, (int, float, np.bool_, np.number)) and label in (0, 1)
    if is_mark or (example.get("prompt") is not None and not has_messages):
        raise DataError(
            f"`label` is {label!r:.40}: a column of preference data (KTO), whose bad answers would "
            "be trained, too; keep the records with good answers, and remove the column `label`"
        )


def find_texts(example: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return ``prompt`` and ``completion`` if they are strings, which no template renders."""
    if any(example.get(name) is not None for name in ("messages", "conversations")):
        return None
    prompt, completion = example.get("prompt"), example.get("completion")
    if not isinstance(prompt, str) or not isinstance(completion, (str, type(None))):
        return None
    extra = next((name for name in _NO_CHAT_TEXT if example.get(name)), None)
    if extra is not None:
        raise DataError(
            f"`prompt` and `completion` are strings, which no template renders, so `{extra}` "
            f"would be lost; write it into the prompt, or give lists of messages"
        )
    return prompt, completion or ""


def find_messages(example: Mapping[str, Any]) -> tuple[list[Any], int]:
    """Return the messages, and the index of the first that may be trained."""
    if example.get("messages") is not None:
        return _checked_list(example["messages"], "`messages`"), 0
    if example.get("conversations") is not None:
        found = _checked_list(example["conversations"], "`conversations`")
        return [_read_sharegpt(m, f"conversations[{i}]") for i, m in enumerate(found)], 0
    if example.get("prompt") is not None:
        return _prompt_and_completion(example["prompt"], example.get("completion"))
    return _alpaca_messages(example), 0


def _checked_list(found: Any, what: str) -> list[Any]:
    if not isinstance(found, (list, tuple)):
        raise DataError(
            f"{what} must be a list of dicts, got {type(found).__name__}; decode a JSON "
            "string, or turn a dict of lists into a list of dicts"
        )
    return list(found)


def _read_sharegpt(found: Any, where: str) -> Any:
    if not isinstance(found, Mapping) or ("from" not in found and "role" in found):
        return found  # has `role` and `content`, or is refused as a message
    speaker, value = found.get("from"), found.get("value")
    role = _SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise DataError(
            f"{where} is from {speaker!r}, which is none of {', '.join(_SHAREGPT_ROLES)}; rename it"
        )
    if not isinstance(value, str):
        raise DataError(f"{where} `value` must be text, got {value!r:.60}; convert or rename it")
    rest = {k: v for k, v in found.items() if k not in ("from", "value")}
    if speaker != "function_call":
        return {**rest, "role": role, "content": value}
    return {**rest, "role": role, "content": None, "tool_calls": _sharegpt_calls(value, where)}


def _sharegpt_calls(value: str, where: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(value)
    except ValueError as error:
        raise DataError(
            f"{where} is a function_call, but its value {value!r:.60} is no JSON ({error}); "
            "fix it, or give it as text from gpt"
        ) from error
    calls = found if isinstance(found, list) else [found]
    for call in calls:
        if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
            raise DataError(
                f"{where} is a function_call, so its value must be the JSON of a dict with `name` "
                f"and `arguments`, got {value!r:.60}; fix it, or give it as text from gpt"
            )
    return [{"type": "function", "function": call} for call in calls]


def _prompt_and_completion(prompt: Any, completion: Any) -> tuple[list[Any], int]:
    if isinstance(prompt, (list, tuple)) and isinstance(completion, (list, tuple, type(None))):
        return [*prompt, *(completion or [])], len(prompt)
    raise DataError(
        "`prompt` and `completion` must be two strings or two lists of messages, got "
        f"{type(prompt).__name__} and {type(completion).__name__}; convert one of them"
    )


def _alpaca_messages(example: Mapping[str, Any]) -> list[Any]:
    columns = {name: example.get(name) for name in ("instruction", "input", "output")}
    if columns["instruction"] is None:
        given = sorted(key for key, value in example.items() if value is not None)
        raise DataError(
            f"no `messages` and no `instruction` in the columns {given}; rename the chat column to "
            "`messages`, or give `conversations` (ShareGPT), `prompt` and `completion`, or "
            "`instruction` and `output` (Alpaca)"
        )
    if columns["output"] is None and example.get("response") is not None:
        raise DataError(
            "`instruction` has a `response` but no `output`; rename `response` to `output` "
            "(and `context`, if there is one, to `input`)"
        )
    for name, value in columns.items():
        if not isinstance(value, (str, type(None))):
            raise DataError(f"`{name}` must be a string, got {type(value).__name__}; convert it")
    prompt = "\n\n".join(part for part in (columns["instruction"], columns["input"]) if part)
    messages = [("user", prompt), ("assistant", columns["output"])]
    return [{"role": role, "content": text} for role, text in messages if text is not None]


class ImageSource(NamedTuple):
    """An image as the record has it, with its name in errors."""

    where: str
    image: Any


def num_images(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of image parts in messages."""
    contents = (m["content"] for m in messages if isinstance(m.get("content"), list))
    return sum(_is_image(part) for content in contents for part in content)


def read_images(
    messages: Sequence[dict[str, Any]], example: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[ImageSource]]:
    """Return messages with ``{"type": "image"}`` for each image, and the images in order.

    An image is in its part, or it is the next of the column ``images`` (or ``image``). Where there
    is such a column, ``<image>`` in a content that is a string is an image part, too.

    Raises:
        DataError: an image without a part or a part without an image, or a video or audio.
    """
    column, given = _column(example)
    found: list[ImageSource | None] = []  # None: the next of the column
    read = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str) and given is not None and _MARKER in content:
            pieces = content.split(_MARKER)
            content = [{"type": "image"} for _ in range(2 * len(pieces) - 1)]
            content[::2] = [{"type": "text", "text": piece} for piece in pieces]
            content = [part for part in content if part.get("text") != ""]
            message = {**message, "content": content}
        if isinstance(content, list) and any(map(_is_media, content)):
            found += [
                _source(part, f"messages[{i}] content[{j}]")
                for j, part in enumerate(content)
                if _is_media(part)
            ]
            parts = [{"type": "image"} if _is_image(part) else part for part in content]
            message = {**message, "content": parts}
        read.append(message)
    return read, _filled(found, column, given)


def _filled(
    found: list[ImageSource | None], column: str, given: list[Any] | None
) -> list[ImageSource]:
    """Return all images in order, those of the column in their places."""
    missing = found.count(None)
    if missing != len(given or ()):
        raise DataError(
            f"the messages have {missing} image parts (or {_MARKER} markers) without an image of "
            f"their own, and {f'`{column}` has {len(given)}' if given else 'there are no'} images; "
            "each part needs one, in order"
        )
    names = [f"`{column}`[{k}]" if column == "images" else f"`{column}`" for k in range(missing)]
    rest = iter([ImageSource(*pair) for pair in zip(names, given or (), strict=True)])
    return [next(rest) if source is None else source for source in found]


def _column(example: Mapping[str, Any]) -> tuple[str, list[Any] | None]:
    """Return the name of the column with images, and its images; None without a column."""
    for name in ("videos", "video", "audios", "audio"):
        if example.get(name) is not None and len(example[name]):
            raise DataError(f"`{name}` is given, but only images are processed; remove it")
    images, image = example.get("images"), example.get("image")
    if images is not None and image is not None:
        raise DataError("`images` and `image` are both given; keep one of the two columns")
    if image is not None:
        if isinstance(image, (list, tuple)):
            raise DataError("`image` is a list; rename the column to `images`")
        return "image", [image]
    if images is None:
        return "images", None
    if not isinstance(images, (list, tuple)):
        raise DataError(
            f"`images` must be a list, got {type(images).__name__}; put one image into a list, or "
            "rename the column to `image`"
        )
    return "images", list(images)


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES


def _is_media(part: Any) -> bool:
    """Return whether a part is an image, or a video or audio, which is refused."""
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    return kind in IMAGE_TYPES or (isinstance(kind, str) and any(m in kind for m in _OTHER_MEDIA))


def _source(part: Mapping[str, Any], where: str) -> ImageSource | None:
    """Return the image inside a part, None if it has none."""
    if not _is_image(part):
        raise DataError(f"{where} is of type {part['type']!r}, but only images are processed")
    given = [key for key in _KEYS if part.get(key) is not None]
    if len(given) > 1:
        raise DataError(f"{where} has {' and '.join(map(repr, given))}; keep one of them")
    if not given:
        return None
    [key] = given
    image = part[key]
    if key == "image_url" and isinstance(image, Mapping):
        image = image.get("url")
        if image is None:
            raise DataError(f"{where} has an `image_url` without a `url`; give one")
    if key == "base64" and isinstance(image, str) and not image.startswith("data:"):
        image = decoded_base64(image, where)
    return ImageSource(where, image)
