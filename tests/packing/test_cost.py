"""ModelCost.of against the models themselves: parameters of their layers, counted one by one."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

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
