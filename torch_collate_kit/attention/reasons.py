"""Likely reasons of a leak, and of a difference from an example alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torch_collate_kit.attention.models import is_2d, shape_of, uses_mrope
from torch_collate_kit.attention.packed_inputs import PackedInputs, find_segments
from torch_collate_kit.batch.model_inputs import block_mask
from torch_collate_kit.batch.model_kind import ModelKind, config_of
from torch_collate_kit.errors import IsolationError
from torch_collate_kit.families import attention_of, sliding_window

_IMAGE_BLOCKS = (
    'pass Batch.model_inputs("sdpa", mask="block", '
    "sliding_window=model.config.text_config.sliding_window)"
)


def reason_of_leak(
    model: nn.Module, packed: PackedInputs, leaks: Callable[[PackedInputs], bool]
) -> str:
    """Return the likely reason; ``leaks`` tells whether other inputs leak in the same way."""
    attention, mask = ModelKind.of(model).attention, packed.inputs.get("attention_mask")
    if is_2d(mask):
        return (
            "a 2-D attention_mask is passed, and any 2-D mask switches packed isolation off in "
            "transformers; leave it out"
        )
    if mask is not None:
        return f'the attention_mask {shape_of(mask)} itself, or attention "{attention}" misusing it'
    return (
        _lost_boundaries(model, packed, attention)
        or _joined_images(packed)
        or _blind_mask(model, packed, leaks)
        or "a layer of the model mixes positions; look for layers other than attention"
    )


def _lost_boundaries(model: nn.Module, packed: PackedInputs, attention: str) -> str | None:
    """Return the reason, if this attention cannot find the segments in the inputs."""
    inputs, segments, _ = packed
    boundaries, positions = inputs.get("cu_seq_lens_q"), inputs.get("position_ids")
    if attention == "torch_varlen" or attention.startswith("flash"):
        if boundaries is not None:
            return None
        return (
            f'attention "{attention}" needs cu_seq_lens_q; pass what Batch.model_inputs() returns'
        )
    if inputs.get("use_cache") is not False:
        return (
            "use_cache is not False (the default of the config is True), and with a cache "
            "transformers ignores restarting position_ids; pass use_cache=False"
        )
    if positions is not None and uses_mrope(model) and positions.shape[:-2] != (4,):
        return (
            f"position_ids are {list(positions.shape)}, and this model separates packed examples "
            f"by {[4, *inputs['input_ids'].shape]} only, with text positions that restart first; "
            "pass the processor to the collator in place of the tokenizer"
        )
    if boundaries is not None:
        unread = inputs | {"cu_seq_lens_q": None}
        if positions is None or not torch.equal(find_segments(unread).ids_RW, segments.ids_RW):
            return f'attention "{attention}" ignores cu_seq_lens, and position_ids do not restart'
    return None


def _joined_images(packed: PackedInputs) -> str | None:
    """Return the reason, if the model makes its blocks of images from the types of tokens."""
    types = "" if packed.images is None else packed.images.layout.family.token_types
    if not types or types not in packed.inputs:
        return None
    return (
        "transformers up to 5.23 takes images that touch for one block, also where one example "
        f"ends and the next begins; {_IMAGE_BLOCKS}"
    )


def _blind_mask(
    model: nn.Module, packed: PackedInputs, leaks: Callable[[PackedInputs], bool]
) -> str | None:
    """Return the reason, if a block mask stops the leak: the model's mask ignores position_ids."""
    # so do afmoe, biogpt, bloom, falcon, gpt_oss, mpt, opt and xglm in transformers 5.23
    attention = attention_of(config_of(model))
    if attention not in ("sdpa", "eager"):
        return None
    mask = block_mask(packed.segments.ids_RW, attention)
    masked = packed._replace(inputs=packed.inputs | {"attention_mask": mask})
    blind = "the model builds its mask without position_ids, so they do not separate examples"
    try:
        if leaks(masked):
            return None
    except IsolationError as error:
        return f"perhaps {blind}, and a block mask does not help: {error}"
    window, _ = sliding_window(config_of(model))
    option = "" if window is None else f", sliding_window={window}"
    return (
        f"{blind} (gpt-oss, opt and falcon do so in transformers 5.23); a block mask keeps the "
        f'segments apart: pass Batch.model_inputs("{attention}", mask="block"{option})'
    )


def reason_of_difference(packed: PackedInputs, segment: int) -> str:
    """Return the likely reason why a segment differs from a run alone."""
    inputs, segments, images = packed
    mask, given = inputs.get("attention_mask"), packed.positions_of(segment)
    if given is not None:
        own = packed.alone(segment)["position_ids"]
        if given.shape != own.shape:
            return (
                f"position_ids are {list(inputs['position_ids'].shape)}, but rows with images need "
                f"{[len(own), *segments.ids_RW.shape]}; pass what Batch.model_inputs() returns"
            )
        if not torch.equal(given, own):
            return (
                "its position_ids differ from those alone; pass what Batch.model_inputs() returns"
            )
    types = "" if images is None else images.layout.family.token_types
    if types and types not in inputs:
        return f"{types} is not passed; pass what Batch.model_inputs() returns"
    if types and mask is None:
        return (
            "the model makes blocks of images from positions that restart, and loses them; "
            + _IMAGE_BLOCKS
        )
    if mask is not None and not is_2d(mask):
        return f"the attention_mask {shape_of(mask)} lets tokens see too much or too little"
    if isinstance(mask, Tensor) and is_2d(mask) and not mask[segments.rows[segment], 0]:
        return (
            "the model reads the pads on the left as tokens (so do RecurrentGemma, RWKV and xLSTM "
            'in transformers 5.23); pass padding_side="right" to PaddedCollator'
        )
    return (
        "a part of the model depends on the place of an example in its row, or on the length of "
        "the others; use PaddedCollator for this model"
    )
