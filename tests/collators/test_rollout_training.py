"""Rollouts through real models: log-probabilities and losses are those of each rollout alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tiny_models import VOCAB, tiny_model
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, RolloutCollator
from torch_collate_kit.losses import token_loss
from torch_collate_kit.packing import ParallelLayout

LAYOUTS: dict[str, dict[str, Any]] = {
    "one row": {"max_tokens": 512},
    "several rows": {"max_tokens": 40},
    "tp and cp": {"max_tokens": 48, "parallel": ParallelLayout(tp=2, cp=2)},
    "dp, fixed width": {"max_tokens": 64, "parallel": ParallelLayout(dp=4), "fixed_width": True},
}


def rollouts(count: int = 10) -> list[dict[str, Any]]:
    """Prompts and responses of 1 to 20 tokens, long ones beside short ones."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(count):
        prompt, response = (int(rng.integers(1, 20 if i % 2 == k else 5)) for k in range(2))
        made.append(
            {
                "prompt_ids": rng.integers(1, VOCAB, size=prompt),
                "response_ids": rng.integers(1, VOCAB, size=response),
                "rewards": float(rng.normal()),
                "logprobs": -rng.random(response),
                "advantages": rng.normal(size=response),
                "loss_mask": rng.choice([0.0, 1.0, 0.5], size=response),
            }
        )
    made[0]["loss_mask"][:] = 0  # a rollout of which nothing is trained
    return made


def log_probs_alone(model: Any, rollout: dict[str, Any]) -> Tensor:
    """fp64 [response tokens]: the model sees one rollout, without pads, mask or kit."""
    ids = torch.as_tensor(np.concatenate([rollout["prompt_ids"], rollout["response_ids"]]))
    log_probs = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    first = len(rollout["prompt_ids"])
    return torch.stack([log_probs[t - 1, ids[t]] for t in range(first, len(ids))])


def loss_alone(model: Any, data: list[dict[str, Any]]) -> Tensor:
    """The sum of nll * loss_mask, rollout by rollout."""
    parts = [log_probs_alone(model, r) @ torch.as_tensor(r["loss_mask"]) for r in data]
    return -torch.stack(parts).sum()


def gradients(model: Any, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def model_of(name: str, attention: str) -> Any:
    return tiny_model(name, attention, dtype=torch.float64)


def test_the_right_aligned_slice_holds_the_log_probs_of_each_rollout_alone() -> None:
    data = rollouts()
    model = model_of("llama", "sdpa")
    batch = RolloutCollator(0)(data)
    with torch.no_grad():
        alone = [log_probs_alone(model, rollout) for rollout in data]
        log_probs = model(**batch.model_inputs("sdpa")).logits.log_softmax(-1)
    a = batch.metadata["response_length"]
    ids = batch["input_ids"][:, -a:]
    found = log_probs[:, -a - 1 : -1].gather(-1, ids[..., None])[..., 0]
    assert found.shape == batch["rewards"].shape == batch["response_mask"].shape
    for i, expected in enumerate(alone):
        assert torch.allclose(found[i][batch["response_mask"][i] == 1], expected, atol=1e-9, rtol=0)
        n = len(expected)
        assert np.allclose(batch["rollout_logprobs"][i, -n:], data[i]["logprobs"], atol=1e-6)
        assert np.allclose(batch["advantages"][i, -n:], data[i]["advantages"], atol=1e-6)
    # a policy gradient by hand, on right-aligned tensors alone
    by_batch = (found * batch["advantages"] * batch["loss_mask"]).sum().item()
    by_rollout = sum(
        float((values * torch.as_tensor(r["advantages"] * r["loss_mask"])).sum())
        for values, r in zip(alone, data, strict=True)
    )
    assert by_batch == pytest.approx(by_rollout, abs=1e-5)  # advantages are float32


@pytest.mark.parametrize(
    ("layout", "attention"), [*zip(LAYOUTS, ["sdpa", *["torch_varlen"] * 3], strict=True)]
)
def test_packed_rollouts_come_back_in_their_order(layout: str, attention: str) -> None:
    data = rollouts()
    reference = model_of("qwen3", "sdpa")
    expected = loss_alone(reference, data)
    wanted = gradients(reference, expected)
    model = model_of("qwen3", attention)
    batch = PackedCollator(0, normalize_loss=False, **LAYOUTS[layout])(data)
    assert isinstance(batch, Batch)
    assert not all(np.diff(np.concatenate(batch.row_metadata["example_indices"].tolist())) > 0)
    logits = model(**batch.model_inputs(attention, labels=False)).logits
    loss, outputs = token_loss(logits, batch, num_loss_tokens=1, return_per_token_outputs=True)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-9)
    assert torch.allclose(gradients(model, loss), wanted, rtol=0, atol=1e-9)
    assert_alone(outputs, reference, data)


def assert_alone(outputs: Any, model: Any, data: list[dict[str, Any]]) -> None:
    assert outputs.example_indices.tolist() == list(range(len(data)))
    with torch.no_grad():
        for values, rollout in zip(outputs.log_probs, data, strict=True):
            assert values.dtype == np.float32
            assert np.allclose(values, log_probs_alone(model, rollout), rtol=0, atol=1e-5)
