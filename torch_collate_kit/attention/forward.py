"""A forward pass of a model, and the distance between logits of two passes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_collate_kit.errors import IsolationError

__all__ = ["distance", "is_2d", "logits_of", "lowest_precision", "shape_of"]

_BY_PRECISION = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def logits_of(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Return logits [R, W, V]; the random state is restored, so dropout is the same each time."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        # reentrant checkpointing warns that no input requires a gradient, which is intended here
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        try:
            output = model(**inputs)
        except Exception as error:
            mask = inputs.get("attention_mask")
            if mask is None or is_2d(mask):
                raise
            hint = "2-D masks only, use PaddedCollator, since nothing separates packed rows then"
            if isinstance(mask, Mapping):
                hint = "no dict of masks, leave sliding_window out"
            raise IsolationError(
                f"the model fails with the attention_mask {shape_of(mask)} "
                f"({type(error).__name__}: {error}); if it accepts {hint}"
            ) from error
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"the model returns {type(output).__name__} without logits; pass it with its "
            "language-model head"
        )
    if logits.shape[:-1] != inputs["input_ids"].shape:
        raise ValueError(
            f"logits are {list(logits.shape)} for input_ids {list(inputs['input_ids'].shape)}; "
            "isolation needs one position for every token (no logits_to_keep)"
        )
    return logits


def distance(before: Tensor, after: Tensor) -> Tensor:
    """Return the largest difference of a logit at each token: float32 [...] of logits [..., V]."""
    # equal infinities (a masked vocabulary tail) do not differ; NaN stays NaN
    return torch.where(before == after, 0, (before - after).abs()).amax(-1).float()


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


def shape_of(mask: Any) -> str:
    """Describe the shape of a mask, or the names of a dict of masks."""
    return f"dict of {sorted(mask)}" if isinstance(mask, Mapping) else str(list(mask.shape))
