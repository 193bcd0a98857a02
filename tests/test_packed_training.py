"""Packed equals one at a time: loss and gradients, for every layout, attention and rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_models import VOCAB, tiny_model
from torch_collate_kit import Batch, PackedCollator, ParallelLayout, token_loss

LAYOUTS = {
    "one row": {"max_tokens": 256},
    "several rows": {"max_tokens": 40},
    "tp and cp": {"max_tokens": 48, "parallel": ParallelLayout(tp=2, cp=2)},
    "dp": {"max_tokens": 64, "parallel": ParallelLayout(dp=4)},
    "fp8, fixed width": {
        "max_tokens": 64,
        "parallel": ParallelLayout(fp8="tensorwise"),
        "fixed_width": True,
    },
}


def examples(count: int = 12, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        n = int(rng.integers(2, 30))
        weights = rng.choice([0.0, 1.0, 0.5], size=n).astype(np.float32)
        made.append({"input_ids": rng.integers(1, VOCAB, size=n), "loss_mask": weights})
    return made


def one_at_a_time(model: torch.nn.Module, data: list[dict[str, Any]]) -> torch.Tensor:
    """The loss as a plain loop, without the kit: no padding, no packing, no mask.

    With sdpa: the eager attention of transformers takes its softmax in fp32, 1e-8 off in fp64.
    """
    total, count = torch.zeros((), dtype=torch.float64), 0
    for example in data:
        ids = torch.as_tensor(example["input_ids"])[None]
        log_probs = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        for t in range(1, ids.shape[1]):
            weight = float(example["loss_mask"][t])
            total = total - weight * log_probs[t - 1, ids[0, t]]
            count += weight != 0
    return total / count


def batch_loss(model: torch.nn.Module, batch: Batch, attention: str) -> torch.Tensor:
    inputs = batch.model_inputs(attention, labels=False)
    logits = model(**inputs).logits
    return token_loss(logits, batch, num_loss_tokens=batch.metadata["num_loss_tokens"])


def loss_and_gradients(model: torch.nn.Module, loss: torch.Tensor) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return loss.item(), gradients


@pytest.mark.parametrize("name", ["qwen3", "llama"])
@pytest.mark.parametrize("attention", ["torch_varlen", "sdpa"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_loss_and_gradients_equal_one_example_at_a_time(name, attention, layout):
    data = examples()
    reference = tiny_model(name, "sdpa", dtype=torch.float64).train()
    expected, expected_gradients = loss_and_gradients(reference, one_at_a_time(reference, data))
    model = tiny_model(name, attention, dtype=torch.float64).train()
    batch = PackedCollator(0, normalize_loss=False, **LAYOUTS[layout])(data)
    loss, gradients = loss_and_gradients(model, batch_loss(model, batch, attention))
    assert abs(expected) > 0.1
    assert loss == pytest.approx(expected, abs=1e-9)
    assert torch.allclose(gradients, expected_gradients, rtol=0, atol=1e-9)
    assert expected_gradients.abs().max() > 1e-3


def test_micro_batches_with_one_denominator_sum_to_the_whole():
    data = examples()
    model = tiny_model("qwen3", "torch_varlen", dtype=torch.float64).train()
    batch = PackedCollator(0, max_tokens=40, normalize_loss=False)(data)
    assert len(batch) >= 3
    whole, gradients = loss_and_gradients(model, batch_loss(model, batch, "torch_varlen"))
    parts = [batch_loss(model, batch[i : i + 1], "torch_varlen") for i in range(len(batch))]
    summed, summed_gradients = loss_and_gradients(model, torch.stack(parts).sum())
    assert summed == pytest.approx(whole, abs=1e-12)
    assert torch.allclose(gradients, summed_gradients, rtol=0, atol=1e-12)
