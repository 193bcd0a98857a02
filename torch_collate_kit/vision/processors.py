"""Loading of processors."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

from torch_collate_kit._checks import needed_package
from torch_collate_kit.vision.families import FAMILIES

_logger = logging.getLogger("torch_collate_kit.vision")


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
    OSError: 'no/such/folder' is no folder and no name of the hub with a processor or tokenizer...
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
            what = f"{name} is no folder and no name of the hub with a processor or tokenizer"
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
