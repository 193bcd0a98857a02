"""Settings of a ``VisionLayout``, read from a processor and a model's config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch_collate_kit.vision.families import OTHER, sharing_models, vision_family_of


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
        found = (getattr(of, name, None) for of in (processor, images) for name in names)
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
