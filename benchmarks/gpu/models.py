"""Qwen3 and Qwen3.5 models with random weights on the device, and their optimizer."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gpu.where import Where, is_out_of_memory
from torch_collate_kit import register_torch_varlen
from torch_collate_kit.attention.kernels import same_dtype

__all__ = [
    "HYBRID",
    "SETTINGS",
    "SIZES",
    "Setting",
    "built",
    "cast_for_flex",
    "checkpointed",
    "fitting",
]

VOCABULARY = 151_936
HYBRID = "Qwen3.5-0.8B"
# The published sizes; head_dim is 128 and 8 KV heads in all of Qwen3.
SIZES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    HYBRID: {
        "vocab_size": 248_320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,  # every fourth is attention, the others are gated delta nets
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_TINY_MIXERS: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@dataclass(frozen=True)
class Setting:
    """How the weights are kept, and whether activations are computed again."""

    weights: str
    checkpointing: bool

    def __str__(self) -> str:
        under = "float32 weights, bf16 autocast" if self.weights == "float32" else "bf16 weights"
        return under + (", gradient checkpointing" if self.checkpointing else "")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.weights == "float32" else torch.bfloat16


# The first that fits is taken.
SETTINGS = (Setting("float32", False), Setting("bfloat16", False), Setting("bfloat16", True))


def config_of(size: str, where: Where) -> Any:
    import transformers

    options = {**_COMMON, **SIZES[size], **(_TINY if where.is_tiny else {})}
    if size != HYBRID:
        return transformers.Qwen3Config(**options)
    del options["rope_parameters"]  # its own has sections for images
    return transformers.Qwen3_5TextConfig(**options | (_TINY_MIXERS if where.is_tiny else {}))


def built(size: str, where: Where, setting: Setting, attention: str = "torch_varlen") -> Any:
    """Made on the device itself, in training mode; the same weights every time."""
    import transformers

    register_torch_varlen()
    cast_for_flex()
    config = config_of(size, where)
    config._attn_implementation = attention
    torch.manual_seed(0)
    with where.device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=setting.dtype)
    if setting.checkpointing:
        checkpointed(model, use_reentrant=False)
    return model.train()


def checkpointed(model: Any, *, use_reentrant: bool) -> None:
    """Activations are computed again: by the name of transformers 5.23, else by that of 5.17."""
    old = model.gradient_checkpointing_enable
    enable = getattr(model, "activation_checkpointing_enable", old)
    enable({"use_reentrant": use_reentrant})


def cast_for_flex() -> None:
    """Flex attention refuses queries, keys and values of several dtypes, or computes in float32.

    Under autocast Qwen3 hands over float32 queries and keys, from its norms, and bf16 values.
    """
    import transformers
    from transformers.integrations import flex_attention

    def in_one_dtype(
        module: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any
    ) -> Any:
        heads = same_dtype(query, key, value)
        return flex_attention.flex_attention_forward(module, *heads, *rest, **options)

    transformers.AttentionInterface.register("flex_attention", in_one_dtype)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)


def fitting(
    size: str, where: Where, one_step: Callable[[Any, Any, Setting], object]
) -> tuple[Any, Any, Setting, list[str]]:
    """Model, optimizer and setting: the first one with which ``one_step`` does not run out of
    memory; and the settings that did."""
    too_large: list[str] = []
    for setting in SETTINGS:
        model = optimizer = None
        try:
            model = built(size, where, setting)
            optimizer = optimizer_of(model)
            one_step(model, optimizer, setting)
            one_step(model, optimizer, setting)  # with the states of the optimizer there
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            too_large.append(str(setting))
            if model is not None:
                model.zero_grad()
        else:
            return model, optimizer, setting, too_large
        del model, optimizer
        gc.collect()
        torch.cuda.empty_cache()
    raise torch.OutOfMemoryError(f"{size} does not fit with any of {too_large}")
