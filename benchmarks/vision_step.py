"""A training step of a small Qwen3-VL: packed against padded, on the same examples."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from harness import Report, alternate, timed
from image_samples import VOCABULARY, processed, qwen3_layout, qwen3_processor, records
from torch import Tensor

from torch_collate_kit import PackedCollator, PaddedCollator, register_torch_varlen

__all__ = [
    "BY_PART",
    "SMALL_TEXT",
    "SMALL_VISION",
    "compare_steps",
    "input_bytes",
    "qwen3_model",
    "step_of",
]

BY_PART = {"text_config": "torch_varlen", "vision_config": "sdpa"}
SMALL_TEXT: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 5e6},
        **{"mrope_section": [12, 10, 10], "mrope_interleaved": True},
    },
}
SMALL_VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 4,
    "out_hidden_size": 256,
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [1, 2],
}


def qwen3_model(text: Mapping[str, Any], vision: Mapping[str, Any], attention: Any) -> Any:
    """With random weights, the same for every attention; in training mode, float32."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = Qwen3VLConfig(
        text_config={**text, **ids},
        vision_config=dict(vision),
        image_token_id=5,
        video_token_id=6,
        vision_start_token_id=3,
        vision_end_token_id=4,
    )
    torch.manual_seed(0)
    return Qwen3VLForConditionalGeneration._from_config(config, attn_implementation=attention)


def input_bytes(inputs: Mapping[str, Any]) -> int:
    """Bytes of all tensors."""
    return sum(value.nbytes for value in inputs.values() if isinstance(value, Tensor))


def step_of(model: Any, batch: Any, attention: Any) -> Callable[[], Tensor]:
    """Forward and backward; the sum of the loss over tokens divided by their number."""

    def step() -> Tensor:
        model.zero_grad()
        loss: Tensor = model(**batch.model_inputs(attention)).loss
        loss.backward()
        return loss.detach()

    return step


def compare_steps(report: Report, rounds: int) -> None:
    """Real tokens per CPU second, and bytes of what the model is given."""
    processor = qwen3_processor(256)
    examples = processed(records(16, (64, 300), seed=1), processor)
    padded = PaddedCollator(processor, padding_side="right")(examples)
    vision = qwen3_layout(processor)
    packed = PackedCollator(processor, max_tokens=1024, vision=vision)(examples)
    tokens = sum(len(example["input_ids"]) for example in examples)
    register_torch_varlen()
    sdpa = qwen3_model(SMALL_TEXT, SMALL_VISION, "sdpa")
    varlen = qwen3_model(SMALL_TEXT, SMALL_VISION, BY_PART)
    ways = {
        "padded, sdpa": (sdpa, padded, "sdpa"),
        "packed, sdpa": (sdpa, packed, "sdpa"),
        "packed, torch_varlen": (varlen, packed, "torch_varlen"),
    }
    steps = {name: step_of(*way) for name, way in ways.items()}
    losses = torch.stack([step() for step in steps.values()])
    if not torch.allclose(losses, losses[0], rtol=1e-4):
        raise AssertionError(f"losses differ: {losses.tolist()}")
    clocked = {name: timed(step, time.process_time) for name, step in steps.items()}
    times = alternate(clocked, rounds=rounds, warm_up=0)
    report.times("step", times)
    rows = []
    for name, (_, batch, attention) in ways.items():
        size = input_bytes(batch.model_inputs(attention)) / 1e6
        cells = batch.num_cells
        speed = tokens / times[name].median
        gain = times["padded, sdpa"].median / times[name].median
        rows.append([name, f"{cells:,}", f"{size:.1f}", f"{speed:,.0f}", f"{gain:.2f}x"])
    note = f"Forward and backward of a Qwen3-VL of 4 + 4 layers, float32, {len(examples)} examples "
    note += f"of {tokens:,} tokens together, images of up to 256 x 256 pixels; equal losses."
    header = ["", "cells", "MB of inputs", "tokens per CPU second", "times padded"]
    report.table("Training step", header, rows, note)
