"""Small models of five families and three hybrids, random weights: no network is needed."""

from __future__ import annotations

from typing import Any

import torch

from torch_collate_kit import register_torch_varlen

__all__ = ["FAMILIES", "HYBRIDS", "VOCABULARY", "WINDOW", "small_model"]

VOCABULARY, WINDOW = 512, 16
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,  # attention then matters as much as the token itself
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDING_THEN_FULL = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 64}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 64,
            "sliding_window": WINDOW,
            "layer_types": _SLIDING_THEN_FULL,
            "query_pre_attn_scalar": 32,  # not the head dimension: the scale must be passed on
        },
    ),
}
# One for each set of kernels: fla, causal_conv1d alone, mamba_ssm.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            "head_dim": 64,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "bamba": (
        "BambaConfig",
        {
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "mamba_chunk_size": 64,
        },
    ),
}


def small_model(kind: str, attention: str, dtype: torch.dtype, device: torch.device) -> Any:
    """In training mode; the same weights for the same kind, whatever its attention and dtype."""
    import transformers

    register_torch_varlen()
    config_name, own = (FAMILIES | HYBRIDS)[kind]
    config = getattr(transformers, config_name)(**_SIZES, **own)
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(device, dtype).train()
