"""The images of a record: found in its messages and columns, in the order of the messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch_collate_kit.errors import DataError
from torch_collate_kit.vision.images import decoded_base64

__all__ = ["ImageSource", "num_images", "read_images"]

_MARKER = "<image>"
_TYPES = ("image", "image_url")
_KEYS = ("image", "path", "url", "image_url", "base64")
_OTHER_MEDIA = ("video", "audio")


class ImageSource(NamedTuple):
    """What errors call an image, and the image as the record has it."""

    where: str
    image: Any


def num_images(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many image parts messages have."""
    contents = (m["content"] for m in messages if isinstance(m.get("content"), list))
    return sum(_is_image(part) for content in contents for part in content)


def read_images(
    messages: Sequence[dict[str, Any]], example: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[ImageSource]]:
    """The messages with ``{"type": "image"}`` for each image, and the images in their order.

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
    """The images, those of the column in their places."""
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
    """The name of the column with images, and its images; None without a column."""
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
    return isinstance(part, Mapping) and part.get("type") in _TYPES


def _is_media(part: Any) -> bool:
    """An image, or what is refused: a video or audio."""
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    return kind in _TYPES or (isinstance(kind, str) and any(m in kind for m in _OTHER_MEDIA))


def _source(part: Mapping[str, Any], where: str) -> ImageSource | None:
    """The image inside a part, None if it has none."""
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
