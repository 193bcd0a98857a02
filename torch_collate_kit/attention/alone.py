"""Packed examples compared with the same examples alone, each in a batch of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_collate_kit.attention.forward import (
    distance,
    is_2d,
    logits_of,
    lowest_precision,
    shape_of,
)
from torch_collate_kit.attention.packed_inputs import PackedInputs, is_image
from torch_collate_kit.errors import IsolationError

__all__ = ["check_alone"]

# Rows of another shape are rounded differently: by 5e-6, 7e-3 and 5e-2 (bfloat16) with 32 layers.
# Matrix products in TF32, which a GPU may use for float32, have the precision of float16.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_OF_ROWS = ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@torch.no_grad()
def check_alone(
    model: nn.Module, packed: PackedInputs, logits: Tensor, tolerance: float | None
) -> None:
    """Raise if the logits of a segment are not those of its tokens and images alone.

    ``logits`` [R, W, V] are those of the packed inputs. Every segment takes one forward pass.
    """
    segments = packed.segments
    allowed = _default_tolerance(model, logits) if tolerance is None else tolerance
    differences: dict[int, float] = {}
    for segment in range(len(segments.rows)):
        alone = logits_of(model, _inputs_alone(packed, segment))[0]
        largest = float(alone.abs().nan_to_num(posinf=0).max())
        found = float(distance(alone, logits[segments.ids_RW == segment]).max())
        if not found <= allowed * largest:  # NaN, too
            differences[segment] = found / largest if largest else found
    if differences:
        worst = max(differences, key=differences.__getitem__)
        raise IsolationError(
            f"{segments.name(worst)} is not what it is alone, though the others do not leak into "
            f"it: its logits differ by {differences[worst]:.3g} of the largest, and {allowed:.1g} "
            f"is allowed; {len(differences)} of {len(segments.rows)} segments differ. Likely "
            f"reason: {_likely_reason(packed, worst)}"
        )


def _default_tolerance(model: nn.Module, logits: Tensor) -> float:
    precision = lowest_precision(model, logits)
    if precision == torch.float32 and logits.is_cuda:
        precision = torch.float16
    return _TOLERANCE[precision]


def _inputs_alone(packed: PackedInputs, segment: int) -> dict[str, Any]:
    """The inputs of one segment as a batch of one, without what describes rows.

    Positions and token types are those of the example, not cut out of the row.
    """
    inputs, segments, images = packed
    where_RW, ids_RW = segments.ids_RW == segment, inputs["input_ids"]
    alone: dict[str, Any] = {}
    for name, value in inputs.items():
        if name in _OF_ROWS or (images is not None and name in images.fields):
            continue
        is_per_cell = isinstance(value, Tensor) and value.shape[:2] == ids_RW.shape
        alone[name] = value[where_RW][None] if is_per_cell else value
    ids_T = ids_RW[where_RW]
    if images is None:
        if "position_ids" in inputs:
            alone["position_ids"] = torch.arange(len(ids_T), device=ids_T.device)[None]
        return alone
    of_segment = images.of_segment(segment)
    alone |= of_segment | images.token_inputs(ids_T, of_segment)
    given = _positions_of(inputs, where_RW)
    if given.shape == alone["position_ids"].shape and len(given) == 4 and of_segment:
        # pads that align a segment go on counting in all four
        is_after = is_image(ids_T, images.layout).int().flip(0).cumsum(0).flip(0) == 0
        is_pad = is_after & (given == given[:1]).all(0)
        alone["position_ids"] = torch.where(is_pad, given, alone["position_ids"])
    return alone


def _positions_of(inputs: Mapping[str, Any], where_RW: Tensor) -> Tensor:
    """Positions of a segment in its row: [1, T], or [3, 1, T] and [4, 1, T] of images."""
    positions = inputs.get("position_ids")
    if positions is None:
        return torch.empty(0, device=where_RW.device)
    if positions.ndim == 3:
        return positions[:, where_RW][:, None]
    return positions.expand(where_RW.shape)[where_RW][None]


def _likely_reason(packed: PackedInputs, segment: int) -> str:
    inputs, segments, images = packed
    where_RW, mask = segments.ids_RW == segment, inputs.get("attention_mask")
    alone = _inputs_alone(packed, segment)
    given, own = _positions_of(inputs, where_RW), alone.get("position_ids", torch.empty(0))
    if given.numel() and given.shape != own.shape:
        return (
            f"position_ids are {list(inputs['position_ids'].shape)}, and a row of this model with "
            f"images needs {[len(own), *where_RW.shape]}; pass what Batch.model_inputs() returns"
        )
    if given.numel() and not torch.equal(given, own):
        return (
            "its position_ids are not those that it has alone; pass what Batch.model_inputs() "
            "returns"
        )
    types = "" if images is None else images.layout.family.token_types
    if types and types not in inputs:
        return f"{types} is not passed; pass what Batch.model_inputs() returns"
    if types and mask is None:
        return (
            "the model makes blocks of images from positions that restart, and loses sight of "
            'them; pass Batch.model_inputs("sdpa", mask="block", '
            "sliding_window=model.config.text_config.sliding_window)"
        )
    if mask is not None and not is_2d(mask):
        return f"the attention_mask {shape_of(mask)} lets tokens see too much or too little"
    return (
        "a part of the model depends on where in the row an example lies, or on how long the "
        "others are; use PaddedCollator for this model"
    )
