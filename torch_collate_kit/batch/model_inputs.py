"""Inputs of a transformers model from a batch, and the masks that some models need."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torch_collate_kit._checks import checked_bool, checked_int
from torch_collate_kit.batch.block_masks import document_masks
from torch_collate_kit.batch.model_kind import ModelKind
from torch_collate_kit.batch.paths import masks_for, shard_inputs, tree_inputs
from torch_collate_kit.batch.placement import MAX_WIDTH, Placement
from torch_collate_kit.batch.storage import Storage
from torch_collate_kit.ragged import Ragged

_logger = logging.getLogger(__name__)


def model_inputs(
    batch: Mapping[str, Any],
    stored: Storage,
    model: Any,
    *,
    labels: bool,
    mask: Any,
    sliding_window: int | None,
    context_group: Any = None,
) -> dict[str, Any]:
    """Return ``Batch.model_inputs`` of its dense fields and its content."""
    checked_bool("labels", labels)
    shard = stored.columns.placement.shard if stored.columns else None
    if shard is not None and (shard.size > 1 or context_group is not None):
        kind = ModelKind.of("torch_varlen" if model is None else model)
        _token_types(batch, stored, kind)
        if mask is not None or sliding_window is not None:
            raise ValueError(
                "shards of context ranks have no mask: the model knows its sliding window; remove "
                "mask and sliding_window"
            )
        return shard_inputs(batch, stored.columns, kind, context_group)
    _refuse_unsaid(stored, model, context_group)
    is_tree = bool(stored.columns) and stored.columns.placement.tree_width > 0
    kind = ModelKind.of("torch_varlen" if model is None else model)
    types = _token_types(batch, stored, kind)
    if is_tree:
        if mask is not None or sliding_window is not None:
            given = "block" if mask is None else mask
            _refuse_unknown_mask(kind, given, sliding_window, kind.takes_mask)
        return tree_inputs(batch, stored.columns, kind, sliding_window)
    is_packed, has_image_blocks = "cu_seq_lens" in batch, needs_image_blocks(batch, stored)
    is_flex = kind.attention == "flex_attention" and not has_image_blocks
    _refuse_unknown_mask(kind, mask, sliding_window, kind.takes_mask or is_flex)
    is_blind = kind.is_known and (has_image_blocks or kind.family.blind_mask or kind.is_two_way)
    if mask is None and is_packed and is_blind and (kind.takes_mask or is_flex):
        mask, sliding_window = "block", kind.window
    elif mask is not None and is_flex and sliding_window is None:
        sliding_window = kind.window
    inputs = {"input_ids": batch["input_ids"], **_positions_and_images(batch, stored), **types}
    if kind.first_position or kind.num_positions is not None:
        inputs["position_ids"] = _positions_of_model(batch, stored, kind)
    if labels and "labels" in batch:
        inputs["labels"] = batch["labels"]
    if mask is None and has_image_blocks:
        raise ValueError(
            "packed images attend within themselves, and transformers loses sight of them where "
            'positions restart; pass the model, or "sdpa", mask="block" and '
            "sliding_window=model.config.text_config.sliding_window"
        )
    if not is_packed:
        if stored.columns and stored.columns.placement.has_left_pads:
            kind.refuse_left_padding()
        return inputs | {"use_cache": False, "attention_mask": batch["attention_mask"]}
    kind.refuse_packed()
    if kind.is_two_way and stored.columns:
        _refuse_gaps(stored.columns.placement)
    if kind.takes_one_row:
        inputs = _as_one_row(inputs)
    inputs["use_cache"] = False
    if mask is not None or kind.keywords:
        inputs |= _boundaries(batch, stored, kind, mask, sliding_window, inputs["input_ids"].shape)
    return inputs


def _refuse_unsaid(stored: Storage, model: Any, context_group: Any) -> None:
    """Refuse whole rows with a group, and rows for which nobody said what reads them."""
    placement = stored.columns.placement
    if context_group is not None:
        raise ValueError(
            "context_group is for the shard of a context rank, and this is a whole batch; cut it "
            "with batch.context_shard(cp_rank, cp_size)"
        )
    if placement.targets != "next_token" and not isinstance(model, ModelKind | nn.Module):
        raise ValueError(
            f"the batch has targets={placement.targets!r}, as two-way models are trained, and the "
            "name of an attention does not say which way a model looks; pass the model: "
            "model_inputs(model)"
        )
    # another attention would ignore the paths in silence
    if placement.tree_width and model is None:
        raise ValueError(
            "the segments of these rows share prefixes (share_prefixes), so their inputs are those "
            "of one attention: pass the model, or the name of its attention"
        )


def _token_types(batch: Mapping[str, Any], stored: Storage, kind: ModelKind) -> dict[str, Any]:
    """Return the types of tokens for a model that has them; refuse those that would be lost."""
    if "token_type_ids" not in batch or stored.columns.placement.vision is not None:
        return {}
    placement, size = stored.columns.placement, kind.num_token_types
    found = 2 if "token_type_ids" in stored.given else placement.num_token_types
    if placement.shard is not None or placement.tree_width:
        size = 0  # their inputs have no types
    if found > max(size, 1):
        has = f"has the types 0 to {size - 1}" if size > 1 else "gets none"
        way_out = "pass the model itself, with whole rows, or remove them from the examples"
        raise ValueError(f"token_type_ids are up to {found - 1}, and this model {has}; {way_out}")
    return {"token_type_ids": batch["token_type_ids"]} if size > 1 else {}


def _positions_of_model(batch: Mapping[str, Any], stored: Storage, kind: ModelKind) -> Tensor:
    """Return the positions of a model with a table of them: its first one where no token is."""
    placement, most = stored.columns.placement, kind.num_positions
    if most is not None and "position_ids" not in stored.given:
        what, longest = "row", placement.width
        if not kind.counts_cells:
            what, longest = "text", int(placement.segments["lengths"].values.max(initial=0))
        if longest > most:
            raise ValueError(
                f"a {what} has {longest} tokens, and the table of the {kind.family.name} model has "
                f"{most} positions; cut texts to {most} tokens, or lower max_tokens"
            )
    positions: Tensor = batch["position_ids"]
    if "attention_mask" in batch:
        positions = positions * batch["attention_mask"]
    return positions + kind.first_position


def _refuse_gaps(placement: Placement) -> None:
    """Refuse pads inside segments, which two-way attention would see."""
    lengths, firsts = placement.segments["lengths"].values, placement.first_cells()
    ends = np.append(firsts[1:], len(placement.segments["lengths"]) * placement.width)
    gaps = (ends - firsts - lengths) * (lengths > 0)  # the pads at the end of a row are no gap
    if len(wrong := np.flatnonzero(gaps)):
        i = wrong[0]
        raise ValueError(
            f"a segment of row {placement.rows()[i]} has {lengths[i]} tokens and {gaps[i]} pads of "
            "alignment (tp, cp), which a two-way model would see; collate for it with "
            "parallel=ParallelLayout(dp=...) alone"
        )


def _as_one_row(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return fields of cells ``[..., R, W]`` as ``[..., 1, R * W]``."""
    rows = inputs["input_ids"].shape
    return {
        name: value.reshape(*value.shape[:-2], 1, rows.numel())
        if isinstance(value, Tensor) and value.shape[-2:] == rows
        else value
        for name, value in inputs.items()
    }


def _boundaries(
    batch: Mapping[str, Any],
    stored: Storage,
    kind: ModelKind,
    mask: Any,
    window: int | None,
    shape: torch.Size,
) -> dict[str, Any]:
    """Return what tells the segments apart, by the model's keywords, and the block mask."""
    per_row = batch["cu_seq_lens"]
    flat = _flat_cu_seq_lens(per_row, shape.numel() // max(len(per_row), 1))
    longest = max(stored.row_metadata["max_segment_length"], default=0)
    found: dict[str, Any] = {}
    if mask is not None or "seq_idx" in kind.keywords:
        lengths = torch.diff(flat)  # of a known sum, so that nothing waits for the device
        segments = torch.repeat_interleave(lengths, output_size=shape.numel()).view(shape)
    if mask is not None and kind.attention == "flex_attention":
        masks: Any = document_masks(flat, segments, window=window, two_way=kind.is_two_way)
        is_one = isinstance(masks, dict) and kind.all_slide  # such a model may take no dict
        found["attention_mask"] = masks["sliding_attention"] if is_one else masks
    elif mask is not None:
        images = _images_of_cells(batch, stored)
        found["attention_mask"] = block_mask(
            segments, kind.attention, window=window, images_RW=images, two_way=kind.is_two_way
        )
        if kind.is_two_way and kind.all_slide and window is not None:
            found["attention_mask"] = found["attention_mask"]["sliding_attention"]
    most = stored.metadata.get("max_segments_per_row")
    if most is not None and _takes_empty_segments(kind):
        flat, longest = _with_room(flat, len(per_row), most), int(shape[-1])
    for keyword in kind.keywords:
        if keyword == "cu_seq_lens":
            found |= {"cu_seq_lens_q": flat, "cu_seq_lens_k": flat}
            found |= {"max_length_q": longest, "max_length_k": longest}
        elif keyword == "cu_seqlens_cpu":
            found[keyword] = _on_host(flat, stored)
        else:
            found[keyword] = segments if keyword == "seq_idx" else flat
    return found


def _with_room(flat: Tensor, num_rows: int, most: int) -> Tensor:
    """Repeat the last boundary, for as many segments as the rows may have: int32 [R * most + 1]."""
    missing = num_rows * most + 1 - len(flat)
    if missing < 0:
        raise ValueError(
            f"cu_seq_lens has {len(flat) - 1} segments, more than the {num_rows * most} of "
            f"{num_rows} rows with metadata['max_segments_per_row']={most}; replace it by fewer, "
            "or collate with a larger max_sequences_per_row"
        )
    return torch.cat([flat, flat[-1:].expand(missing)])


def _takes_empty_segments(kind: ModelKind) -> bool:
    """Return whether segments without cells are safe, and static; warn once if they are not."""
    if "cu_seqlens_cpu" in kind.keywords:
        _warn(f"the mixers of {kind.family.name} models size their work by the segments")
    elif torch.version.hip and kind.attention == "flash_attention_2":
        _warn("gradients of flash-attention on ROCm were NaN before its pull request 2421")
    else:
        return True
    return False


@cache
def _warn(reason: str) -> None:
    _logger.warning("cu_seq_lens stays ragged here, whatever max_sequences_per_row: %s", reason)


def _on_host(flat: Tensor, stored: Storage) -> Tensor:
    """Return the boundaries in host memory, without waiting unless they were replaced."""
    placement = stored.columns.placement
    if placement is None or "cu_seq_lens" in stored.given:
        return flat.cpu()
    rows = len(placement.segments["starts"])
    bounds = np.append(placement.first_cells(), rows * placement.width)
    return torch.from_numpy(bounds.astype(np.int32))


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


def _refuse_unknown_mask(kind: ModelKind, mask: Any, sliding_window: Any, takes_mask: bool) -> None:
    if mask not in (None, "block"):
        raise ValueError(f'mask={mask!r} is unknown; use "block", or None for no mask')
    if mask is not None and not takes_mask:
        raise ValueError(
            'mask="block" is for attention "sdpa", "eager" and "flex_attention", got '
            f"{kind.attention!r}; attention that reads boundaries needs no mask, flex_attention "
            "takes none of image blocks or shared prefixes"
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
    if num_cells > MAX_WIDTH:
        raise ValueError(
            f"{num_cells} tokens are more than int32 boundaries can count, {MAX_WIDTH}; "
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
    two_way: bool = False,
) -> Tensor | dict[str, Tensor]:
    """Return the mask [R, 1, W, W] by which a cell sees its segment, up to itself or all of it."""
    seen = (segments_RW[:, :, None] == segments_RW[:, None, :])[:, None]
    seen = seen if two_way else seen.tril()
    masks = {"full_attention": seen}
    if window is not None:
        window = min(window, seen.shape[-1])
        sliding = seen.triu(1 - window)
        masks["sliding_attention"] = sliding.tril(window - 1) if two_way else sliding
    if images_RW is not None:
        rows, columns = images_RW[:, None, :, None], images_RW[:, None, None, :]
        same_image = (rows == columns) & (rows >= 0)
        masks = {name: seen | same_image for name, seen in masks.items()}
    return masks_for(attention, masks)
