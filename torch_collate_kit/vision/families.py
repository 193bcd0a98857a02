"""Vision-language families: the table, settings read from a processor and config, and loading."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch_collate_kit._checks import needed_package

_logger = logging.getLogger("torch_collate_kit.vision")


class ImageField(NamedTuple):
    """A dense field of a vision processor; its first dimension counts patches, tiles or images."""

    per: Literal["patch", "tile", "image", "example", "unknown"]
    num_dims: int
    kinds: str = "iu"  # accepted kinds of NumPy dtypes


@dataclass(frozen=True)
class VisionFamily:
    """Properties of the models of one family.

    ``positions`` is "mrope" (three rows by the grid of the image, and one that restarts),
    "restarting" (as in text), or "model": the model computes them, so nothing is packed.
    """

    name: str
    processors: tuple[str, ...]  # class names; a subclass counts, too
    model_types: tuple[str, ...]  # config.model_type
    fields: dict[str, ImageField]
    positions: Literal["mrope", "restarting", "model"]
    token_types: str = ""
    """The field of token types that the model needs beside positions; 1 at image tokens."""
    not_packed: str = ""  # the reason why rows with several examples are refused
    refused: str = ""  # the reason why all batches are refused
    joins_tiles: bool = False  # whether the fields of the model are [1, tiles, ...]

    @property
    def has_grids(self) -> bool:
        """Whether each image has a grid of patches, as in Qwen-VL and GLM-V."""
        return "image_grid_thw" in self.fields

    @property
    def has_sizes(self) -> bool:
        """Whether the number of tiles follows from the size of the image, as in LLaVA."""
        return "image_sizes" in self.fields


_PIXELS = "f"  # whole numbers would not be normalised
_GRID = {"pixel_values": ImageField("patch", 2, _PIXELS), "image_grid_thw": ImageField("image", 2)}
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
        not_packed="it treats the prefixes of all examples of a row as one block",
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
``model_type`` of each: only the config says which it is."""
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
    """Return the number of the first ``count`` images that an example keeps after a cut.

    LLaVA-OneVision (``batch_num_images``) cuts an image into tiles only if it is alone, so the
    first image of several cannot be kept alone.
    """
    return 0 if "batch_num_images" in fields and count == 1 < of else count


def layout_settings(processor: Any, config: Any) -> dict[str, Any]:
    """Return the keyword arguments of ``VisionLayout`` but ``pixel_dtype``."""
    images = getattr(processor, "image_processor", None)
    if images is None:
        raise TypeError(
            f"expected a processor with an image_processor, got {type(processor).__name__}; "
            "load it with AutoProcessor.from_pretrained, or see load_processor"
        )
    _check_config(processor, images, config)
    family = vision_family_of(processor, config)
    settings: dict[str, Any] = {
        "family_name": family.name,
        "image_token_id": _image_token_id(processor),
        "shared_by": sharing_models(processor) if config is None else (),
    }
    if family.has_grids:
        size = int(images.patch_size)
        settings["merge_size"] = int(images.merge_size)
        settings["patch_shape"] = (3, int(images.temporal_patch_size), size * size)
    elif family.has_sizes:
        settings |= _llava_settings(processor, images)
    elif family is OTHER:
        settings |= _unknown_settings(processor, images, config)
    elif family.fields:
        settings["tile_size"] = _side(images)
        names = ("image_seq_length", "image_seq_len")
        found = (getattr(owner, name, None) for owner in (processor, images) for name in names)
        settings["tile_tokens"] = next((int(n) for n in found if n is not None), 0)
    return settings


def _check_config(processor: Any, images: Any, config: Any) -> None:
    """Check that processor and config fit: families of one kind, patches of one size."""
    if config is None:
        return
    ours, theirs = vision_family_of(processor), vision_family_of(config=config)
    model, name = getattr(config, "model_type", None), type(processor).__name__
    if OTHER not in (ours, theirs) and ours.fields != theirs.fields:
        raise ValueError(
            f"{name} returns {', '.join(ours.fields) or 'other fields'}, and {model} models read "
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
    """Return the id of the placeholder, or None."""
    tokenizer = getattr(processor, "tokenizer", None)
    for owner in (tokenizer, processor):  # Gemma-3's processor has the id of the opening token
        found = getattr(owner, "image_token_id", None)
        if isinstance(found, int):
            return found
    token = getattr(processor, "image_token", None)
    if isinstance(token, str) and tokenizer is not None:
        return int(tokenizer.convert_tokens_to_ids(token))
    return None


def _unknown_settings(processor: Any, images: Any, config: Any) -> dict[str, Any]:
    """Return the settings of a family that is not in the table."""
    known = {"input_ids", "attention_mask", "labels"}
    for part in ("tokenizer", "image_processor", "video_processor", "feature_extractor"):
        known |= set(getattr(getattr(processor, part, None), "model_input_names", ()))
    # fields that the processor adds to those of its parts have one entry per token
    names = [name for name in getattr(processor, "model_input_names", ()) if name not in known]
    if getattr(processor, "return_mm_token_type_ids", False):  # PaddleOCR-VL does not list it
        names.append("mm_token_type_ids")
    settings: dict[str, Any] = {
        "other_fields": tuple(getattr(images, "model_input_names", ())),
        "token_fields": tuple(dict.fromkeys(names)),
    }
    for name in ("image_token_index", "image_token_id"):  # Ovis2's processor has another one
        if isinstance(found := getattr(config, name, None), int):
            settings["image_token_id"] = found
    return settings


def _side(images: Any) -> int:
    """Return the pixels per side of a tile."""
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


def is_vision_language(config_or_model: Any) -> bool:
    """Check whether a model accepts images and writes text, by its transformers config.

    Raises:
        TypeError: neither a config nor a model with one.
        ImportError: transformers is not installed.

    >>> from transformers import Qwen2VLConfig, Qwen3Config
    >>> is_vision_language(Qwen2VLConfig()), is_vision_language(Qwen3Config())
    (True, False)
    """
    auto = needed_package("transformers.models.auto.modeling_auto", "is_vision_language")
    config = getattr(config_or_model, "config", config_or_model)
    model_type = getattr(config, "model_type", None)
    if not isinstance(model_type, str):
        raise TypeError(
            f"expected a transformers config or model, got {type(config_or_model).__name__}; load "
            "it with AutoConfig.from_pretrained"
        )
    known = any(model_type in family.model_types for family in FAMILIES)
    return known or model_type in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def load_processor(name_or_path: str | PathLike[str]) -> Any:
    """Load the processor of a model, or the tokenizer if it has no processor.

    Without torchvision there are no video processors. A processor class that demands one is built
    from the image processor and the tokenizer alone, which is all that images need, and this is
    logged once.

    Raises:
        OSError: nothing is there, or it cannot be loaded.
        ImportError: transformers is not installed, or a package that the processor needs.

    >>> load_processor("no/such/folder")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    OSError: 'no/such/folder' is neither a folder nor a name on the hub with a processor or...
    """
    transformers = needed_package("transformers", "load_processor")
    try:
        return transformers.AutoProcessor.from_pretrained(name_or_path)
    except (OSError, ImportError, ValueError) as error:
        demanding = None if find_spec("torchvision") else _video_class(name_or_path)
        if demanding is None:
            if isinstance(error, ImportError):
                raise
            name = repr(str(name_or_path))
            what = f"{name} is neither a folder nor a name on the hub with a processor or tokenizer"
            if Path(name_or_path).is_dir():
                what = f"the folder {name} holds no processor or tokenizer"
            raise OSError(f"{what} that can be loaded: {error}") from error
        return _load_without_video(demanding, name_or_path, error)


def _video_class(name_or_path: Any) -> Any:
    """Return the class of the processor if it demands a video processor, else None."""
    import transformers

    try:
        settings, _ = transformers.ProcessorMixin.get_processor_dict(name_or_path)
    except (OSError, ValueError):
        return None
    found = getattr(transformers, str(settings.get("processor_class")), None)
    demands = found is not None and "video_processor" in found.get_attributes()
    return found if demands else None


def _load_without_video(processor_class: Any, name_or_path: Any, error: Exception) -> Any:
    name = processor_class.__name__
    try:
        processor = without_video(processor_class).from_pretrained(name_or_path)
    except (OSError, ImportError, ValueError, TypeError, AttributeError) as second:
        raise ImportError(
            f"{name} demands a video processor, which needs torchvision, and cannot be built "
            f"without one ({second}): pip install torchvision",
            name="torchvision",
        ) from error
    _log_once(name)
    return processor


@cache
def _log_once(name: str) -> None:
    _logger.warning(
        "torchvision is not installed: %s is built without its video processor, and images are "
        "processed with PIL, whose pixels differ slightly",
        name,
    )


@cache
def without_video(processor_class: Any) -> Any:
    """Return the class with an image processor and a tokenizer only, under its own name."""
    parts = ["image_processor", "tokenizer"]
    members = {
        "get_attributes": classmethod(lambda cls: parts),
        # No module has this class, so that workers make it again.
        "__reduce__": lambda self: (_without_state, (processor_class,), self.__dict__),
    }
    return type(processor_class.__name__, (processor_class,), members)


def _without_state(processor_class: Any) -> Any:
    return object.__new__(without_video(processor_class))
