"""FLOPs of a step against torch's own counter, and against counts by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from run_log import flops_per_step, peak_flops
from torch.utils.flop_counter import FlopCounterMode

SIZES: dict[str, Any] = {
    **{"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0},
    "head_dim": 16,  # not hidden_size / num_attention_heads
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
# linear layers per token by hand: q and o 32 * 64, k and v 32 * 32, three of 32 * 48 in the MLP
LAYER, MLP = 2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 48, 3 * 32 * 48
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MOE = LAYER - MLP + 2 * 3 * 32 * 24 + 8 * 32  # two of the experts, and the router
# Weights that a token passes in a layer, and tokens squared that two layers see for 1, 2, 5 and 10.
FAMILIES: dict[str, tuple[dict[str, Any], int, int]] = {
    "Qwen3Config": ({}, LAYER, 2 * (1 + 4 + 25 + 100)),
    "MistralConfig": ({"sliding_window": 4}, LAYER, 2 * (1 + 4 + 24 + 64)),  # w * (2 * n - w)
    "Gemma3TextConfig": ({"sliding_window": 4, **MIXED}, LAYER, 130 + 93),
    "Qwen3MoeConfig": (EXPERTS, MOE, 2 * 130),
    "MixtralConfig": (
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        LAYER + MLP + 8 * 32,
        2 * 130,
    ),
}


def config_of(name: str) -> Any:
    return getattr(transformers, name)(**{**SIZES, **FAMILIES[name][0]})


@pytest.mark.parametrize("name", FAMILIES)
def test_by_hand(name: str) -> None:
    """Only trained tokens pass the head; adapters save a third of what is frozen."""
    _, layer, squares = FAMILIES[name]
    linear, attention = 6 * 18 * 2 * layer, 6 * 4 * 16 * squares
    config, lengths = config_of(name), [1, 2, 5, 10]
    found = [flops_per_step(config, lengths, num_head_tokens=n) for n in (None, 4)]
    heads = [6 * 32 * 50 * tokens for tokens in (18, 4)]
    assert found == pytest.approx([linear + head + attention for head in heads], rel=1e-3)
    if "num_experts_per_tok" in FAMILIES[name][0]:
        with pytest.raises(ValueError, match=r"tokens pass an adapter of an expert is not known"):
            flops_per_step(config, lengths, num_adapter_parameters=3)
    else:
        adapted = flops_per_step(config, lengths, num_adapter_parameters=3)
        expected = (linear + heads[0]) * 4 / 6 + attention + 6 * 3 * 18
        assert adapted == pytest.approx(expected, rel=1e-3)


def test_shared_tokens_are_computed_once() -> None:
    """Attention is what own tokens add to the squares of their paths."""
    config = config_of("Qwen3Config")
    found = flops_per_step(config, [7, 5], shared_lengths=[0, 4])
    prefix = flops_per_step(config, [4])
    assert found == pytest.approx(
        flops_per_step(config, [7]) + flops_per_step(config, [5]) - prefix
    )


def test_equal_to_the_counter_of_torch() -> None:
    """It counts whole squares of attention, of which a causal token sees the lower half."""
    length, config = 12, config_of("Qwen3Config")
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(3, 3 + length)[None]).logits.sum().backward()
    tables = counter.get_flop_counts()["Global"]
    causal = tables[torch.ops.aten.bmm] / 2
    expected = tables[torch.ops.aten.mm] + causal
    assert flops_per_step(config, [length]) == pytest.approx(expected, rel=1e-3)


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
