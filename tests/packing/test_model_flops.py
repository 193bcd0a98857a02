"""The FLOPs read from a config against runs of the model: its products, and its attended pairs."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from torch_collate_kit.packing import ModelCost

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
LATENT = {
    **{"kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6, "v_head_dim": 10},
    **{"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
}
WINDOW = {"sliding_window": 5}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

# name: class, what differs from SIZES, layers with a window
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("Llama", {"head_dim": 12}, 0),
    "qwen3": ("Qwen3", {"head_dim": 8}, 0),
    "gpt_neox": ("GPTNeoX", {"num_key_value_heads": 4}, 0),
    "starcoder2": ("Starcoder2", {"sliding_window": None}, 0),
    "mistral": ("Mistral", WINDOW, 3),
    "phi3": ("Phi3", WINDOW, 3),
    "qwen2, window unused": ("Qwen2", {**WINDOW, "use_sliding_window": False}, 0),
    "qwen2, window in the last two": ("Qwen2", {**WINDOW, "use_sliding_window": True,
     "max_window_layers": 1}, 2),
    "gemma2": ("Gemma2", {**MIXED, "head_dim": 12}, 2),
    "gemma3": ("Gemma3Text", {**MIXED, "head_dim": 12}, 2),
    "cohere2": ("Cohere2", MIXED, 2),
    "olmo3": ("Olmo3", MIXED, 2),
    "gpt_oss": ("GptOss", {**MIXED, "head_dim": 8, "num_local_experts": 4,
     "num_experts_per_tok": 2}, 2),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, 0),
    "qwen2_moe, every second layer": ("Qwen2Moe", {**EXPERTS, "num_experts": 4,
     "decoder_sparse_step": 2, "shared_expert_intermediate_size": 28}, 0),
    "qwen3_moe, but for one layer": ("Qwen3Moe", {**EXPERTS, "num_experts": 4, "head_dim": 8,
     "mlp_only_layers": [1]}, 0),
    "glm4_moe": ("Glm4Moe", {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 2,
     "first_k_dense_replace": 1} | {"head_dim": 8, "n_group": 1, "topk_group": 1}, 0),
    "ernie4_5_moe": ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 20,
     "moe_layer_interval": 1} | {"moe_num_shared_experts": 2, "moe_layer_start_index": 1,
     "moe_layer_end_index": 2}, 0),
    "deepseek_v3": ("DeepseekV3", {**EXPERTS, **LATENT, "q_lora_rank": 16, "n_shared_experts": 1,
     "first_k_dense_replace": 2}, 0),
    "deepseek_v3, queries in full": ("DeepseekV3", {**EXPERTS, **LATENT, "q_lora_rank": None,
     "first_k_dense_replace": 1}, 0),
}  # fmt: skip


def model_of(name: str) -> Any:
    prefix, changes, _ = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **changes})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return getattr(transformers, f"{prefix}Model")(config).eval()


def cost_of_flops(linear: int, quadratic: int, windowed: int, window: int) -> ModelCost:
    """In the unit in which the smaller coefficient of attention is 16."""
    unit = Fraction(16, min(n for n in (quadratic, windowed) if n))
    numbers = [round(n * unit) for n in (linear, quadratic, windowed)]
    return ModelCost(*numbers[:2], 0, 0, numbers[2], window)


def flops_of_layers(model: Any, num_tokens: int) -> int:
    """Of the matrix products in the decoder layers, for one sequence."""
    ids = torch.arange(num_tokens)[None] % 60 + 3
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False)
    counts = counter.get_flop_counts()
    of_layers = [
        sum(c.values()) for key, c in counts.items() if key.split(".")[-2:-1] == ["layers"]
    ]
    assert len(of_layers) == 3
    return sum(of_layers)


def pairs_per_layer(model: Any, num_tokens: int) -> list[int]:
    """Of a query and a key that it attends to."""
    ids = torch.arange(num_tokens)[None] % 60 + 3
    with torch.no_grad():
        attentions = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
    return [int((weights[0, 0] > 0).sum()) for weights in attentions]


@pytest.mark.parametrize("name", MODELS)
def test_matrix_products_are_those_of_a_run(name: str) -> None:
    model = model_of(name)
    found = ModelCost.of(model.config)
    short, long = (flops_of_layers(model, n) for n in (6, 12))
    # linear * n + square * n^2, as eager attention multiplies all pairs; half of them are causal
    square = (long - 2 * short) // (12 * 12 - 2 * 6 * 6)
    linear = (short - 36 * square) // 6
    gate = 2 * 32 * 1 if "shared_expert_intermediate_size" in MODELS[name][1] else 0
    assert 12 * linear + 144 * square == long
    windowed = square // 2 * MODELS[name][2] // 3
    window = 5 if windowed else 0
    assert found == cost_of_flops(linear - gate, square // 2 - windowed, windowed, window)


@pytest.mark.parametrize("name", MODELS)
def test_attended_pairs_are_those_of_a_run(name: str) -> None:
    model = model_of(name)
    cost = replace(ModelCost.of(model.config), language_linear=0)
    all_layers = cost.language_quadratic + cost.language_windowed_quadratic
    for n in (1, 4, 5, 6, 17):
        pairs = pairs_per_layer(model, n)
        # Twice the pairs are n^2 + n without a window; the cost leaves out the n, or the window.
        least = [min(n, 5) if p < n * (n + 1) // 2 else n for p in pairs]
        attended = sum(2 * p - m for p, m in zip(pairs, least, strict=True))
        assert 3 * cost.language(np.array([n])) == all_layers * attended, n


def test_recurrent_layers_have_no_quadratic_part() -> None:
    config = transformers.Qwen3NextConfig(
        **{**SIZES, **EXPERTS, "num_hidden_layers": 4, "num_experts": 4, "head_dim": 8},
        shared_expert_intermediate_size=24,
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
        **{"linear_key_head_dim": 6, "linear_value_head_dim": 10},
    )
    with torch.device("meta"):
        model = transformers.Qwen3NextModel(config)
    passed = 0
    for name, weight in model.layers.named_parameters():
        if weight.ndim > 1 and "shared_expert_gate" not in name:
            passed += weight.numel() // 2 if ".experts." in name else weight.numel()
    state = 3 * 3 * 4 * 6 * 10  # three layers decay, correct and read the state of four heads
    one_layer = 2 * 4 * 8
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert ModelCost.of(config) == cost_of_flops(2 * (passed + state), one_layer, 0, 0)


def test_chunks_count_as_windows() -> None:
    config = transformers.Llama4TextConfig(
        **{**SIZES, "num_hidden_layers": 4, "head_dim": 8, "num_local_experts": 4},
        intermediate_size_mlp=56,
        interleave_moe_layer_step=2,
        attention_chunk_size=16,
    )
    with torch.device("meta"):
        model = transformers.Llama4TextModel(config)
    passed = 0
    for name, weight in model.layers.named_parameters():
        if weight.ndim > 1:
            passed += weight.numel() // 4 if ".experts." in name else weight.numel()
    assert config.layer_types == ["chunked_attention"] * 3 + ["full_attention"]
    assert ModelCost.of(config) == cost_of_flops(2 * passed, 64, 3 * 64, 16)


def test_without_layer_types_a_window_is_of_all_layers() -> None:
    sizes = {**SIZES, "head_dim": 8, "sliding_window": 5}
    found = ModelCost.of(SimpleNamespace(**sizes))
    unused = ModelCost.of(SimpleNamespace(**sizes, use_sliding_window=False))
    assert (found.language_quadratic, found.language_windowed_quadratic) == (0, 16)
    assert (found.language_window, unused.language_window) == (5, 0)
    assert unused.language_quadratic == 16


def test_an_mlp_without_a_gate_has_two_matrices() -> None:
    gated = ModelCost.of(SimpleNamespace(**SIZES)).language_linear
    plain = ModelCost.of(SimpleNamespace(**SIZES, hidden_act="relu2")).language_linear
    assert gated - plain == 2 * 3 * 32 * 48 * 16 // (3 * 64)
    with_plan = {"hidden_act": "gelu", "base_model_tp_plan": {"layers.*.mlp.gate_proj": "colwise"}}
    assert ModelCost.of(SimpleNamespace(**SIZES, **with_plan)).language_linear == gated


@pytest.mark.parametrize(
    ("prefix", "changes", "message"),
    [
        ("FalconH1", {}, "FalconH1Config has layers of type 'hybrid', so the cost"),
        ("Gemma4Text", {}, "Gemma4TextConfig has layers of different sizes, so the cost"),
        ("Gemma3nText", {}, "Gemma3nTextConfig has a list of intermediate_size, so the cost"),
        ("Jamba", {}, "JambaConfig has no linear_num_value_heads, so the cost"),
        ("AriaText", {}, "AriaTextConfig has experts under an unknown name, moe_num_experts=8, so"),
    ],
)
def test_what_is_not_known_is_refused(prefix: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        ModelCost.of(getattr(transformers, f"{prefix}Config")(**changes))
