"""Training Qwen3-VL-2B on a GPU: packed against padded micro-batches of the same examples.

    python benchmarks/gpu/bench_vision_gpu.py
    python benchmarks/gpu/bench_vision_gpu.py --attention flash_attention_2
    python benchmarks/gpu/bench_vision_gpu.py --tiny            # a small model, on the CPU, too

Random weights in bfloat16, forward and backward, no optimizer; images are drawn. A micro-batch is
one packed row of at most ``--max-tokens``, or padded rows with at most as many cells. The tokens
are real ones, without pads. Padded rows use sdpa.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from image_samples import VOCABULARY, processed, qwen3_layout, qwen3_processor, records
from vision_step import SMALL_TEXT, SMALL_VISION, input_bytes, qwen3_model

from torch_collate_kit import Batch, PackedCollator, PaddedCollator, register_torch_varlen

TEXT_2B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 5e6},
        **{"mrope_section": [24, 20, 20], "mrope_interleaved": True},
    },
}
VISION_2B: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}


def padded_batches(examples: list[dict[str, Any]], processor: Any, **options: Any) -> list[Batch]:
    """In order, as many examples each as ``max_cells`` allow."""
    most = options.pop("max_cells")
    collate = PaddedCollator(processor, padding_side="right", **options)
    batches: list[Batch] = []
    group: list[dict[str, Any]] = []
    for example in examples:
        longest = max(len(e["input_ids"]) for e in [*group, example])
        if group and longest * (len(group) + 1) > most:
            batches.append(collate(group))
            group = []
        group.append(example)
    return [*batches, collate(group)]


def pass_over(model: Any, batches: list[Batch], attention: str, device: str) -> float:
    """Forward and backward of every micro-batch; the loss per token of all."""
    model.zero_grad()
    total = torch.zeros((), device=device)
    divisor = sum(batch.metadata["num_loss_tokens"] for batch in batches)
    for batch in batches:
        inputs = batch.to(device, non_blocking=True).model_inputs(attention)
        loss = model(**inputs).loss * (batch.metadata["num_loss_tokens"] / divisor)
        loss.backward()
        total += loss.detach()
    return float(total)  # waits for the device


def measured(run: Callable[[], float], rounds: int, device: str) -> tuple[float, float, float]:
    """Median seconds after a warm-up, peak bytes, and the loss."""
    loss = run()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return statistics.median(seconds), peak, loss


def compare(options: argparse.Namespace, device: str) -> None:
    """Print the table, one line per layout."""
    text, vision, side = TEXT_2B, VISION_2B, 1024
    if options.tiny:
        text, vision, side = {**SMALL_TEXT, "vocab_size": VOCABULARY}, SMALL_VISION, 128
    processor = qwen3_processor(side)
    examples = processed(records(options.examples, (side // 4, side)), processor)
    layout, most = qwen3_layout(processor, "bfloat16"), options.max_tokens
    rows = PackedCollator(processor, max_tokens=most, vision=layout)(examples)
    packed = [rows[i : i + 1] for i in range(len(rows))]
    padded = padded_batches(examples, processor, vision=layout, max_cells=most)
    tokens = sum(len(example["input_ids"]) for example in examples)
    print(f"{len(examples)} examples, {tokens:,} tokens, on {device}, torch {torch.__version__}")
    print("| | micro-batches | MB of inputs | tokens per second | peak GB | loss |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, batches, attention in (
        ("padded", padded, "sdpa"),
        ("packed", packed, options.attention),
    ):
        by_part = {"text_config": attention, "vision_config": "sdpa"}
        model = qwen3_model(text, vision, by_part).to(device, torch.bfloat16).train()
        size = max(input_bytes(batch.model_inputs(attention)) for batch in batches) / 1e6
        run = partial(pass_over, model, batches, attention, device)
        seconds, peak, loss = measured(run, options.rounds, device)
        speed = f"{tokens / seconds:,.0f}"
        row = (name, str(len(batches)), f"{size:.1f}", speed, f"{peak / 1e9:.2f}", f"{loss:.4f}")
        print("| " + " | ".join(row) + " |", flush=True)
        del model, run
        if device == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attention", default="torch_varlen", help="of packed rows")
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a small model and small images")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        parser.error("there is no GPU; --tiny runs a small model on the CPU")
    register_torch_varlen()
    compare(options, device)


if __name__ == "__main__":
    main()
