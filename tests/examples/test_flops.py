"""FLOPs of a step against torch's own counter, and against counts by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from run_log import flops_per_step, flops_per_token, peak_flops
from torch.utils.flop_counter import FlopCounterMode

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / num_attention_heads
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SLIDES = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
# linear layers per token by hand: q and o 32 * 64, k and v 32 * 32, three of 32 * 48 in the MLP
LAYER = 2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 48
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3Config": ({}, 2 * LAYER),
    "LlamaConfig": ({}, 2 * LAYER),
    "MistralConfig": ({"sliding_window": 4}, 2 * LAYER),
    "Gemma3TextConfig": (SLIDES, 2 * LAYER),
    "Qwen3MoeConfig": (EXPERTS, 2 * (LAYER - 3 * 32 * 48 + 2 * 3 * 32 * 24 + 8 * 32)),
    "MixtralConfig": (
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        2 * (LAYER + 3 * 32 * 48 + 8 * 32),
    ),
}


def config_of(name: str, **changes: Any) -> Any:
    return getattr(transformers, name)(**{**SIZES, **FAMILIES[name][0], **changes})


@pytest.mark.parametrize("name", FAMILIES)
def test_linear_layers_by_hand(name: str) -> None:
    layers, head = flops_per_token(config_of(name, tie_word_embeddings=True))
    assert layers == 6 * FAMILIES[name][1]
    assert head == 6 * 32 * 50


@pytest.mark.parametrize("name", ["Qwen3Config", "LlamaConfig"])
def test_equal_to_the_counter_of_torch(name: str) -> None:
    """It counts whole squares of attention, of which a causal token sees the lower half."""
    length, config = 12, config_of(name, tie_word_embeddings=False)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(3, 3 + length)[None]).logits.sum().backward()
    tables = counter.get_flop_counts()["Global"]
    squares = tables[torch.ops.aten.bmm]
    of_heads = 2 * 3 * 2 * 2 * 4 * length * length * 16  # layers, passes, products, 2, heads
    rotary = 2 * 8 * length  # angles, a product of matrices in older versions of transformers
    assert squares in (of_heads, of_heads + rotary)
    causal = of_heads * (length + 1) / (2 * length)
    assert flops_per_step(config, [length]) == tables[torch.ops.aten.mm] + causal


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("Qwen3Config", 2 * (1 + 3 + 15 + 55)),  # n * (n + 1) / 2 of 1, 2, 5, 10; two layers
        ("MistralConfig", 2 * (1 + 3 + 14 + 34)),  # at most four: 1 + 2 + 3 + 4 + 4 * (n - 4)
        ("Gemma3TextConfig", (1 + 3 + 14 + 34) + (1 + 3 + 15 + 55)),
    ],
)
def test_pairs_that_attention_sees(name: str, seen: int) -> None:
    config, lengths = config_of(name), np.array([1, 2, 5, 10], dtype=np.int32)
    linear = sum(flops_per_token(config)) * 18
    assert flops_per_step(config, lengths) - linear == 12 * 4 * 16 * seen


def test_key_and_value_of_other_sizes() -> None:
    """DeepSeek's heads: keys of 8 + 4 entries, values of 16."""
    latent = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    dense = {"first_k_dense_replace": 2, "v_head_dim": 16}
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim"}
    config = transformers.DeepseekV3Config(**sizes, **latent, **dense)
    linear = sum(flops_per_token(config)) * 2
    assert flops_per_step(config, [2]) - linear == 6 * 4 * (12 + 16) * 3 * 2


def test_heads_and_other_layers() -> None:
    """Only trained tokens pass the head; of a vision-language model its text counts."""
    config = config_of("Qwen3Config")
    all_tokens, some = (flops_per_step(config, [10], num_head_tokens=n) for n in (None, 4))
    assert all_tokens - some == 6 * 6 * 32 * 50
    both = transformers.LlavaConfig(text_config={**SIZES, "model_type": "llama"})
    assert flops_per_step(both, [3]) == flops_per_step(transformers.LlamaConfig(**SIZES), [3])
    config = transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])
    with pytest.raises(ValueError, match=r"a 'conv' layer are not known.*leave MFU out"):
        flops_per_step(config, [3])


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        *[(name, None) for name in ("cpu", "NVIDIA H20", "NVIDIA GeForce RTX 4090 D")],
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_peaks(name: str, tera: float | None) -> None:
    assert peak_flops(name) == (tera and tera * 1e12)
