"""The forms of records: columns, texts, images, and contents that are lists of parts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from torch_collate_kit.errors import DataError
from torch_collate_kit.reading.entries import weights_of_examples
from torch_collate_kit.reading.keys import check_no_other_weight
from torch_collate_kit.vision.images import decoded_base64

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
IMAGE_TYPES = ("image", "image_url")


def check_columns(example: Mapping[str, Any]) -> None:
    """Refuse preference data, whose bad answers would be trained, too, and a wrong ``weight``."""
    for name in ("chosen", "rejected"):
        if example.get(name) is not None:
            raise DataError(
                f"`{name}` is a column of preference data, not of SFT data; pass the dataset "
                "to preference.tokenize_preferences, or for SFT keep the good answers as `prompt` "
                "and `completion`, or as `messages`, and remove the columns `chosen` and `rejected`"
            )
    # Other labels than true or false are a topic or the like, if there are messages.
    label = example.get("label")
    is_mark = isinstance(label, (int, float, np.bool_, np.number)) and label in (0, 1)
    has_prompt = example.get("prompt") is not None and not _has_messages(example)
    if is_mark or (label is not None and has_prompt):
        raise DataError(
            f"`label` is {label!r:.40}: a column of preference data (KTO), whose bad answers would "
            "be trained, too; pass the dataset to preference.tokenize_preferences, or for SFT keep "
            "the records with good answers, and remove the column `label`"
        )
    _check_weight_name(tuple(example))
    weight = example.get("weight", 1.0)
    if not (type(weight) is float and 1e-9 < weight < 1e9):  # an array takes 5% of a short record
        try:
            weights_of_examples([weight])
        except DataError as error:
            raise DataError(str(error).removeprefix("example 0: ")) from None


@lru_cache(maxsize=4096)
def _check_weight_name(keys: tuple[Any, ...]) -> None:
    check_no_other_weight(dict.fromkeys(keys, "the record"), keys)


def _has_messages(example: Mapping[str, Any]) -> bool:
    return any(example.get(name) is not None for name in ("messages", "conversations"))


def find_texts(example: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return ``prompt`` and ``completion`` if they are strings, which no template renders."""
    prompt, completion = example.get("prompt"), example.get("completion")
    completion = "" if completion is None else completion
    if _has_messages(example) or not isinstance(prompt, str) or not isinstance(completion, str):
        return None
    for name in ("system", "tools", "documents"):
        if example.get(name):
            raise DataError(
                f"`prompt` and `completion` are strings, which no template renders, so `{name}` "
                f"would be lost; write it into the prompt, or give lists of messages"
            )
    return prompt, completion


def find_messages(example: Mapping[str, Any]) -> tuple[list[Any], int]:
    """Return the messages, and the index of the first that may be trained."""
    name = "conversations" if example.get("messages") is None else "messages"
    found, prompt, completion = map(example.get, (name, "prompt", "completion"))
    if found is not None:
        if not isinstance(found, (list, tuple)):
            raise DataError(
                f"`{name}` must be a list of dicts, got {type(found).__name__}; decode a JSON "
                "string, or turn a dict of lists into a list of dicts"
            )
        if name == "conversations":
            found = [_read_sharegpt(m, f"conversations[{i}]") for i, m in enumerate(found)]
        return list(found), 0
    if prompt is None:
        return _alpaca_messages(example), 0
    if isinstance(prompt, (list, tuple)) and isinstance(completion, (list, tuple, type(None))):
        return [*prompt, *(completion or [])], len(prompt)
    raise DataError(
        "`prompt` and `completion` must be two strings or two lists of messages, got "
        f"{type(prompt).__name__} and {type(completion).__name__}; convert one of them"
    )


def _read_sharegpt(found: Any, where: str) -> Any:
    if not isinstance(found, Mapping) or ("from" not in found and "role" in found):
        return found  # has `role` and `content`, or is refused as a message
    speaker, value = found.get("from"), found.get("value")
    role = _SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        known = ", ".join(_SHAREGPT_ROLES)
        raise DataError(f"{where} is from {speaker!r}, which is not one of {known}; rename it")
    if not isinstance(value, str):
        raise DataError(f"{where} `value` must be text, got {value!r:.60}; convert or rename it")
    rest = {k: v for k, v in found.items() if k not in ("from", "value")}
    if speaker != "function_call":
        return {**rest, "role": role, "content": value}
    try:
        loaded = json.loads(value)
    except ValueError as error:
        raise DataError(
            f"{where} is a function_call, but its value {value!r:.60} is not JSON ({error}); "
            "fix it, or give it as text from gpt"
        ) from error
    functions = loaded if isinstance(loaded, list) else [loaded]
    if not all(isinstance(f, dict) and set(f) == {"name", "arguments"} for f in functions):
        raise DataError(
            f"{where} is a function_call, so its value must be the JSON of a dict with `name` "
            f"and `arguments`, got {value!r:.60}; fix it, or give it as text from gpt"
        )
    calls = [{"type": "function", "function": function} for function in functions]
    return {**rest, "role": role, "content": None, "tool_calls": calls}


def _alpaca_messages(example: Mapping[str, Any]) -> list[Any]:
    columns = {name: example.get(name) for name in ("instruction", "input", "output")}
    if columns["instruction"] is None:
        given = sorted(key for key, value in example.items() if value is not None)
        raise DataError(
            f"no `messages` and no `instruction` in the columns {given}; rename the chat column to "
            "`messages`, or give `conversations` (ShareGPT), `prompt` and `completion`, or "
            "`instruction` and `output` (Alpaca); raw texts are for chat.tokenize_documents"
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


def images_of_record(
    messages: Sequence[dict[str, Any]], example: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[ImageSource]]:
    """Return messages with ``{"type": "image"}`` for each image, and the images in order.

    An image is in its part, or it is the next of the column ``images`` (or ``image``). Where there
    is such a column, ``<image>`` in a content that is a string is an image part, too.
    """
    column, given = _column(example)
    found: list[ImageSource | None] = []  # None: the next of the column
    read = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str) and given is not None and _MARKER in content:
            texts = [[{"type": "text", "text": t}] if t else [] for t in content.split(_MARKER)]
            content = [part for text in texts for part in ({"type": "image"}, *text)][1:]
        if isinstance(content, list) and any(map(_is_media, content)):
            media = [(j, part) for j, part in enumerate(content) if _is_media(part)]
            found += [_source(part, f"messages[{i}] content[{j}]") for j, part in media]
            parts = [{"type": "image"} if _is_image(part) else part for part in content]
            message = {**message, "content": parts}
        read.append(message)
    missing = found.count(None)
    if missing != len(given or ()):
        raise DataError(
            f"the messages have {missing} image parts (or {_MARKER} markers) without an image of "
            f"their own, and {f'`{column}` has {len(given)}' if given else 'there are no'} images; "
            "each part needs one, in order"
        )
    names = [f"`{column}`[{k}]" if column == "images" else f"`{column}`" for k in range(missing)]
    rest = map(ImageSource, names, given or ())
    return read, [next(rest) if source is None else source for source in found]


def _column(example: Mapping[str, Any]) -> tuple[str, Sequence[Any] | None]:
    """Return the name of the column with images, and its images; None without a column."""
    for name in ("videos", "video", "audios", "audio"):
        if example.get(name) is not None and len(example[name]):
            raise DataError(f"`{name}` is given, but only images are processed; remove it")
    images, image = example.get("images"), example.get("image")
    if image is None:
        if not isinstance(images, (list, tuple, type(None))):
            raise DataError(
                f"`images` must be a list, got {type(images).__name__}; put one image into a list, "
                "or rename the column to `image`"
            )
        return "images", images
    if images is not None:
        raise DataError("`images` and `image` are both given; keep one of the two columns")
    if isinstance(image, (list, tuple)):
        raise DataError("`image` is a list; rename the column to `images`")
    return "image", [image]


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


def read_parts(content: list[Any], where: str) -> tuple[list[Any], str | None]:
    """Return the parts after the thinking, and the thinking, which comes first, or None."""
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
    """Return the parts other than text, thinking and images, each with its name for errors."""
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
    """Yield every key and leaf of a value: ("key", of a mapping), ("value", anything else)."""
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
