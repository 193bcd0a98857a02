"""Tiny transformers models and hand-made packed inputs, for tests of packed attention."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import Tensor

TRANSFORMERS = tuple(int(part) for part in version("transformers").split(".")[:2])
"""The installed version, such as (5, 24)."""
VOCAB = 61
WINDOW = 4
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # attention then matters as much as the token itself
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDING_THEN_FULL = ["sliding_attention", "full_attention"]
_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "sliding_window": WINDOW,
            "layer_types": _SLIDING_THEN_FULL,
            "query_pre_attn_scalar": 4,  # not the head dimension: the scale must be passed on
        },
    ),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"sliding_window": WINDOW,
     "layer_types": _SLIDING_THEN_FULL}),
    # The rest build their masks without position_ids in transformers 5.23.
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {"sliding_window": WINDOW,
     "layer_types": _SLIDING_THEN_FULL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32,
     "dropout": 0.0, "init_std": 0.3}),
    "falcon": ("FalconConfig", "FalconForCausalLM", {"alibi": False}),
    "falcon_alibi": ("FalconConfig", "FalconForCausalLM", {"alibi": True}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_dropout": 0.0}),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
}  # fmt: skip
MODELS = ["llama", "qwen2", "qwen3", "mistral", "gemma3"]


def tiny_model(
    kind: str,
    attention: str = "torch_varlen",
    *,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Any:
    """A model in eval mode; the same weights for the same kind, whatever its attention."""
    transformers = pytest.importorskip("transformers")
    from torch_collate_kit.attention import register_torch_varlen

    register_torch_varlen()
    config_name, model_name, own = _KINDS[kind]
    config_type, options = getattr(transformers, config_name), {**TINY, **own, **changes}
    if isinstance(getattr(config_type, "head_dim", None), property):  # Falcon computes its own
        del options["head_dim"]
    config = config_type(**options)
    config._attn_implementation = attention
    config._experts_implementation = "eager"  # the grouped one has no float64
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, model_name)(config)
    return model.to(dtype).eval()


def token_ids(*shape: int, seed: int = 0) -> Tensor:
    """Random tokens that are none of the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, shape, generator=generator)


def packed_inputs(*rows: list[int], varlen: bool = True) -> dict[str, Any]:
    """Model inputs of rows that consist of segments of the given lengths, all rows equally wide.

    >>> inputs = packed_inputs([2, 1], [3])
    >>> inputs["position_ids"].tolist(), inputs["cu_seq_lens_q"].tolist()
    ([[0, 1, 0], [0, 1, 2]], [0, 2, 3, 6])
    """
    lengths = [length for row in rows for length in row]
    inputs: dict[str, Any] = {
        "input_ids": token_ids(len(rows), sum(rows[0])),
        "position_ids": torch.cat([torch.arange(n) for n in lengths]).view(len(rows), -1),
        "use_cache": False,
    }
    if varlen:
        cu_seq_lens = torch.tensor([0, *lengths]).cumsum(0).int()
        inputs |= {"cu_seq_lens_q": cu_seq_lens, "cu_seq_lens_k": cu_seq_lens}
        inputs |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    return inputs


def segment_slices(*rows: list[int]) -> list[tuple[int, slice]]:
    """Row and columns of every segment."""
    slices = []
    for row, lengths in enumerate(rows):
        start = 0
        for length in lengths:
            slices.append((row, slice(start, start + length)))
            start += length
    return slices
