"""How the images of a vision-language model become tokens and columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from torch_collate_kit._checks import dataclass_repr
from torch_collate_kit.vision.families import (
    FAMILIES,
    OTHER,
    PIXEL_FIELDS,
    ImageField,
    VisionFamily,
    layout_settings,
)

PixelDtype: TypeAlias = Literal["float32", "bfloat16", "float16"] | torch.dtype
_Ints = npt.NDArray[np.int64]
_BY_NAME = {family.name: family for family in (*FAMILIES, OTHER)}


class ImageUnits(NamedTuple):
    """The images of one example, or their tiles where only tiles are known; int64 [U] each."""

    tokens: _Ints
    """Placeholders of each."""
    patches: _Ints
    """Count of each in ``max_patches``: patches, or tiles in families that cut images up."""
    tiles: _Ints
    """Tiles of each; 1 in families without tiles."""

    def entries(self, per: str) -> _Ints:
        """Return the entries of each in a field per "patch", "tile" or "image"; int64 [U]."""
        return {"patch": self.patches, "tile": self.tiles}.get(per, np.ones_like(self.tokens))


@dataclass(frozen=True)
class VisionLayout:
    """How a model's images become tokens and columns; immutable, hashable, small.

    Collators make it from a processor as their first argument. Pass it yourself, with the model's
    config, to pack where several models share a processor (Qwen3.5 and Qwen3-VL), or for another
    ``pixel_dtype``: ``PackedCollator(processor, vision=VisionLayout.of(processor, model.config))``.

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
    """The dtype of pixels in batches."""
    merge_size: int = 1
    """Patches per side that become one token."""
    patch_shape: tuple[int, int, int] = (3, 2, 196)
    """Channels, frames and pixels of a flat patch. Still images repeat the same frame."""
    tile_size: int = 0
    """Pixels per side of a tile, or of an image in families of one size."""
    tile_tokens: int = 0
    """Placeholders of a tile, or of an image in families of one size."""
    tile_side: int = 0
    """Patches per side of a tile (LLaVA)."""
    pinpoints: tuple[tuple[int, int], ...] = ()
    """Sizes that an image is resized to (LLaVA)."""
    max_tiles: int = 0
    """Tiles above which features are scaled down (LLaVA-OneVision)."""
    other_fields: tuple[str, ...] = ()
    """Fields of the image processor, for a family that is not in the table."""
    token_fields: tuple[str, ...] = ()
    """Further fields of its processor, with one entry per token (``mm_token_type_ids``)."""
    shared_by: tuple[str, ...] = field(default=(), compare=False)
    """Model types that share the processor, if no config was given. Packing is refused."""

    def __post_init__(self) -> None:
        if self.family_name not in _BY_NAME:
            known = ", ".join(family.name for family in FAMILIES)
            raise ValueError(f"family {self.family_name!r} is unknown; known families are {known}")
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
        cls, processor: Any, config: Any = None, *, pixel_dtype: PixelDtype = "float32"
    ) -> VisionLayout:
        """Make the layout of a transformers processor, and of the model's config if given.

        Raises:
            TypeError: not a processor with an ``image_processor``.
            ValueError: a family that is not supported; a processor and a config of two models.
        """
        settings = layout_settings(processor, config)
        settings["pixel_dtype"] = str(pixel_dtype).removeprefix("torch.")
        return cls(**settings)

    @property
    def family(self) -> VisionFamily:
        """The family's row of the table."""
        return _BY_NAME[self.family_name]

    @property
    def fields(self) -> dict[str, ImageField]:
        """The vision fields of a processed example, by name."""
        unknown = {name: ImageField("unknown", 0, "iufb") for name in self.other_fields}
        return unknown or self.family.fields

    @property
    def has_mrope(self) -> bool:
        """Whether a token has three positions."""
        return self.family.positions == "mrope"

    @property
    def counts_images(self) -> bool:
        """Whether the fields count images, not only tiles."""
        return any(field.per == "image" for field in self.fields.values())

    def units(self, fields: Mapping[str, np.ndarray]) -> ImageUnits:
        """Count the images of examples from their processor's fields, with tiles laid flat.

        Fields may lack pixels, as those of ``tokenize_chat(..., pixels=False)``. An example without
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
            sizes, in_examples = fields["image_sizes"].tolist(), fields.get("batch_num_images")
            is_alone = np.ones(len(sizes), dtype=bool)
            if in_examples is not None:
                later = in_examples.cumsum()[:-1]  # the first image of each later example
                owners = np.searchsorted(later, np.arange(len(sizes)), side="right")
                is_alone = in_examples[owners] == 1
            pairs = zip(sizes, is_alone.tolist(), strict=True)
            counts = [_llava_counts(self, *size, alone) for size, alone in pairs]
            tokens, tiles = np.array(counts, dtype=np.int64).reshape(-1, 2).T
            return ImageUnits(tokens, tiles, tiles)
        if self.family_name == "other":  # only that there are some
            one = np.ones(1, dtype=np.int64)
            return ImageUnits(one, one, one)
        pixels = fields.get("pixel_values")
        count = int(fields["num_tiles"].sum()) if pixels is None else len(pixels)
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

    @property
    def smallest_tokens(self) -> int:
        """Placeholders of the smallest image."""
        return int(self.units(self.smallest()).tokens.sum())

    def smallest(self) -> dict[str, np.ndarray]:
        """Return the fields of the smallest image, for a batch that needs one and has none."""
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
        tiles = _llava_counts(self, size, size, True)[1] if fields else 1
        # Idefics3 treats a tile of zeros as padding
        fields["pixel_values"] = np.ones((tiles, 3, size, size), np.float32)
        if "pixel_attention_mask" in self.family.fields:
            fields["pixel_attention_mask"] = np.ones((1, size, size), np.int64)
        return fields


def is_no_image(entry: Any) -> bool:
    """Check whether an entry of a field is None or empty (a single number is not)."""
    is_scalar = not hasattr(entry, "__len__") or getattr(entry, "ndim", 1) == 0
    return entry is None or (not is_scalar and len(entry) == 0)


@lru_cache(maxsize=4096)
def _llava_counts(layout: VisionLayout, height: int, width: int, is_alone: bool) -> tuple[int, int]:
    """Count tokens and tiles: the whole image, and its tiles without padding, a newline per row."""
    if layout.family_name == "llava_onevision" and not is_alone:
        return layout.tile_tokens + 1, 1  # only an image that is alone is cut into tiles
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
