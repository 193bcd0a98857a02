"""Tiny models of the 28 families whose layers carry state from token to token.

The pad token has a random embedding, since a row of zeros hides faults of padding. Families that
the installed transformers lacks are skipped by name.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

from tests.tiny_models import TINY, TRANSFORMERS, VOCAB

_SMALL = {name: TINY[name] for name in TINY if name not in ("head_dim", "initializer_range")}
_SMALL |= {"max_position_embeddings": 512}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LINEAR = ["linear_attention", "full_attention"]
_HEADS = {"head_dim": 8}
_DELTA = {
    "layer_types": _LINEAR,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
_QWEN_ROPE = {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}
_BAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}
_SSM = {"state_size": 8, "time_step_rank": 4}
_INKLING = {
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 16,
    "d_rel": 4,
    "rel_extent": 64,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "unpadded_vocab_size": VOCAB,
}
_GLM_TEXT = {
    **_SMALL, **_MLA, "q_lora_rank": 16, "qk_rope_head_dim": 0, "layer_types": ["linear_attention",
     "indexed_attention"], "n_routed_experts": 4, "mlp_layer_types": ["dense", "sparse"],
    "linear_num_heads": 4, "linear_head_dim": 8, "index_topk": 8, "index_kpool": 4,
    "index_head_dim": 16, "index_n_heads": 2, "hc_mult": 2,
}  # fmt: skip
_GLM_VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 16,
    "projection_intermediate_size": 16,
}  # fmt: skip

# family: the stem of its classes, the config's name, and its own options
_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", "Config", {**_DELTA, **_HEADS, **_MOE}),
    "qwen3_5": ("Qwen3_5", "TextConfig", {**_DELTA, **_HEADS, **_QWEN_ROPE}),
    "qwen3_5_moe": ("Qwen3_5Moe", "TextConfig", {**_DELTA, **_HEADS, **_MOE, **_QWEN_ROPE}),
    "olmo_hybrid": ("OlmoHybrid", "Config", {**_DELTA, "linear_num_key_heads": 4}),
    "kimi_linear": ("KimiLinear", "Config", {**_MLA, "layer_types": _LINEAR, "linear_head_dim": 8,
     "linear_num_heads": 4, "mlp_layer_types": ["dense", "sparse"]}),
    "bailing_hybrid": ("BailingHybrid", "Config", {**_MLA, **_HEADS, "layer_types": _LINEAR,
     "mlp_layer_types": ["dense", "sparse"], "num_mtp_layers": 0}),
    "bamba": ("Bamba", "Config", {**_BAMBA, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1", "Config", {**_BAMBA, "mamba_d_ssm": 64}),
    "nemotron_h": ("NemotronH", "Config", {"layers_block_type": ["linear_attention",
     "full_attention"], "head_dim": 8, "ssm_state_size": 16, "mamba_num_heads": 8,
     "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 8}),
    "zamba2": ("Zamba2", "Config", {"layers_block_type": ["linear_attention", "hybrid"],
     "mamba_d_state": 16, "n_mamba_heads": 8, "chunk_size": 8, "num_key_value_heads": 4}),
    "granitemoehybrid": ("GraniteMoeHybrid", "Config", {**_BAMBA, "layer_types": _LINEAR,
     "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16}),
    "lfm2": ("Lfm2", "Config", {"layer_types": ["conv", "full_attention"],
     "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("Lfm2Moe", "Config", {"layer_types": ["conv", "full_attention"],
     "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2,
     "moe_intermediate_size": 16}),
    "mamba2": ("Mamba2", "Config", {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2,
     "chunk_size": 8}),
    "mamba": ("Mamba", "Config", _SSM),
    "falcon_mamba": ("FalconMamba", "Config", _SSM),
    "jamba": ("Jamba", "Config", {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
     "mamba_d_state": 8, "mamba_dt_rank": 4}),
    "zamba": ("Zamba", "Config", {"layers_block_type": ["linear_attention", "hybrid", "hybrid"],
     "num_hidden_layers": 3, "mamba_d_state": 8, "mamba_dt_rank": 4, "num_key_value_heads": 4,
     "attention_head_dim": 16}),
    "lfm3": ("Lfm3", "Config", {"layer_types": ["conv", "full_attention"], "head_dim": 8}),
    "inkling": ("Inkling", "TextConfig", {**_INKLING, "mlp_layer_types": ["dense", "sparse"]}),
    "inkling2": ("Inkling2", "TextConfig", {**_INKLING, "n_layers_per_attn_res_block": 1}),
    "minimax": ("MiniMax", "Config", {"layer_types": _LINEAR, "block_size": 8,
     "num_local_experts": 4, "head_dim": 8}),
    "recurrent_gemma": ("RecurrentGemma", "Config", {"block_types": ["recurrent", "attention"],
     "lru_width": 32, "attention_window_size": 16, "num_key_value_heads": 2}),
    "rwkv": ("Rwkv", "Config", {"attention_hidden_size": 32}),
    "xlstm": ("xLSTM", "Config", {"num_heads": 2, "chunk_size": 8,
     "autocast_kernel_dtype": "float32", "ffn_round_up_to_multiple_of": 8}),
    "zaya": ("Zaya", "Config", {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8,
     "router_hidden_size": 16}),
    "qwen4_exp": ("Qwen4Exp", "TextConfig", {**_DELTA, **_HEADS, **_MOE, **_QWEN_ROPE,
     "hc_count": 2, "hc_lowrank": 8, "ple_layer_ids": [1], "heads_per_ngram": 2,
     "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 1,
     "layer_types": ["linear_attention", "indexed_attention"],
     "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
     "indexer_compress_ratio": 2}),
    "glm5_next": ("Glm5Next", "Config", {"text_config": _GLM_TEXT, "vision_config": _GLM_VISION}),
}  # fmt: skip
FAMILIES = tuple(_KINDS)
ATTENTION = {"inkling": "sdpa", "qwen4_exp": "sdpa", "inkling2": "eager"}
"""The attention of families that ``torch_varlen`` refuses."""


def hybrid_model(
    family: str,
    attention: str = "torch_varlen",
    *,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    **changes: Any,
) -> Any:
    """A model in eval mode; all matrices times ``scale``, the same for all of its attentions."""
    build = _built.__wrapped__ if changes else _built
    model = copy.deepcopy(build(family, attention, scale, **changes)).to(dtype)
    for module in model.modules():
        if type(module).__name__ == "Inkling2TopKRouter":
            module.float()  # it converts its input to float32
    return model


@functools.cache
def _built(family: str, attention: str, scale: float, **changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    from torch_collate_kit.attention import register_torch_varlen

    register_torch_varlen()
    stem, config_name, own = _KINDS[family]
    config_type = getattr(transformers, stem + config_name, None)
    if config_type is None or (family == "glm5_next" and TRANSFORMERS < (5, 23)):
        pytest.skip(f"transformers {transformers.__version__} has no such {family}")
    is_whole = "text_config" in own
    options = {**({} if is_whole else _SMALL), **copy.deepcopy(own), **changes}
    config = config_type(**options)
    config._attn_implementation = attention
    config.get_text_config()._experts_implementation = "eager"  # the grouped one has no float64
    name = f"{stem}For{'ConditionalGeneration' if is_whole else 'CausalLM'}"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, name)(config)
        with torch.no_grad():
            embeddings = model.get_input_embeddings().weight
            embeddings[0] = torch.randn(embeddings.shape[1]) * embeddings.std()
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1 and "A_log" not in name:  # not the logarithm of a decay
                    parameter *= scale
    return model.eval()
