"""A training step captured in a CUDA graph, beside the plain one: their losses, and their times.

Rows are planned with a limit of segments, so all batches have one shape (docs/guide/one_shape.md).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import transformers

from gpu.where import Where
from torch_collate_kit import (
    Batch,
    PackedBatchSampler,
    PackedCollator,
    PackingOptions,
    TokenizedDataset,
    register_torch_varlen,
    token_loss,
)

__all__ = ["captured_step"]


def captured_step(where: Where, *, steps: int = 20) -> dict[str, Any]:
    """Losses and gradients of both, and seconds per step; a graph needs CUDA."""
    if where.device.type != "cuda":
        return {"rows": [], "skipped": "a CUDA graph needs a GPU"}
    register_torch_varlen()
    config = transformers.Qwen3Config(
        vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64,
        attn_implementation="torch_varlen",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).to(where.device, torch.bfloat16)
    batches = [batch.to(where.device) for batch in _batches(steps)]
    divisor = torch.ones((), device=where.device)
    inputs = {**batches[0].model_inputs(model, labels=False)}
    inputs["cu_seq_lens_k"] = inputs["cu_seq_lens_q"]
    labels = batches[0]["labels"].clone()

    def step() -> torch.Tensor:
        loss = token_loss(model(**inputs).logits, labels, num_loss_tokens=divisor)
        loss.backward()
        return loss.detach()

    def set_inputs(batch: Batch) -> None:
        for name, value in batch.model_inputs(model, labels=False).items():
            if isinstance(value, torch.Tensor):
                inputs[name].copy_(value)
        labels.copy_(batch["labels"])
        divisor.fill_(batch.metadata["num_loss_tokens"])
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    set_inputs(batches[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    rows = [_run("plain", step, set_inputs, batches, model, where)]
    graph = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss.clone()

    rows.append(_run("captured", replay, set_inputs, batches, model, where))
    far = [abs(a - b) for a, b in zip(rows[0]["losses"], rows[1]["losses"], strict=True)]
    ratio = rows[0]["seconds"] / rows[1]["seconds"]
    return {"rows": rows, "largest_difference": max(far), "plain_over_captured": ratio}


def _batches(steps: int) -> list[Batch]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(50, 800, 12 * steps)
    examples = [{"input_ids": rng.integers(5, 4000, int(n)).tolist()} for n in lengths]
    dataset = TokenizedDataset(examples, train_all=True)
    packing = PackingOptions(4096, max_sequences_per_row=14)
    collate = PackedCollator(0, packing=packing, fixed_width=True, train_all=True)
    sampler = PackedBatchSampler(dataset, collate, batch_rows=1, dp_rank=0)
    return [collate(dataset.__getitems__(part)) for part in sampler][:steps]


def _run(
    name: str, step: Any, set_inputs: Any, batches: list[Batch], model: Any, where: Where
) -> dict[str, Any]:
    losses = []
    where.wait()
    began = time.perf_counter()
    for batch in batches:
        set_inputs(batch)
        losses.append(step())
    where.wait()
    seconds = (time.perf_counter() - began) / len(batches)
    norm = float(torch.stack([p.grad.float().norm() for p in model.parameters()]).norm())
    found = [float(loss) for loss in losses]
    return {"name": name, "seconds": seconds, "gradient_norm": norm, "losses": found}
