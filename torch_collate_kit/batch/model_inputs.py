"""Inputs of a transformers model from a batch, and the masks that some models need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit._checks import checked_bool, checked_int
from torch_collate_kit.batch.storage import Storage
from torch_collate_kit.ragged import Ragged

_VARLEN_ATTENTION = ("torch_varlen", *(f"flash_attention_{version}" for version in (2, 3, 4)))
_MASK_ATTENTION = ("sdpa", "eager", "flex_attention")
_MAX_CELLS = 2**31 - 1  # of all rows: boundaries are int32


def model_inputs(
    batch: Mapping[str, Any],
    stored: Storage,
    attention: str | Mapping[str, str],
    *,
    labels: bool,
    mask: Any,
    sliding_window: int | None,
) -> dict[str, Any]:
    """Return ``Batch.model_inputs`` of its dense fields and its content."""
    checked_bool("labels", labels)
    attention, is_varlen = _checked_attention(attention)
    _refuse_unknown_mask(attention, mask, sliding_window)
    inputs = {"input_ids": batch["input_ids"], **_positions_and_images(batch, stored)}
    if labels and "labels" in batch:
        inputs["labels"] = batch["labels"]
    inputs["use_cache"] = False
    if mask is None and needs_image_blocks(batch, stored):
        raise ValueError(
            "packed images attend within themselves, and transformers loses sight of them where "
            'positions restart; pass attention="sdpa", mask="block" and '
            "sliding_window=model.config.text_config.sliding_window"
        )
    if "cu_seq_lens" not in batch:
        inputs["attention_mask"] = batch["attention_mask"]
    elif is_varlen or mask is not None:
        shape = inputs["input_ids"].shape
        flat = _flat_cu_seq_lens(batch["cu_seq_lens"], shape[1])
        if mask is not None:
            cells = torch.arange(shape.numel(), device=flat.device, dtype=flat.dtype)
            segments = torch.searchsorted(flat[1:], cells, right=True).view(shape)
            images = _images_of_cells(batch, stored)
            inputs["attention_mask"] = block_mask(
                segments, attention, window=sliding_window, images_RW=images
            )
            return inputs
        inputs["cu_seq_lens_q"] = inputs["cu_seq_lens_k"] = flat
        longest = max(stored.row_metadata["max_segment_length"], default=0)
        inputs["max_length_q"] = inputs["max_length_k"] = longest
    return inputs


def _positions_and_images(batch: Mapping[str, Any], stored: Storage) -> dict[str, Any]:
    """Return positions, and the image fields of a vision-language model."""
    vision = stored.columns.placement.vision
    if vision is None:
        if "pixel_values" in batch:
            raise ValueError(
                "the batch has pixel_values, and its model is not known, so neither are its "
                "positions; give the collator the processor in place of the tokenizer"
            )
        return {"position_ids": batch["position_ids"]}
    inputs: dict[str, Any] = {}
    _refuse_lost_positions(stored.given, vision.family.positions, vision.family_name)
    if vision.has_mrope:  # [4, R, W]: the first row tells the examples of a row apart
        inputs["position_ids"] = batch["mrope_position_ids"].transpose(0, 1)
    elif vision.family.positions == "restarting":
        inputs["position_ids"] = batch["position_ids"]
    types = [vision.family.token_types, "mm_token_type_ids", "token_type_ids", *vision.token_fields]
    inputs |= {name: batch[name] for name in dict.fromkeys(types) if name in batch}
    for name in vision.fields:
        if name in batch and len(values := batch[name].values):
            inputs[name] = values[None] if vision.family.joins_tiles else values
    return inputs


def _refuse_lost_positions(given: Mapping[str, Any], kind: str, name: str) -> None:
    """Refuse replaced position ids that the model would not get."""
    if kind == "mrope" and "image_grid_thw" in given and "mrope_position_ids" not in given:
        raise ValueError(
            "image_grid_thw was replaced, and mrope_position_ids follow from the grids that were "
            "collated; replace both, or collate again"
        )
    if kind == "restarting" or "position_ids" not in given:
        return
    gets = "makes its own" if kind == "model" else "gets mrope_position_ids [R, 4, W]"
    way_out = "" if kind == "model" else "replace those, or "
    raise ValueError(
        f"position_ids were replaced, and a {name} model {gets}, so they would be lost; {way_out}"
        "change position_ids in the dict that model_inputs() returns"
    )


def needs_image_blocks(batch: Mapping[str, Any], stored: Storage) -> bool:
    """Return whether packed images attend within themselves: only a block mask is exact then."""
    return "cu_seq_lens" in batch and _images_of_cells(batch, stored) is not None


def _images_of_cells(batch: Mapping[str, Any], stored: Storage) -> Tensor | None:
    """Return the image of each cell, int64 [R, W], -1 for text; None where images are causal."""
    vision = stored.columns.placement.vision
    if vision is None or vision.family_name != "gemma3" or not len(batch["pixel_values"].values):
        return None
    is_image = batch["token_type_ids"].flatten()
    number = (torch.cumsum(is_image, 0) - 1) // vision.tile_tokens
    return torch.where(is_image == 1, number, -1).view(batch["token_type_ids"].shape)


def _checked_attention(attention: Any) -> tuple[str, bool]:
    """Return the text model's attention, and whether it reads boundaries."""
    if isinstance(attention, Mapping):
        example = '{"text_config": "torch_varlen", "vision_config": "sdpa"}'
        if "text_config" not in attention:
            raise ValueError(
                f"attention={dict(attention)} has no text_config, whose attention gets the packed "
                f"rows; pass the attn_implementation of the model, such as {example}"
            )
        for part, name in attention.items():
            if part not in ("", "text_config") and name == "torch_varlen":
                raise ValueError(
                    f'attention "torch_varlen" for {part}: it is causal, and a vision tower is '
                    f"not; load the model with attn_implementation={example}"
                )
        attention = attention["text_config"]
    is_kernel = isinstance(attention, str) and "/" in attention and "flash" in attention
    if not is_kernel and attention not in (*_VARLEN_ATTENTION, *_MASK_ATTENTION):
        known = ", ".join((*_VARLEN_ATTENTION, *_MASK_ATTENTION))
        raise ValueError(
            f"attention={attention!r} is unknown; use one of {known}, or a kernel of the Hugging "
            "Face Hub such as kernels-community/flash-attn2"
        )
    return attention, attention not in _MASK_ATTENTION


def _refuse_unknown_mask(attention: str, mask: Any, sliding_window: Any) -> None:
    if mask not in (None, "block"):
        raise ValueError(f'mask={mask!r} is unknown; use "block", or None for no mask')
    if mask is not None and attention not in ("sdpa", "eager"):
        raise ValueError(
            f'mask="block" is for attention "sdpa" and "eager", got {attention!r}; '
            "attention that reads boundaries needs no mask, flex_attention takes none of this kind"
        )
    if sliding_window is None:
        return
    if mask is None:
        raise ValueError(
            f'sliding_window={sliding_window} without mask="block"; a model that makes its own '
            "masks knows its window"
        )
    hint = "it counts the token itself: pass model.config.sliding_window, None without windows"
    checked_int("sliding_window", sliding_window, hint=hint)


def _flat_cu_seq_lens(per_row: Ragged, width: int) -> Tensor:
    """Return boundaries [0, ..., R * W] over all rows, int32, without waiting for the device."""
    num_cells = len(per_row) * width
    if num_cells > _MAX_CELLS:
        raise ValueError(
            f"{num_cells} tokens are more than int32 boundaries can count, {_MAX_CELLS}; "
            "pass them to the model in parts, such as batch.chunk(num_chunks)"
        )
    values = torch.as_tensor(per_row.values)
    rows = np.repeat(np.arange(len(per_row)), per_row.lengths)
    entries = np.arange(len(rows))
    is_first = entries == per_row.offsets[rows]  # where the row before ended
    picked = np.stack([entries, rows * width])[:, ~is_first]
    on_device = torch.from_numpy(picked).to(values.device, non_blocking=True)
    return torch.cat([values.new_zeros(1), values[on_device[0]] + on_device[1].int()])


def block_mask(
    segments_RW: Tensor,
    attention: str,
    *,
    window: int | None = None,
    images_RW: Tensor | None = None,
) -> Tensor | dict[str, Tensor]:
    """Return the mask [R, 1, W, W] by which a cell sees its segment up to itself."""
    causal = (segments_RW[:, :, None] == segments_RW[:, None, :]).tril()[:, None]
    masks = {"full_attention": causal}
    if window is not None:
        masks["sliding_attention"] = causal.triu(1 - window)
    if images_RW is not None:
        rows, columns = images_RW[:, None, :, None], images_RW[:, None, None, :]
        same_image = (rows == columns) & (rows >= 0)
        masks = {name: seen | same_image for name, seen in masks.items()}
    if attention != "sdpa":
        zeros = torch.zeros(causal.shape, dtype=torch.bfloat16, device=causal.device)
        masks = {name: zeros.masked_fill(~seen, -math.inf) for name, seen in masks.items()}
    return masks["full_attention"] if window is None else masks
