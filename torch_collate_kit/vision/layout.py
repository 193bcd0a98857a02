"""What a collator must know of a vision-language model: one small object."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_collate_kit._reprs import dataclass_repr
from torch_collate_kit.vision.families import (
    FAMILIES,
    OTHER,
    PIXEL_FIELDS,
    Family,
    ImageField,
    family_of,
    sharing_models,
)

__all__ = ["ImageUnits", "VisionLayout", "is_no_image"]

_Ints = npt.NDArray[np.int64]
_BY_NAME = {family.name: family for family in (*FAMILIES, OTHER)}


class ImageUnits(NamedTuple):
    """The images of one example, or their tiles where images cannot be told apart; int64 [U]."""

    tokens: _Ints
    """Placeholders of each."""
    patches: _Ints
    """What it counts in ``max_patches``: patches, or tiles in families that cut images up."""
    tiles: _Ints
    """Its tiles; 1 in families without tiles."""

    def entries(self, per: str) -> _Ints:
        """Entries of each in a field that has one per "patch", "tile" or "image"; int64 [U]."""
        return {"patch": self.patches, "tile": self.tiles}.get(per, np.ones_like(self.tokens))


@dataclass(frozen=True)
class VisionLayout:
    """How a model's images become tokens and columns; immutable, hashable, small.

    Collators make it from a processor that they get as their first argument. Pass it yourself, with
    the model's config, to pack where several models have the same processor (Qwen3.5 has that of
    Qwen3-VL), or for another ``pixel_dtype``:
    ``PackedCollator(processor, vision=VisionLayout.of(processor, model.config))``.

    Raises:
        ValueError: an unknown family or dtype.

    >>> qwen = VisionLayout("qwen3_vl", image_token_id=9, merge_size=2)
    >>> qwen.units({"image_grid_thw": np.array([[1, 4, 6]])}).tokens.tolist()
    [6]
    """

    family_name: str
    image_token_id: int | None
    """The placeholder that an image's features replace."""
    pixel_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What pixels are stored and given to the model in."""
    merge_size: int = 1
    """Patches a side that become one token."""
    patch_shape: tuple[int, int, int] = (3, 2, 196)
    """Channels, frames and pixels of a flat patch. Still images repeat the same frame."""
    tile_size: int = 0
    """Pixels a side of a tile, or of the one size that images have."""
    tile_tokens: int = 0
    """Placeholders of a tile, or of an image in families of one size."""
    tile_side: int = 0
    """Patches a side of a tile (LLaVA)."""
    pinpoints: tuple[tuple[int, int], ...] = ()
    """Sizes that an image is resized to (LLaVA)."""
    max_tiles: int = 0
    """Tiles above which features are scaled down (LLaVA-OneVision)."""
    other_fields: tuple[str, ...] = ()
    """The image processor's fields, of a family that is not in the table."""
    token_fields: tuple[str, ...] = ()
    """What its processor adds to these, with one entry per token (``mm_token_type_ids``)."""
    shared_by: tuple[str, ...] = field(default=(), compare=False)
    """Model types that have this processor, where no config said which of them it is. Their padded
    batches are the same; packing is refused."""

    def __post_init__(self) -> None:
        if self.family_name not in _BY_NAME:
            known = ", ".join(family.name for family in FAMILIES)
            raise ValueError(f"family {self.family_name!r} is unknown; known are {known}")
        if self.pixel_dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(
                f"pixel_dtype must be 'float32', 'bfloat16' or 'float16', got {self.pixel_dtype!r}"
            )
        if self.family.refused:
            raise ValueError(f"{self.family_name} models are not supported: {self.family.refused}")

    def __repr__(self) -> str:
        return dataclass_repr(self)

    @classmethod
    def of(
        cls, processor: Any, config: Any = None, *, pixel_dtype: Any = "float32"
    ) -> VisionLayout:
        """The layout of a transformers processor, and of a model's config where that says more.

        Raises:
            TypeError: no processor with an ``image_processor``.
            ValueError: a family that is not supported; a processor and a config of two models.
        """
        images = getattr(processor, "image_processor", None)
        if images is None:
            raise TypeError(
                f"expected a processor with an image_processor, got {type(processor).__name__}; "
                "load it with AutoProcessor.from_pretrained, or see load_processor"
            )
        family = family_of(processor, config)
        _check_config(processor, images, config)
        settings: dict[str, Any] = {
            "family_name": family.name,
            "image_token_id": _image_token_id(processor),
            "pixel_dtype": str(pixel_dtype).removeprefix("torch."),
            "shared_by": sharing_models(processor) if config is None else (),
        }
        if family.has_grids:
            settings["merge_size"] = int(images.merge_size)
            size = int(images.patch_size)
            settings["patch_shape"] = (3, int(images.temporal_patch_size), size * size)
        elif family.has_sizes:
            settings |= _llava_settings(processor, images)
        elif family.name == "other":
            settings |= _unknown_settings(processor, images, config)
        elif family.fields:
            settings["tile_size"] = _side(images)
            names = ("image_seq_length", "image_seq_len")
            found = (getattr(of, name, None) for of in (processor, images) for name in names)
            settings["tile_tokens"] = next((int(n) for n in found if n is not None), 0)
        return cls(**settings)

    @property
    def family(self) -> Family:
        """The row of the table."""
        return _BY_NAME[self.family_name]

    @property
    def fields(self) -> dict[str, ImageField]:
        """The vision fields of a processed example."""
        unknown = {name: ImageField("unknown", 0, "iufb") for name in self.other_fields}
        return unknown or self.family.fields

    @property
    def has_mrope(self) -> bool:
        """Whether a token has three positions."""
        return self.family.positions == "mrope"

    @property
    def counts_images(self) -> bool:
        """Whether the fields tell images from each other, not only tiles."""
        return any(field.per == "image" for field in self.fields.values())

    def units(self, fields: Mapping[str, np.ndarray]) -> ImageUnits:
        """The images of one example, by the processor's fields of it, with tiles laid flat.

        Fields without pixels are those of ``tokenize_chat(..., pixels=False)``. An example without
        any of them has no images.

        >>> VisionLayout("qwen3_vl", image_token_id=9).units({"input_ids": [5]}).patches.tolist()
        []
        """
        if not any(name in fields for name in (*self.fields, "num_tiles")):
            return ImageUnits(*(np.zeros(0, dtype=np.int64) for _ in ImageUnits._fields))
        if self.family.has_grids:
            patches = fields["image_grid_thw"].astype(np.int64).prod(axis=1)
            return ImageUnits(patches // self.merge_size**2, patches, np.ones_like(patches))
        if self.family.has_sizes:
            is_cut = int(fields.get("batch_num_images", np.ones(1))[0]) == 1
            sizes = [tuple(size) for size in fields["image_sizes"].tolist()]
            counts = [self.of_size(height, width, is_cut=is_cut) for height, width in sizes]
            tokens, tiles = np.array(counts, dtype=np.int64).reshape(-1, 2).T
            return ImageUnits(tokens, tiles, tiles)
        if self.family_name == "other":  # only that there are some
            one = np.ones(1, dtype=np.int64)
            return ImageUnits(one, one, one)
        if "pixel_values" in fields:
            count = len(fields["pixel_values"])
        else:
            count = int(fields["num_tiles"].sum())
        ones = np.ones(count, dtype=np.int64)
        return ImageUnits(ones * self.tile_tokens, ones, ones)

    def patches(self, example: Mapping[str, Any]) -> list[int]:
        """Patches of each image of a processed example, or of one prepared without its pixels.

        Tiles, in families that cut images up. An example without images has none.

        >>> VisionLayout("qwen3_vl", image_token_id=9).patches({"image_grid_thw": [[1, 4, 6]]})
        [24]
        """
        small = {*self.fields, "num_tiles"}.difference(PIXEL_FIELDS)
        given = {k: value for k, value in example.items() if not is_no_image(value)}
        fields = {k: np.asarray(given[k]) for k in small if k in given}
        pixels = given.get("pixel_values")
        if not fields and pixels is not None:  # the number of tiles is enough
            mask = given.get("pixel_attention_mask")
            count = len(pixels) if np.ndim(pixels[0]) == 3 else len(pixels) * len(pixels[0])
            if mask is not None and np.ndim(mask) == 4:  # tiles that are padding are masked
                count = int(np.asarray(mask).any(axis=(2, 3)).sum())
            fields["num_tiles"] = np.array([count])
        patches: list[int] = self.units(fields).patches.tolist()
        return patches

    def of_size(self, height: int, width: int, *, is_cut: bool = True) -> tuple[int, int]:
        """Placeholders and tiles of an image of this size in pixels (LLaVA).

        ``is_cut``: LLaVA-OneVision cuts no image where an example has several.
        """
        if self.family_name == "llava_onevision" and not is_cut:
            return self.tile_tokens + 1, 1
        return _llava_counts(self, height, width)

    @property
    def smallest_tokens(self) -> int:
        """Placeholders of the smallest image."""
        return int(self.units(self.smallest()).tokens.sum())

    def smallest(self) -> dict[str, np.ndarray]:
        """The fields of the smallest image, for a batch that needs one and has none."""
        if self.family.has_grids:
            side, (channels, frames, pixels) = self.merge_size, self.patch_shape
            return {
                "pixel_values": np.zeros((side * side, channels * frames * pixels), np.float32),
                "image_grid_thw": np.array([[1, side, side]]),
            }
        size, fields = self.tile_size, {}
        if self.family.has_sizes:
            fields["image_sizes"] = np.array([[size, size]])
            if self.family_name == "llava_onevision":
                fields["batch_num_images"] = np.array([1])
        tiles = self.of_size(size, size)[1] if fields else 1
        # Idefics3 takes a tile of zeros for padding
        fields["pixel_values"] = np.ones((tiles, 3, size, size), np.float32)
        if "pixel_attention_mask" in self.family.fields:
            fields["pixel_attention_mask"] = np.ones((1, size, size), np.int64)
        return fields


def is_no_image(entry: Any) -> bool:
    """Whether an entry of a field stands for no image: None, or empty (a single number is not)."""
    if entry is None:
        return True
    return hasattr(entry, "__len__") and getattr(entry, "ndim", 1) != 0 and len(entry) == 0


def _check_config(processor: Any, images: Any, config: Any) -> None:
    """That processor and config may be of one model: families of one kind, patches of one size."""
    if config is None:
        return
    ours, theirs = family_of(processor), family_of(config=config)
    model, name = getattr(config, "model_type", None), type(processor).__name__
    if OTHER not in (ours, theirs) and ours.fields != theirs.fields:
        raise ValueError(
            f"{name} returns {', '.join(ours.fields) or 'other fields'}, and {model} models take "
            f"{', '.join(theirs.fields) or 'others'}; load processor and config of the same model"
        )
    if not ours.has_grids:
        return
    tower = getattr(config, "vision_config", None)
    for one, other in (("patch_size",) * 2, ("merge_size", "spatial_merge_size")):
        cut, taken = getattr(images, one, None), getattr(tower, other, None)
        if cut is not None and taken is not None and cut != taken:
            raise ValueError(
                f"{name} has {one}={cut}, the {model} config says {other}={taken}; load "
                "processor and config of the same model"
            )


def _image_token_id(processor: Any) -> int | None:
    """The id of the placeholder, if the processor or its tokenizer says it."""
    tokenizer = getattr(processor, "tokenizer", None)
    for owner in (tokenizer, processor):  # Gemma-3's processor says the token that opens an image
        found = getattr(owner, "image_token_id", None)
        if isinstance(found, int):
            return found
    token = getattr(processor, "image_token", None)
    if isinstance(token, str) and tokenizer is not None:
        return int(tokenizer.convert_tokens_to_ids(token))
    return None


def _unknown_settings(processor: Any, images: Any, config: Any) -> dict[str, Any]:
    """Return what is known of a family that is not in the table."""
    settings: dict[str, Any] = {
        "other_fields": tuple(getattr(images, "model_input_names", ())),
        "token_fields": _token_fields(processor),
    }
    for name in ("image_token_index", "image_token_id"):  # Ovis2's processor says another one
        if isinstance(found := getattr(config, name, None), int):
            settings["image_token_id"] = found
    return settings


def _token_fields(processor: Any) -> tuple[str, ...]:
    """What a processor returns that none of its parts does: fields with one entry per token."""
    parts = ("tokenizer", "image_processor", "video_processor", "feature_extractor")
    of_parts = {"input_ids", "attention_mask", "labels"}
    for part in parts:
        of_parts |= set(getattr(getattr(processor, part, None), "model_input_names", ()))
    names = [name for name in getattr(processor, "model_input_names", ()) if name not in of_parts]
    if getattr(processor, "return_mm_token_type_ids", False):  # PaddleOCR-VL does not list it
        names.append("mm_token_type_ids")
    return tuple(dict.fromkeys(names))


def _side(images: Any) -> int:
    """Pixels a side of a tile."""
    largest = getattr(images, "max_image_size", None)  # Idefics3 resizes before it cuts
    size: Any = largest if largest else images.size
    for key in ("longest_edge", "height", "shortest_edge"):
        value = size.get(key) if isinstance(size, Mapping) else getattr(size, key, None)
        if value:
            return int(value)
    return int(size)


def _llava_settings(processor: Any, images: Any) -> dict[str, Any]:
    size = _side(images)
    lost = int(processor.vision_feature_select_strategy == "default")
    if hasattr(processor, "num_image_tokens"):  # LLaVA-OneVision
        side = math.isqrt(int(processor.num_image_tokens))
        tokens = int(processor.num_image_tokens) - lost
        max_tiles = int(str(processor.vision_aspect_ratio).removeprefix("anyres_max_"))
    else:
        side = size // int(processor.patch_size)
        tokens = side * side + int(processor.num_additional_image_tokens) - lost
        max_tiles = 0
    return {
        "tile_size": size,
        "tile_side": side,
        "tile_tokens": tokens,
        "pinpoints": tuple((int(h), int(w)) for h, w in images.image_grid_pinpoints),
        "max_tiles": max_tiles,
    }


@lru_cache(maxsize=4096)
def _llava_counts(layout: VisionLayout, height: int, width: int) -> tuple[int, int]:
    """Tokens and tiles: the whole image, and its tiles without their padding, a newline per row."""
    from transformers.image_processing_utils import select_best_resolution

    best = select_best_resolution((height, width), list(layout.pinpoints))
    down, across = (int(side) // layout.tile_size for side in best)
    rows, columns = layout.tile_side * down, layout.tile_side * across
    if width * rows > height * columns:  # wider than the tiles: padded above and below
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    if layout.max_tiles:
        ratio = math.sqrt(rows * columns / (layout.max_tiles * layout.tile_side**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
    return layout.tile_tokens + rows * columns + rows, 1 + down * across
