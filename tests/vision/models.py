"""Tiny random vision-language models, built from configs, in which attention matters."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.vision.processors import PINPOINTS, TILE

Config = dict[str, Any]  # arguments of a config class

TEXT: Config = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER: Config = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": TILE,
    "patch_size": 14,
}


def _rope(theta: float = 10000.0, **more: Any) -> Config:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


_ROPE_QWEN2 = _rope(mrope_section=[2, 3, 3])
_ROPE_QWEN3 = _rope(mrope_section=[4, 2, 2], mrope_interleaved=True)
_ROPE_GLM = _rope(mrope_section=[2, 1, 1], partial_rotary_factor=0.5)
_QWEN_IDS = {"video_token_id": 8, "vision_start_token_id": 5, "vision_end_token_id": 6}
_GLM_IDS = {
    "video_token_id": 8,
    "image_start_token_id": 5,
    "image_end_token_id": 6,
    "video_start_token_id": 9,
    "video_end_token_id": 10,
}


def _qwen2_vl() -> Config:
    tower = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    return {"text_config": {**TEXT, **_ROPE_QWEN2}, "vision_config": tower, **_QWEN_IDS}


def _qwen2_5_vl() -> Config:
    tower = {
        **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2},
        **{"out_hidden_size": 64, "window_size": 56, "fullatt_block_indexes": [1]},
    }
    return {"text_config": {**TEXT, **_ROPE_QWEN2}, "vision_config": tower, **_QWEN_IDS}


def _qwen3_tower(**more: Any) -> Config:
    return {
        **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2},
        **{"out_hidden_size": 64, "num_position_embeddings": 16},
        **more,
    }


def _qwen3_vl() -> Config:
    text = {**TEXT, **_ROPE_QWEN3, "head_dim": 16, "num_hidden_layers": 3}
    tower = _qwen3_tower(deepstack_visual_indexes=[0, 1])
    return {"text_config": text, "vision_config": tower, **_QWEN_IDS}


def _qwen3_vl_moe() -> Config:
    config = _qwen3_vl()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    untied = {"tie_word_embeddings": False}
    return {**config, "text_config": {**config["text_config"], **experts, **untied}}


def _qwen3_5() -> Config:
    text = {
        **TEXT,
        **_rope(mrope_section=[4, 2, 2], mrope_interleaved=True, partial_rotary_factor=1.0),
        **{"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    }
    return {"text_config": text, "vision_config": _qwen3_tower(), **_QWEN_IDS}


def _qwen4_exp() -> Config:
    config = _qwen3_5()
    del config["text_config"]["intermediate_size"]
    more = {
        **{"num_hidden_layers": 3, "hc_lowrank": 8, "hc_count": 2},
        **{"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        **{"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48},
        **{"num_experts": 4, "num_experts_per_tok": 2},
        **{"ple_layer_ids": [1], "ple_embed_dim": 16, "ngram_vocab_size_base": 50},
        **{"heads_per_ngram": 2, "split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": 8},
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 8, "indexer_compress_ratio": 2},
    }
    return {**config, "text_config": {**config["text_config"], **more}}


def _glm4v() -> Config:
    tower = {
        **{"depth": 2, "hidden_size": 32, "num_heads": 2, "image_size": TILE},
        **{"out_hidden_size": 64, "intermediate_size": 48},
    }
    return {"text_config": {**TEXT, **_ROPE_GLM}, "vision_config": tower, **_GLM_IDS}


def _glm4v_moe() -> Config:
    config = _glm4v()
    experts = {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
        **{"head_dim": 16, "first_k_dense_replace": 1},
    }
    return {**config, "text_config": {**config["text_config"], **experts}}


def _internvl() -> Config:
    return {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {**TOWER, "layer_scale_init_value": 1.0},
        "image_seq_length": 4,
        "tie_word_embeddings": False,
    }


def _llava_onevision() -> Config:
    return {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER},
        "video_token_index": 6,
        "image_grid_pinpoints": PINPOINTS,
    }


def _llava_next() -> Config:
    return {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **TOWER},
        "image_grid_pinpoints": PINPOINTS,
        "image_seq_length": 16,
    }


def _idefics3() -> Config:
    return {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": TOWER,
        "scale_factor": 2,
    }


def _gemma3() -> Config:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    text = {
        **{**TEXT, "num_hidden_layers": 3, "head_dim": 16, "query_pre_attn_scalar": 16},
        **{"sliding_window": 24, "layer_types": kinds, "tie_word_embeddings": False},
    }
    return {
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER},
        "mm_tokens_per_image": 4,
        "boi_token_index": 5,
        "eoi_token_index": 6,
        "tie_word_embeddings": False,
    }


def _paligemma() -> Config:
    text = {**TEXT, "model_type": "gemma", "head_dim": 16, "tie_word_embeddings": False}
    return {
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER},
        "projection_dim": 64,
        "hidden_size": 64,
        "tie_word_embeddings": False,
    }


def _mllama() -> Config:
    tower = {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_global_layers": 1, "attention_heads": 2, "image_size": TILE, "patch_size": 14},
        **{"intermediate_layers_indices": [0], "vision_output_dim": 64},
    }
    text = {**TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1], **_rope()}
    return {"text_config": text, "vision_config": tower}


def _ernie4_5_vl_moe() -> Config:
    text = {
        **{**TEXT, **_rope(mrope_section=[3, 3, 2])},
        **{"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
        **{"moe_intermediate_size": [48, 32], "mlp_layer_types": ["dense", "sparse"]},
    }
    tower = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
    return {"text_config": text, "vision_config": tower, **_GLM_IDS}


def _video_llama_3() -> Config:
    tower = {name: size for name, size in TOWER.items() if name != "image_size"}
    return {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": tower,
        "video_token_id": 8,
    }


def _ovis2() -> Config:
    return {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {**TOWER, "vocab_size": 32},
        "visual_indicator_token_ids": [7, 8, 9, 10, 11],
        "hidden_size": 64,
    }


# The class prefix of each family and the arguments of its config.
CONFIGS: dict[str, tuple[str, Callable[[], Config]]] = {
    "qwen2_vl": ("Qwen2VL", _qwen2_vl),
    "qwen2_5_vl": ("Qwen2_5_VL", _qwen2_5_vl),
    "qwen3_vl": ("Qwen3VL", _qwen3_vl),
    "qwen3_vl_moe": ("Qwen3VLMoe", _qwen3_vl_moe),
    "qwen3_5": ("Qwen3_5", _qwen3_5),
    "qwen4_exp": ("Qwen4Exp", _qwen4_exp),
    "glm4v": ("Glm4v", _glm4v),
    "glm4v_moe": ("Glm4vMoe", _glm4v_moe),
    "internvl": ("InternVL", _internvl),
    "llava_onevision": ("LlavaOnevision", _llava_onevision),
    "llava_next": ("LlavaNext", _llava_next),
    "idefics3": ("Idefics3", _idefics3),
    "smolvlm": ("SmolVLM", _idefics3),
    "gemma3": ("Gemma3", _gemma3),
    "paligemma": ("PaliGemma", _paligemma),
    "mllama": ("Mllama", _mllama),
    "ernie4_5_vl_moe": ("Ernie4_5_VLMoe", _ernie4_5_vl_moe),
    "video_llama_3": ("VideoLlama3", _video_llama_3),
    "ovis2": ("Ovis2", _ovis2),
}


def build(
    name: str, *, vocab_size: int, image_token_id: int, attn_implementation: str | dict[str, str]
) -> Any:
    """A model in eval mode, fp32; the same weights for the same family, whatever its attention."""
    import transformers

    prefix, make_config = CONFIGS[name]
    merger = getattr(getattr(transformers, f"{prefix}Model", None), "inputs_merger", None)
    if name == "smolvlm" and merger and "vision_config.patch_size" in inspect.getsource(merger):
        pytest.skip(
            f"SmolVLM of transformers {transformers.__version__} takes the size of a patch "
            "for the tokens of an image"
        )
    arguments = make_config()
    arguments["text_config"] = {**arguments["text_config"], "vocab_size": vocab_size}
    arguments["image_token_id"] = image_token_id
    config = getattr(transformers, f"{prefix}Config")(**arguments)
    config._experts_implementation = "eager"
    model_class = getattr(transformers, f"{prefix}ForConditionalGeneration")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class._from_config(config, attn_implementation=attn_implementation)
        _randomize(model)
    return model.float().eval()


@torch.no_grad()
def _randomize(model: nn.Module) -> None:
    """Weights so large that attention, positions and images move the logits, which are 5 to 10."""
    kept = {p for m in model.modules() if "Norm" in type(m).__name__ for p in m.parameters(False)}
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    for parameter in model.parameters():
        if parameter in kept:
            continue
        if parameter.numel() == 1:  # a gate, closed at 0
            parameter.fill_(1)
        elif parameter.dim() < 2:
            parameter.normal_(0, 0.3)
        elif parameter in tables:
            parameter.normal_(0, 1)
        else:
            fan_in = parameter.shape[-1] if parameter.dim() == 3 else parameter[0].numel()
            parameter.normal_(0, 1.5 / math.sqrt(fan_in))
    hidden_size = model.config.get_text_config().hidden_size
    if "gemma" in model.config.get_text_config().model_type:  # multiplies by the root itself
        model.get_input_embeddings().weight.mul_(hidden_size**-0.5)
    largest = 3.3 if model.config.model_type == "qwen4_exp" else 2.2  # it mixes its streams
    model.get_output_embeddings().weight.normal_(0, largest * hidden_size**-0.5)
