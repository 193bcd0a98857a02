"""The table of vision-language families: processor fields, positions, packing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class ImageField(NamedTuple):
    """A dense field of a vision processor; its first dimension counts patches, tiles or images."""

    per: Literal["patch", "tile", "image", "example", "unknown"]
    num_dims: int
    kinds: str = "iu"
    """Accepted kinds of NumPy dtypes."""


@dataclass(frozen=True)
class VisionFamily:
    """Properties of models of one kind.

    ``positions`` is "mrope" (three rows by the grid of the image, and one that restarts),
    "restarting" (as in text), or "model": the model computes them, so nothing is packed.
    """

    name: str
    processors: tuple[str, ...]
    """Class names; a subclass counts, too."""
    model_types: tuple[str, ...]
    """``config.model_type``."""
    fields: dict[str, ImageField]
    positions: Literal["mrope", "restarting", "model"]
    token_types: str = ""
    """The field of token types that the model needs beside positions; 1 at image tokens."""
    not_packed: str = ""
    """The reason why rows with several examples are refused."""
    refused: str = ""
    """The reason why all batches are refused."""
    joins_tiles: bool = False
    """Whether the fields of the model are ``[1, tiles, ...]``."""

    @property
    def has_grids(self) -> bool:
        """Whether each image has a grid of patches, as in Qwen-VL and GLM-V."""
        return "image_grid_thw" in self.fields

    @property
    def has_sizes(self) -> bool:
        """Whether the number of tiles follows from the size of the image, as in LLaVA."""
        return "image_sizes" in self.fields


_PIXELS = "f"  # whole numbers would not be normalised
_GRID = {
    "pixel_values": ImageField("patch", 2, _PIXELS),
    "image_grid_thw": ImageField("image", 2),
}
_TILES = {"pixel_values": ImageField("tile", 4, _PIXELS)}
_SIZED = {**_TILES, "image_sizes": ImageField("image", 2)}
_MASKED = {**_TILES, "pixel_attention_mask": ImageField("tile", 3, "iufb")}
_IMAGES = {"pixel_values": ImageField("image", 4, _PIXELS)}
_QWEN3_5 = ("qwen3_5", "qwen3_5_moe")  # their processor is Qwen3-VL's, see _SHARED_PROCESSORS

FAMILIES = (
    VisionFamily("qwen2_vl", ("Qwen2VLProcessor",), ("qwen2_vl",), _GRID, "mrope"),
    VisionFamily("qwen2_5_vl", ("Qwen2_5_VLProcessor",), ("qwen2_5_vl",), _GRID, "mrope"),
    VisionFamily("qwen3_vl", ("Qwen3VLProcessor",), ("qwen3_vl", "qwen3_vl_moe"), _GRID, "mrope"),
    VisionFamily("glm4v", ("Glm4vProcessor",), ("glm4v", "glm4v_moe"), _GRID, "mrope"),
    VisionFamily("qwen3_5", (), _QWEN3_5, _GRID, "mrope"),
    VisionFamily("qwen4_exp", (), ("qwen4_exp",), _GRID, "mrope"),
    VisionFamily("internvl", ("InternVLProcessor",), ("internvl",), _TILES, "restarting"),
    VisionFamily(
        "llava_onevision",
        ("LlavaOnevisionProcessor",),
        ("llava_onevision",),
        {**_SIZED, "batch_num_images": ImageField("example", 1)},
        "restarting",
    ),
    VisionFamily("llava_next", ("LlavaNextProcessor",), ("llava_next",), _SIZED, "restarting"),
    VisionFamily(
        "idefics3",
        ("Idefics3Processor", "SmolVLMProcessor"),
        ("idefics3", "smolvlm"),
        _MASKED,
        "restarting",
        joins_tiles=True,
    ),
    VisionFamily(
        "gemma3", ("Gemma3Processor",), ("gemma3",), _IMAGES, "restarting", "token_type_ids"
    ),
    VisionFamily(
        "paligemma",
        ("PaliGemmaProcessor",),
        ("paligemma",),
        _IMAGES,
        "model",
        "token_type_ids",
        not_packed="it takes the prefixes of all examples of a row for one block",
    ),
    VisionFamily(
        "mllama",
        ("MllamaProcessor",),
        ("mllama",),
        {},
        "model",
        refused="a token without an image attends to every image of its row, and transformers "
        "does not run batches that mix examples with and without images",
    ),
)
_SHARED_PROCESSORS: Mapping[str, tuple[str, ...]] = {
    "Qwen3VLProcessor": ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp"),
    "Glm4vProcessor": ("glm4v", "glm4v_moe"),
    "Idefics3Processor": ("idefics3", "modernvbert", "ultravbert"),
    "Gemma3Processor": ("gemma3", "t5gemma2", "t5gemma2_encoder"),
}
"""Processor classes of the table that several models of transformers 5.23 have, and the
``model_type`` of each: only the config tells which it is."""
IMAGE_FIELDS = tuple(dict.fromkeys(name for family in FAMILIES for name in family.fields))
PIXEL_FIELDS = ("pixel_values", "pixel_attention_mask")  # large; the others say what these are
OTHER = VisionFamily(
    "other",
    (),
    (),
    {},
    "model",
    not_packed="they are not in the table of families (docs/vision.md), so the positions that they "
    "need are unknown",
)


def vision_family_of(processor: Any = None, config: Any = None) -> VisionFamily:
    """Return the family by the model's config if given, else by the processor, or OTHER."""
    if config is not None:
        model_type = getattr(config, "model_type", None)
        return next((family for family in FAMILIES if model_type in family.model_types), OTHER)
    names = {base.__name__ for base in type(processor).__mro__}
    return next((family for family in FAMILIES if names & set(family.processors)), OTHER)


def sharing_models(processor: Any) -> tuple[str, ...]:
    """Return the model types that share the class of a processor, if they are several."""
    names = (base.__name__ for base in type(processor).__mro__)
    return next((_SHARED_PROCESSORS[name] for name in names if name in _SHARED_PROCESSORS), ())


def num_kept(fields: Collection[str], count: int, *, of: int) -> int:
    """Return how many of its first ``count`` images an example keeps when the others are cut off.

    LLaVA-OneVision (``batch_num_images``) cuts an image into tiles only if it is alone, so the
    first image of several cannot be kept alone.
    """
    return 0 if "batch_num_images" in fields and count == 1 < of else count
