"""Properties of a model that matter for packed rows, read from its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_collate_kit.attention.recurrent import refuse_recurrent_layers
from torch_collate_kit.errors import IsolationError
from torch_collate_kit.vision import VisionLayout
from torch_collate_kit.vision.families import OTHER, family_of

__all__ = [
    "attention_name",
    "refuse_lost_window",
    "refuse_packed_images",
    "refuse_recurrent",
    "sliding_window",
    "uses_mrope",
    "vocabulary",
]


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel and similar wrappers."""
    inner = getattr(model, "module", model)
    return inner if isinstance(inner, nn.Module) else model


def _configs(model: nn.Module) -> list[Any]:
    """Return the model's config and the configs nested in it (text_config, ...)."""
    config = getattr(model, "config", None)
    found: list[Any] = [] if config is None else [config]
    for config in found:  # grows during the loop
        found += [value for value in vars(config).values() if hasattr(value, "model_type")]
    return found


def _text_config(model: nn.Module) -> Any:
    """Return the config of the text model, which reads the packed rows."""
    config: Any = getattr(_unwrap(model), "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def attention_name(model: nn.Module) -> str | None:
    """Return the attention implementation of the text model."""
    return getattr(_text_config(model), "_attn_implementation", None)


def sliding_window(model: nn.Module) -> tuple[int | None, bool]:
    """Return the window of the sliding layers or None, and whether all layers slide."""
    config = _text_config(model)
    window: int | None = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None)
    if layers is None:
        return (window if getattr(config, "use_sliding_window", True) else None), True
    return (window if "sliding_attention" in layers else None), set(layers) == {"sliding_attention"}


def uses_mrope(model: nn.Module) -> bool:
    """Check whether a token has three positions, of time, height and width."""
    return family_of(config=getattr(_unwrap(model), "config", None)).positions == "mrope"


def refuse_packed_images(
    model: nn.Module, inputs: Mapping[str, Any], vision: VisionLayout | None
) -> None:
    """Refuse rows with several examples and images, if the model's family is not packed."""
    if "pixel_values" not in inputs:
        return
    family = family_of(config=getattr(_unwrap(model), "config", None))
    if family is OTHER and vision is not None:
        family = vision.family
    reason = family.not_packed or family.refused
    if reason:
        raise IsolationError(
            f"examples of {family.name} models with images are not packed: {reason}"
            + ("" if family.refused else "; use PaddedCollator for this model")
        )


def refuse_recurrent(model: nn.Module) -> None:
    """Refuse packed rows for a model whose layers carry state from token to token."""
    refuse_recurrent_layers(getattr(_unwrap(model), "config", None), _text_config(model))


def refuse_lost_window(model: nn.Module, inputs: Mapping[str, Any], segments_RW: Tensor) -> None:
    """Refuse a 4-D mask without the sliding window: it replaces the mask of every layer."""
    mask = inputs.get("attention_mask")
    window, all_slide = sliding_window(model)
    if window is None or not isinstance(mask, Tensor) or mask.ndim != 4:
        return
    longest = int(torch.bincount(segments_RW[segments_RW >= 0]).max())
    seen = mask if mask.dtype == torch.bool else mask >= 0
    if longest > window and not (all_slide and not seen.tril(-window).any()):
        raise ValueError(
            f"the attention_mask {list(mask.shape)} replaces the masks of all layers, so the "
            f"sliding window of {window} tokens is lost in segments of up to {longest}; leave it "
            "out, or, where the model's mask does not see position_ids, pass "
            f'Batch.model_inputs(..., mask="block", sliding_window={window})'
        )


def vocabulary(model: nn.Module, ids_RW: Tensor) -> tuple[int, Tensor]:
    """Return the vocabulary size, and the ids of placeholders of images, video and audio."""
    embed = getattr(_unwrap(model), "get_input_embeddings", lambda: None)()
    size = getattr(embed, "num_embeddings", None) or int(ids_RW.max()) + 1
    names = {"image", "video", "audio", "vision", "boi", "eoi"}
    fixed = {
        value
        for config in _configs(_unwrap(model))
        for key, value in vars(config).items()
        if key.endswith(("_token_id", "_token_index"))
        and key.split("_")[0] in names
        and isinstance(value, int)
    }
    return size, torch.tensor(sorted(fixed), dtype=ids_RW.dtype, device=ids_RW.device)
