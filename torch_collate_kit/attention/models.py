"""Models: properties that matter for packed rows, read from the config, and a forward pass."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from torch_collate_kit.batch.model_kind import ModelKind, config_of, inside, unwrap
from torch_collate_kit.errors import IsolationError
from torch_collate_kit.families import sliding_window
from torch_collate_kit.vision import VisionLayout
from torch_collate_kit.vision.families import OTHER, vision_family_of

_MEDIA = {"image", "video", "audio", "vision", "boi", "eoi"}
_BY_PRECISION = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def keep_random_state() -> AbstractContextManager[None]:
    """Restore the random state of all devices at the end."""
    return torch.random.fork_rng(range(torch.cuda.device_count()))


def uses_mrope(model: nn.Module) -> bool:
    """Check whether a token has three positions, of time, height and width."""
    return vision_family_of(config=config_of(model)).positions == "mrope"


def vocabulary(model: nn.Module, ids_RW: Tensor) -> tuple[int, Tensor]:
    """Return the vocabulary size, and the ids of placeholders of images, video and audio."""
    embed = getattr(unwrap(model), "get_input_embeddings", lambda: None)()
    size = getattr(embed, "num_embeddings", None) or int(ids_RW.max()) + 1
    configs, fixed = [config_of(model)], set()
    for config in configs:  # grows by the configs nested in it (text_config, ...)
        for key, value in getattr(config, "__dict__", {}).items():
            if hasattr(value, "model_type"):
                configs.append(value)
            is_id = key.endswith(("_token_id", "_token_index")) and isinstance(value, int)
            if is_id and key.split("_")[0] in _MEDIA:
                fixed.add(value)
    return size, torch.tensor(sorted(fixed), dtype=ids_RW.dtype, device=ids_RW.device)


def refuse_packed_images(
    model: nn.Module, inputs: Mapping[str, Any], vision: VisionLayout | None
) -> None:
    """Refuse rows with several examples and images, if the model's family is not packed."""
    family = vision_family_of(config=config_of(model))
    if family is OTHER and vision is not None:
        family = vision.family
    reason = family.not_packed or family.refused
    if reason and "pixel_values" in inputs:
        raise IsolationError(
            f"examples of {family.name} models with images are not packed: {reason}"
            + ("" if family.refused else "; use PaddedCollator for this model")
        )


def refuse_lost_window(model: nn.Module, inputs: Mapping[str, Any], segments_RW: Tensor) -> None:
    """Refuse a 4-D mask without the sliding window: it replaces the mask of every layer."""
    mask = inputs.get("attention_mask")
    window, all_slide = sliding_window(config_of(model))
    if window is None or not isinstance(mask, Tensor) or mask.ndim != 4:
        return
    longest, kind = int(torch.bincount(segments_RW[segments_RW >= 0]).max()), ModelKind.of(model)
    window, seen = kind.window or window, mask if mask.dtype == torch.bool else mask >= 0
    beyond = seen.tril(-window) | seen.triu(window if kind.is_two_way else seen.shape[-1])
    if longest > window and not (all_slide and not beyond.any()):
        raise ValueError(
            f"the attention_mask {list(mask.shape)} replaces the masks of all layers, so the "
            f"sliding window of {window} tokens is lost in segments of up to {longest}; leave it "
            "out, or, where the model's mask does not see position_ids, pass "
            f'Batch.model_inputs(..., mask="block", sliding_window={window})'
        )


def logits_of(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Return logits [R, W, V]; the random state is restored, so dropout is the same each time.

    Of a model without logits per token they are the last hidden states, [R, W, H].
    """
    if type(inside(model)).__name__.endswith("ForSequenceClassification"):
        model = inside(model).base_model  # its head may need a pad token
    with keep_random_state(), warnings.catch_warnings():
        # reentrant checkpointing warns that no input requires a gradient, which is intended here
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        try:
            output = model(**inputs)
        except Exception as error:
            _refuse_missing_kernels(model, error)
            mask = inputs.get("attention_mask")
            if mask is None or is_2d(mask):
                raise
            hint = "2-D masks only, use PaddedCollator, since nothing separates packed rows then"
            if isinstance(mask, Mapping):
                hint = "no dict of masks, leave sliding_window out"
            raise IsolationError(
                f"the model fails with the attention_mask {mask_shape(mask)} "
                f"({type(error).__name__}: {error}); if it accepts {hint}"
            ) from error
    of_model = getattr(output, "logits", getattr(output, "last_hidden_state", None))
    logits = output if isinstance(output, Tensor) else of_model
    if not isinstance(logits, Tensor) or logits.ndim < 3:
        base = getattr(inside(model), "base_model", model)
        if base is not inside(model) and isinstance(base, nn.Module):
            return logits_of(base, inputs)
        raise TypeError(
            f"the model returns {type(output).__name__} without logits or last hidden states of "
            "every token; pass it with its language-model head"
        )
    if logits.shape[:-1] != inputs["input_ids"].shape:
        raise ValueError(
            f"logits are {list(logits.shape)} for input_ids {list(inputs['input_ids'].shape)}; "
            "isolation needs one position for every token (no logits_to_keep)"
        )
    return logits


def _refuse_missing_kernels(model: nn.Module, error: Exception) -> None:
    """Refuse packed rows if transformers does so for want of the family's kernels."""
    if "can't keep packed sequences apart" in str(error):
        family = ModelKind.of(model).family
        raise IsolationError(
            f"packed rows of {family.name} models need the kernels of "
            f"{' and '.join(family.packages)} ({error}); call isolate_mixers(model), which needs "
            "none"
        ) from error


def lowest_precision(model: nn.Module, logits: Tensor) -> torch.dtype:
    """Return the narrowest of the dtypes of logits, weights and autocast."""
    dtypes = {logits.dtype} | {p.dtype for p in model.parameters() if p.is_floating_point()}
    if torch.is_autocast_enabled(logits.device.type):
        dtypes.add(torch.get_autocast_dtype(logits.device.type))
    if not dtypes <= set(_BY_PRECISION):  # 8 bits and less
        return torch.bfloat16
    return next(dtype for dtype in _BY_PRECISION if dtype in dtypes)


def is_2d(mask: Any) -> bool:
    """Check whether an attention mask is a tensor [R, W]."""
    return isinstance(mask, Tensor) and mask.ndim == 2


def mask_shape(mask: Any) -> str:
    """Describe the shape of a mask, or the names of a dict of masks."""
    return f"dict of {sorted(mask)}" if isinstance(mask, Mapping) else str(list(mask.shape))
