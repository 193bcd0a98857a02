"""Models whose layers carry state from token to token, which are refused packed rows."""

from __future__ import annotations

from typing import Any

from torch_collate_kit.errors import IsolationError

__all__ = ["RECURRENT_MODELS", "refuse_recurrent_layers"]

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


def refuse_recurrent_layers(config: Any, text_config: Any) -> None:
    """Refuse packed rows for a model of ``RECURRENT_MODELS``, or whose config lists such layers.

    Which kernels can be imported makes no difference: transformers passes boundaries to few of
    them, and a leak at initial weights in bfloat16 is smaller than rounding.
    """
    layers = sorted(
        {
            str(kind)
            for name in _LAYER_LISTS
            for kind in getattr(text_config, name, None) or ()
            if any(part in str(kind).lower() for part in _RECURRENT_LAYERS)
        }
    )
    types = [getattr(each, "model_type", None) for each in (config, text_config)]
    if not layers and RECURRENT_MODELS.isdisjoint(types):
        return
    model = next((name for name in types if name in RECURRENT_MODELS), types[0])
    raise IsolationError(
        f"{'the' if model is None else model} model has "
        f"{layers or 'recurrent, convolution or linear-attention'} layers, which carry state from "
        "one segment of a row into the next, with cu_seq_lens_q and whatever kernels are installed "
        'too; use PaddedCollator(..., padding_side="right") for this model'
    )
