"""Expansion of a rendered chat: all placeholders of its images, and the processor's fields."""

from __future__ import annotations

import copy
import inspect
import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_collate_kit.errors import DataError
from torch_collate_kit.vision.families import PIXEL_FIELDS, vision_family_of
from torch_collate_kit.vision.images import ImageFiles, image_files
from torch_collate_kit.vision.layout import VisionLayout

_Fields = dict[str, np.ndarray]
_Places = list[tuple[int, int]]
_BEGIN, _END = "\U00100000", "\U00100001"  # no rendered chat has these characters
_MARKS = re.compile(f"[{_BEGIN}{_END}]")
# Tokens around a placeholder that belong to the image.
_OPENINGS = ("<|vision_start|>", "<|begin_of_image|>")
_CLOSINGS = ("<|vision_end|>", "<|end_of_image|>")
_WITHOUT_CHATS = {
    "other": "is not in the table of families (docs/vision.md), so its placeholders are unknown",
    "paligemma": "has no conversations, but a prompt and its `suffix`",
}


@dataclass(frozen=True)
class Expansion:
    """A text for the tokenizer, and the fields of its images.

    ``places``: first character and last + 1 of each placeholder before expansion; ``spans``: of the
    placeholders that the processor writes for it; ``images``: of these with opening and closing
    tokens. ``fields`` have the form of ``VisionLayout.family.fields``, ``rows`` are the rows of
    each image in them, int64 [N].
    """

    text: str
    places: _Places
    spans: _Places
    images: _Places
    fields: _Fields
    rows: _Fields

    def moved(self, place: int) -> int:
        """Return the place of a character of the text before expansion."""
        last = max((i for i, (_, end) in enumerate(self.places) if end <= place), default=None)
        return place if last is None else self.spans[last][1] + place - self.places[last][1]

    def first(self, count: int) -> _Fields:
        """Return the fields of the first ``count`` images."""
        if count == len(self.images):
            return self.fields
        if count == 0:
            return {}
        kept = {name: self.fields[name][: rows[:count].sum()] for name, rows in self.rows.items()}
        if "batch_num_images" in self.fields:
            kept["batch_num_images"] = np.array([count])
        return kept


class ImageProcessing(NamedTuple):
    """A processor, its layout and placeholder in chat templates, and how images are read."""

    processor: Any
    layout: VisionLayout
    placeholder: str
    files: ImageFiles
    pixels: bool
    """Whether pixels are wanted, or only fields that follow from the sizes."""

    def expand(self, text: str, sources: Sequence[tuple[str, Any]]) -> Expansion:
        """Write all placeholders of ``sources``: (name for messages, image) pairs."""
        places = [match.span() for match in re.finditer(re.escape(self.placeholder), text)]
        if len(places) != len(sources):
            raise DataError(
                f"the text has {len(places)} placeholders {self.placeholder!r} for "
                f"{len(sources)} images; a text of the record must not have the placeholder"
            )
        token = self.processor.tokenizer.convert_ids_to_tokens(self.layout.image_token_id)
        if not places:
            _check_no_token(text, token)
            return Expansion(text, [], [], [], {}, {})
        if self._from_sizes:  # arrays of their sizes, which take no memory
            sizes = [(*self.files.size(source, where), 3) for where, source in sources]
            images: list[Any] = [np.broadcast_to(np.uint8(0), size) for size in sizes]
        else:
            images = [self.files.load(source, where) for where, source in sources]
        pieces, output = self._process(text, images)
        expanded, edges = "".join(pieces), [0, *itertools.accumulate(map(len, pieces))]
        spans = list(zip(edges[1:-1:2], edges[2::2], strict=True))
        for outside in pieces[::2]:
            _check_no_token(outside, token)
        tokens = np.array([expanded.count(token, *span) for span in spans])
        fields, rows = self._flat_fields(output, tokens)
        whole = [_with_ends(expanded, *span) for span in spans]
        return Expansion(expanded, places, spans, whole, fields, rows)

    def smallest(self) -> _Fields:
        """Return the fields of a small image."""
        fields = self.layout.smallest()
        found = {name: fields[name] for name in self._wanted(fields)}
        return found or {"num_tiles": np.ones(1, dtype=np.int64)}

    @property
    def _from_sizes(self) -> bool:
        """Whether the processor is called with sizes only; Gemma-3 crops by pixel values."""
        defaults = getattr(self.processor, "images_kwargs", None) or {}
        is_cropped = getattr(self.processor.image_processor, "do_pan_and_scan", None)
        return not self.pixels and not (is_cropped or defaults.get("do_pan_and_scan"))

    def _process(self, text: str, images: list[Any]) -> tuple[list[str], Any]:
        """Return the pieces of text (every other one is an image's) and the processor's output."""
        processor = copy.copy(self.processor)
        processor.tokenizer = recorder = _Recorder(self.processor.tokenizer)
        if self._from_sizes:
            processor.image_processor = SizesOnly(self.processor.image_processor, self.layout)
        marked = text.replace(self.placeholder, _BEGIN + self.placeholder + _END)
        try:
            output = processor(
                text=[marked],
                images=[images],
                add_special_tokens=False,
                return_tensors=None if self._from_sizes else "pt",
                **({} if self._from_sizes else {"do_convert_rgb": True}),
            )
        except (ValueError, TypeError, ZeroDivisionError) as error:
            shapes = [getattr(image, "shape", None) or image.size[::-1] for image in images]
            sizes = ", ".join(f"{height} x {width}" for height, width, *_ in shapes)
            raise DataError(
                f"{type(self.processor).__name__} refuses the images of {sizes} pixels: {error}; "
                "resize or remove them"
            ) from error
        marks, pieces = "".join(_MARKS.findall(recorder.text)), _MARKS.split(recorder.text)
        if marks != (_BEGIN + _END) * len(images) or pieces[::2] != text.split(self.placeholder):
            raise ValueError(
                f"{type(self.processor).__name__} changes the text around images, so trained "
                "tokens cannot be found; call it yourself, and pass its output to a collator"
            )
        return pieces, output

    def _flat_fields(self, output: Any, tokens: np.ndarray) -> tuple[_Fields, _Fields]:
        """Return the fields with tiles laid flat, and the rows of each image in them."""
        layout, family, kinds = self.layout, self.layout.family, self.layout.family.fields
        found = {name: np.asarray(output[name]) for name in self._wanted(kinds) if name in output}
        is_counted = family.has_grids or family.has_sizes
        if is_counted:
            expected, patches, tiles = layout.units(found)
        else:  # Gemma-3 may cut crops out of an image, so that it has several, too
            tiles = patches = tokens // layout.tile_tokens
            expected = tiles * layout.tile_tokens
        if (expected != tokens).any():
            raise ValueError(
                f"{type(self.processor).__name__} writes {tokens.tolist()} placeholders for the "
                f"images, but {expected.tolist()} are expected of {layout.family_name}; check its "
                "settings against the model's"
            )
        ones = np.ones_like(tiles)
        per = {"patch": patches, "tile": tiles, "image": ones if is_counted else tiles}
        rows = {name: per[kinds[name].per] for name in found if kinds[name].per in per}
        for name, parts in found.items():
            if parts.ndim > kinds[name].num_dims:  # [images, most tiles, ...], or [1, tiles, ...]
                counts = [int(tiles.sum())] if family.joins_tiles else tiles.tolist()
                flat = [part[:count] for part, count in zip(parts, counts, strict=True)]
                found[name] = flat[0] if len(flat) == 1 else np.concatenate(flat)
        if not self.pixels and not is_counted:
            found["num_tiles"], rows["num_tiles"] = tiles, ones
        return found, rows

    def _wanted(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self.pixels or name not in PIXEL_FIELDS]


def image_processing(processor: Any, files: ImageFiles, pixels: bool) -> ImageProcessing:
    """Return how a processor expands conversations; ValueError if it is not supported."""
    layout = VisionLayout.of(processor)
    name = type(processor).__name__
    if layout.family_name in _WITHOUT_CHATS:
        raise ValueError(
            f"{name} {_WITHOUT_CHATS[layout.family_name]}; call it yourself, and pass its output "
            "to a collator"
        )
    if not processor.tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer of {name} is {type(processor.tokenizer).__name__}, which has no "
            "character offsets; load its fast version"
        )
    placeholder = processor.boi_token if layout.family_name == "gemma3" else processor.image_token
    return ImageProcessing(processor, layout, placeholder, files, pixels)


def _check_no_token(text: str, token: str) -> None:
    if token in text:
        raise DataError(
            f"a text of the record has {token!r}, which stands for a part of an image; remove it"
        )


class _Recorder:
    """A tokenizer that keeps the text it is called with."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.text = tokenizer, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any, **options: Any) -> Any:
        [self.text] = [text] if isinstance(text, str) else text
        return self._tokenizer(text, **options)


def _with_ends(text: str, start: int, end: int) -> tuple[int, int]:
    """Extend the span by the tokens that open and close an image."""
    opening = next((token for token in _OPENINGS if text.endswith(token, 0, start)), "")
    closing = next((token for token in _CLOSINGS if text.startswith(token, end)), "")
    return start - len(opening), end + len(closing)


def image_grid(image: Any, processor: Any) -> npt.NDArray[np.int64]:
    """Return the ``image_grid_thw`` row of an image: frames, patches down and across; int64 [3].

    Reads only the header of a file. ``image`` is a path, bytes, a data URI, a PIL image, or the
    dict of a ``datasets.Image`` column. Qwen-VL and GLM-V models have grids; an image has as many
    patches as the product, and that divided by ``merge_size`` squared tokens.

    Raises:
        DataError: no readable image, or one that the processor refuses.
        ValueError: the processor makes no grids.
        ImportError: Pillow is not installed.

    >>> image_grid("photo.jpg", processor=None)
    Traceback (most recent call last):
    ValueError: NoneType makes no image_grid_thw; image_grid is for processors of Qwen-VL and GLM-V
    """
    if not vision_family_of(processor).has_grids:
        raise ValueError(
            f"{type(processor).__name__} makes no image_grid_thw; image_grid is for processors of "
            "Qwen-VL and GLM-V"
        )
    height, width = image_files().size(image, "the image")
    try:
        return _grid_of_size(processor.image_processor, height, width)
    except ValueError as error:
        raise DataError(f"the processor refuses {height} x {width} pixels: {error}") from error


def _grid_of_size(images: Any, height: int, width: int) -> npt.NDArray[np.int64]:
    """Return the grid of the image processor ``images`` for an image of this size; int64 [3]."""
    side = int(images.patch_size)
    if images.do_resize:
        resize = _smart_resize(images)
        size, options = images.size, {}
        if "num_frames" in inspect.signature(resize).parameters:  # GLM
            frames = int(images.temporal_patch_size)
            options = {"num_frames": frames, "temporal_factor": frames}
        height, width = resize(
            height=height,
            width=width,
            factor=side * int(images.merge_size),
            min_pixels=_edge(size, "shortest_edge"),
            max_pixels=_edge(size, "longest_edge"),
            **options,
        )
    return np.array([1, height // side, width // side])


def _smart_resize(images: Any) -> Any:
    """Return the function of the image processor's module that computes the size."""
    for base in type(images).__mro__:
        module = sys.modules[base.__module__]
        if hasattr(module, "smart_resize"):
            return module.smart_resize
    raise ValueError(
        f"the module of {type(images).__name__} has no smart_resize, so sizes are known only from "
        "the pixels; pass pixels=True"
    )


def _edge(size: Any, name: str) -> int:
    return int(size[name] if isinstance(size, dict) else getattr(size, name))


class SizesOnly:
    """Stand-in for an image processor: all fields but pixels, from arrays [height, width, ...]."""

    def __init__(self, images: Any, layout: VisionLayout) -> None:
        self._images, self._layout = images, layout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._images, name)

    def fetch_images(self, images: Any) -> Any:
        """Return the images: there is nothing to load."""
        return images

    def __call__(self, images: Any, **options: Any) -> dict[str, Any]:
        """Return the fields, with pixels that take no memory."""
        sizes = [image.shape[:2] for image in _images_of(images)]
        family = self._layout.family
        if family.has_grids:
            grids = [_grid_of_size(self._images, *size) for size in sizes]
            return {"image_grid_thw": np.stack(grids)}
        if family.name == "gemma3":
            return {"num_crops": [0] * len(sizes)}
        if family.has_sizes:  # they read the size of a tile from the tiles
            side = self._layout.tile_size
            fields = {
                "pixel_values": np.broadcast_to(np.float32(0), (1, 1, 3, side, side)),
                "image_sizes": np.array(sizes, dtype=np.int64),
            }
            more = {"batch_num_images": np.array([len(sizes)])}
            return fields | (more if "batch_num_images" in family.fields else {})
        counts = [self._images.get_number_of_image_patches(*size, options) for size in sizes]
        if family.name == "internvl":
            return {"num_patches": counts, "pixel_values": np.empty((sum(counts), 0))}
        return {"rows": [[rows for _, rows, _ in counts]], "cols": [[cols for *_, cols in counts]]}


def _images_of(images: Any) -> list[np.ndarray]:
    if isinstance(images, Sequence):
        return [image for inner in images for image in _images_of(inner)]
    return [images]
