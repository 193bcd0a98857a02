"""Model inputs whose packed examples are to be compared: their segments, and their images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from torch_collate_kit.attention.models import (
    attention_name,
    refuse_lost_window,
    refuse_packed_images,
    refuse_recurrent_layers,
    sliding_window,
)
from torch_collate_kit.attention.row_images import RowImages
from torch_collate_kit.attention.row_segments import RowSegments, find_segments
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.model_inputs import needs_image_blocks
from torch_collate_kit.vision import VisionLayout

__all__ = ["PackedInputs", "read_inputs"]


class PackedInputs(NamedTuple):
    """Model inputs, the segment of each cell, and the images of each segment."""

    inputs: dict[str, Any]
    segments: RowSegments
    images: RowImages | None


def read_inputs(
    model: nn.Module, batch: Batch | Mapping[str, Any], vision: VisionLayout | None
) -> PackedInputs:
    """The inputs of a batch, or those given.

    Raises:
        IsolationError: the model cannot take packed rows.
        ValueError: fewer than two segments, or inputs that do not fit each other or the model.
    """
    inputs, vision = _model_inputs(model, batch, vision)
    segments = find_segments(inputs)
    if len(segments.rows) < 2:
        raise ValueError(
            f"the batch has {len(segments.rows)} segment(s), so nothing can leak; "
            "pass a batch with at least two packed examples"
        )
    if len(segments.rows) > len(set(segments.rows)):
        refuse_recurrent_layers(model, inputs)
        refuse_packed_images(model, inputs, vision)
    if vision is None and "pixel_values" in inputs:
        raise ValueError(
            "the inputs have pixel_values, and it is not known which image belongs to which "
            "segment; pass the Batch itself, or its inputs and vision=collator.vision"
        )
    images = None if vision is None else RowImages.of(inputs, vision, segments)
    refuse_lost_window(model, inputs, segments.ids_RW)
    return PackedInputs(inputs, segments, images)


def _model_inputs(
    model: nn.Module, batch: Batch | Mapping[str, Any], vision: VisionLayout | None
) -> tuple[dict[str, Any], VisionLayout | None]:
    if vision is not None and not isinstance(vision, VisionLayout):
        raise TypeError(
            f"vision must be a VisionLayout, got {type(vision).__name__}; pass collator.vision"
        )
    if isinstance(batch, Batch):
        attention, options = attention_name(model) or "sdpa", dict[str, Any]()
        if needs_image_blocks(batch, batch.stored()) and attention in ("sdpa", "eager"):
            options = {"mask": "block", "sliding_window": sliding_window(model)[0]}
        inputs = batch.model_inputs(attention, labels=False, **options)
        vision = batch.placement.vision if vision is None and batch.placement else vision
    else:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise ValueError(
            "input_ids must be a tensor [rows, width], because its tokens are changed one segment "
            f"at a time; got inputs {sorted(inputs)}"
        )
    return inputs, vision
