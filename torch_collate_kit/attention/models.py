"""Models: properties that matter for packed rows, read from the config, and a forward pass."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_collate_kit.errors import IsolationError
from torch_collate_kit.vision import VisionLayout
from torch_collate_kit.vision.families import OTHER, family_of

_MODEL_TYPES = """
    bailing_hybrid bamba falcon_h1 falcon_mamba glm5_next glm5_next_text glm5_next_vision
    granitemoehybrid inkling2 inkling2_text inkling2_vision inkling_audio inkling_mm_model
    inkling_text inkling_vision jamba jev kimi_linear lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl mamba
    mamba2 minicpm_ocr minicpmv4_6 minicpmv4_7 minimax nemo_speechlm nemotron_h nemotron_h_omni
    olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_moe_vision qwen3_5_text
    qwen3_5_vision qwen3_next qwen4_exp qwen4_exp_text qwen4_exp_vision recurrent_gemma rwkv
    xlstm zamba zamba2 zaya
"""
RECURRENT_MODELS = frozenset(_MODEL_TYPES.split())
"""``model_type`` of the models of transformers 5.23 with recurrent, linear-attention or convolution
layers in their text model, and those of their parts."""
_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
_RECURRENT_LAYERS = ("linear", "conv", "recurrent", "mamba", "ssm", "rwkv", "delta", "hybrid")
_MEDIA = {"image", "video", "audio", "vision", "boi", "eoi"}
_BY_PRECISION = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel and similar wrappers."""
    inner = getattr(model, "module", model)
    return inner if isinstance(inner, nn.Module) else model


def _config(model: nn.Module) -> Any:
    return getattr(_unwrap(model), "config", None)


def _text_config(model: nn.Module) -> Any:
    """Return the config of the text model, which reads the packed rows."""
    config = _config(model)
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
    return family_of(config=_config(model)).positions == "mrope"


def vocabulary(model: nn.Module, ids_RW: Tensor) -> tuple[int, Tensor]:
    """Return the vocabulary size, and the ids of placeholders of images, video and audio."""
    embed = getattr(_unwrap(model), "get_input_embeddings", lambda: None)()
    size = getattr(embed, "num_embeddings", None) or int(ids_RW.max()) + 1
    configs, fixed = [_config(model)], set()
    for config in configs:  # grows by the configs nested in it (text_config, ...)
        for key, value in getattr(config, "__dict__", {}).items():
            if hasattr(value, "model_type"):
                configs.append(value)
            is_id = key.endswith(("_token_id", "_token_index")) and isinstance(value, int)
            if is_id and key.split("_")[0] in _MEDIA:
                fixed.add(value)
    return size, torch.tensor(sorted(fixed), dtype=ids_RW.dtype, device=ids_RW.device)


def refuse_recurrent(model: nn.Module) -> None:
    """Refuse packed rows for a model of ``RECURRENT_MODELS``, or whose config lists such layers.

    Which kernels can be imported makes no difference: transformers passes boundaries to few of
    them, and a leak at initial weights in bfloat16 is smaller than rounding.
    """
    config, text_config = _config(model), _text_config(model)
    kinds = [str(kind) for name in _LAYER_LISTS for kind in getattr(text_config, name, None) or ()]
    layers = {kind for kind in kinds if any(part in kind.lower() for part in _RECURRENT_LAYERS)}
    types = [getattr(each, "model_type", None) for each in (config, text_config)]
    if not layers and RECURRENT_MODELS.isdisjoint(types):
        return
    name = next((name for name in types if name in RECURRENT_MODELS), types[0])
    raise IsolationError(
        f"{'the' if name is None else name} model has "
        f"{sorted(layers) or 'recurrent, convolution or linear-attention'} layers, which carry "
        "state from one segment of a row into the next, with cu_seq_lens_q and whatever kernels "
        'are installed too; use PaddedCollator(..., padding_side="right") for this model'
    )


def refuse_packed_images(
    model: nn.Module, inputs: Mapping[str, Any], vision: VisionLayout | None
) -> None:
    """Refuse rows with several examples and images, if the model's family is not packed."""
    family = family_of(config=_config(model))
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
