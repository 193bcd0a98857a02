"""ModelCost.of against the models themselves: parameters of their layers, counted one by one."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from torch_collate_kit.packing import ModelCost

transformers = pytest.importorskip("transformers")

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
WIDE_HEADS = {**TEXT, "head_dim": 24}  # not hidden_size / num_attention_heads
QWEN_ROPE = {"rope_type": "default", "mrope_section": [4, 4, 4], "rope_theta": 10000.0}
QWEN = {"depth": 4, "num_heads": 4, "patch_size": 14, "spatial_merge_size": 2}
GLM = {**QWEN, "hidden_size": 80, "intermediate_size": 112, "out_hidden_size": 64, "image_size": 56}
SIGLIP = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
EXPERTS = {"moe_intermediate_size": 40, "num_experts_per_tok": 2}


def text(**changes: Any) -> dict[str, Any]:
    return {**WIDE_HEADS, **changes}


def rope(**changes: Any) -> dict[str, Any]:
    return {**TEXT, "rope_parameters": QWEN_ROPE, **changes}


CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", rope(), {**QWEN, "embed_dim": 80, "mlp_ratio": 3, "hidden_size": 64}),
    "qwen2_5_vl": ("Qwen2_5_VL", rope(), {**QWEN, "hidden_size": 80, "intermediate_size": 112,
     "out_hidden_size": 64, "window_size": 112, "fullatt_block_indexes": [1]}),
    "qwen3_vl": ("Qwen3VL", rope(head_dim=24), {**GLM, "num_position_embeddings": 16,
     "deepstack_visual_indexes": [1]}),
    "qwen3_vl_moe": ("Qwen3VLMoe", rope(head_dim=24, **EXPERTS, num_experts=4,
     decoder_sparse_step=2, mlp_only_layers=[]), {**GLM, "num_position_embeddings": 16,
     "deepstack_visual_indexes": [1]}),
    "glm4v": ("Glm4v", rope(), GLM),
    "glm4v_moe": ("Glm4vMoe", rope(**EXPERTS, n_routed_experts=4, n_shared_experts=2,
     first_k_dense_replace=1), GLM),
    "internvl": ("InternVL", text(model_type="qwen2"), {**SIGLIP, "image_size": [56, 28],
     "patch_size": [14, 14]}),
    "llava": ("Llava", text(model_type="llama"), {**SIGLIP, "model_type": "clip_vision_model"}),
    "llava_next": ("LlavaNext", text(model_type="llama"), {**SIGLIP,
     "model_type": "clip_vision_model"}),
    "llava_onevision": ("LlavaOnevision", text(model_type="qwen2"), {**SIGLIP,
     "model_type": "siglip_vision_model"}),
    "idefics3": ("Idefics3", text(model_type="llama"), SIGLIP),
    "smolvlm": ("SmolVLM", text(model_type="llama"), SIGLIP),
    "gemma3": ("Gemma3", text(), {**SIGLIP, "model_type": "siglip_vision_model"}),
}  # fmt: skip


def model_of(name: str) -> Any:
    prefix, text_config, vision_config = CONFIGS[name]
    config = getattr(transformers, f"{prefix}Config")(
        text_config=text_config, vision_config=vision_config
    )
    with torch.device("meta"):
        return getattr(transformers, f"{prefix}ForConditionalGeneration")(config)


def layers_of(part: nn.Module) -> nn.ModuleList:
    """The longest list of layers in it."""
    lists = [module for module in part.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)


def parameters_passed(layer: nn.Module, config: Any) -> int:
    """Weights of matrices of the layer that one token is multiplied with."""
    total = 0
    num_experts = getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", 0)
    for name, weight in layer.named_parameters():
        if weight.ndim == 3:  # all experts in one
            assert weight.shape[0] == num_experts, name
            total += weight.numel() // num_experts * config.num_experts_per_tok
        elif weight.ndim == 2 and ".experts." in name:
            total += weight.numel() * config.num_experts_per_tok // num_experts
        elif weight.ndim == 2:
            total += weight.numel()
    return total


@pytest.mark.parametrize("name", CONFIGS)
def test_of_a_model_counts_what_its_layers_do(name: str) -> None:
    model = model_of(name)
    language, vision = model.config.text_config, model.config.vision_config
    parts = dict(model.model.named_children())
    tower = next(parts[key] for key in ("visual", "vision_tower", "vision_model") if key in parts)
    decoder = layers_of(
        next(parts[key] for key in ("language_model", "text_model") if key in parts)
    )
    assert len(decoder) == 3
    head_dim = getattr(language, "head_dim", None) or language.hidden_size // 4
    linear = 2 * sum(parameters_passed(layer, language) for layer in decoder)
    each = 2 * 4 * head_dim  # of 4 FLOPs per pair of tokens, half are causal
    types = getattr(language, "layer_types", None) or []
    windowed = each * types.count("sliding_attention")
    quadratic = each * len(decoder) - windowed
    blocks = layers_of(tower)
    width = getattr(vision, "embed_dim", None) or vision.hidden_size
    per_patch = 2 * sum(parameters_passed(block, vision) for block in blocks)
    per_pair = 4 * width
    if name == "qwen2_5_vl":  # window_size 112 is 8 x 8 patches, one of the four layers is full
        images = (per_patch + per_pair * 3 * 64, per_pair)
    elif name.startswith(("qwen", "glm")):
        images = (per_patch, per_pair * len(blocks))
    else:
        in_tile = 8 if name == "internvl" else 16
        images = (in_tile * (per_patch + per_pair * len(blocks) * in_tile), 0)
    flops = (linear, quadratic, *images, windowed)
    unit = Fraction(16, min(n for n in (quadratic, images[1], windowed) if n))
    window = language.sliding_window if windowed else 0
    numbers = [*(round(number * unit) for number in flops), window]
    assert ModelCost.of(model.config) == ModelCost(*numbers)
    assert (windowed > 0) == (name == "gemma3")


def test_of_real_sizes_leaves_room_for_a_million_long_examples() -> None:
    names = ("Qwen2_5_VL", "Qwen3VLMoe", "Glm4v", "Gemma3", "InternVL")
    for name in (*names, "Gemma2", "Mistral", "GptOss", "DeepseekV3", "Qwen3Next"):
        cost = ModelCost.of(getattr(transformers, f"{name}Config")())
        numbers = dataclasses.astuple(cost)
        assert numbers[0] > 0
        assert numbers[1] + numbers[4] > 0
        assert (numbers[2] > 0) == (name in names)
        most = max(
            int(cost.language(np.array([100_000]))[0]), int(cost.vision(np.array([4096]))[0])
        )
        assert 0 < most * 1_000_000 < 2**63


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"vision_linear": -1}, ValueError, "vision_linear must be at least 0, got -1"),
        ({"language_linear": 1.5}, TypeError, "language_linear must be an int, got 1.5 of type fl"),
        ({"language_window": 8}, ValueError, "language_window and language_windowed_quadratic go"),
        ({"language_windowed_quadratic": 3}, ValueError, "language_window and language_windowed_q"),
    ],
)
def test_refuses_wrong_numbers(changes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        ModelCost(**changes)


def test_a_config_without_a_size_is_refused() -> None:
    message = (
        "GPT2Config has no intermediate_size, so the cost of the model is not known; give the "
        "numbers: ModelCost"
    )
    with pytest.raises(ValueError, match=f"^{message}"):
        ModelCost.of(transformers.GPT2Config())


# --- text models against runs of them: their products, and their attended pairs


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
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
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
    "qwen2_moe, every second layer": ("Qwen2Moe", {**MOE, "num_experts": 4,
     "decoder_sparse_step": 2, "shared_expert_intermediate_size": 28}, 0),
    "qwen3_moe, but for one layer": ("Qwen3Moe", {**MOE, "num_experts": 4, "head_dim": 8,
     "mlp_only_layers": [1]}, 0),
    "glm4_moe": ("Glm4Moe", {**MOE, "n_routed_experts": 4, "n_shared_experts": 2,
     "first_k_dense_replace": 1} | {"head_dim": 8, "n_group": 1, "topk_group": 1}, 0),
    "ernie4_5_moe": ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 20,
     "moe_layer_interval": 1} | {"moe_num_shared_experts": 2, "moe_layer_start_index": 1,
     "moe_layer_end_index": 2}, 0),
    "deepseek_v3": ("DeepseekV3", {**MOE, **LATENT, "q_lora_rank": 16, "n_shared_experts": 1,
     "first_k_dense_replace": 2}, 0),
    "deepseek_v3, queries in full": ("DeepseekV3", {**MOE, **LATENT, "q_lora_rank": None,
     "first_k_dense_replace": 1}, 0),
}  # fmt: skip


def text_model_of(name: str) -> Any:
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
    model = text_model_of(name)
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
    model = text_model_of(name)
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
        **{**SIZES, **MOE, "num_hidden_layers": 4, "num_experts": 4, "head_dim": 8},
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
