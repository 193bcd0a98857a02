"""Vision and audio models around a tiny hybrid, whose towers are on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.hybrid_models import hybrid_model

FAMILY_OF_WRAPPER = {
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "minicpm_ocr": "qwen3_5",
    "minicpmv4_6": "qwen3_5",
    "minicpmv4_7": "qwen3_5",
    "nemotron_h_omni": "nemotron_h",
    "nemo_speechlm": "nemotron_h",
    "lfm2_vl": "lfm2",
}
"""The text model's family of each ``model_type``; jev has a test of its own."""


def wrapped_model(model_type: str, attention: str) -> Any:
    """Build the outer model of ``model_type`` with a tiny text model; its towers cannot run."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto import configuration_auto, modeling_auto

    text = hybrid_model(FAMILY_OF_WRAPPER[model_type], attention, scale=5.0)
    if model_type not in configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    config = configuration_auto.CONFIG_MAPPING[model_type](text_config=text.config.to_dict())
    config._attn_implementation = attention
    name = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[model_type]
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    owner = getattr(model, "model", model)
    is_inner = isinstance(text.model, type(owner.language_model))
    owner.language_model = text.model if is_inner else text
    if hasattr(model, "lm_head"):
        model.lm_head = text.lm_head
    return model.eval()
