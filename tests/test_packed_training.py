"""Packed equals one at a time: loss and gradients, for every layout, attention and rank."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ranks import on_two_ranks
from tests.tiny_models import VOCAB, tiny_model
from torch_collate_kit import (
    Batch,
    PackedCollator,
    PaddedCollator,
    ParallelLayout,
    global_num_loss_tokens,
    token_loss,
)

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


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2", "mistral", "gemma3"])
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
    atol = 2e-6 if name == "gemma3" else 1e-9  # its norm weights get their gradient in float32
    assert torch.allclose(gradients, expected_gradients, rtol=0, atol=atol)
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


LOGITS = torch.zeros(1, 3, 4)
LABELS = torch.tensor([[-100, 2, 3]])

# --- what token_loss divides by ------------------------------------------------------------------


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, -1.0])
def test_a_tensor_that_is_no_count_gives_nan_and_never_0(number: float) -> None:
    """It is not looked at, which would wait for the device."""
    logits = LOGITS.clone().requires_grad_()
    loss = token_loss(logits, LABELS, num_loss_tokens=torch.tensor(number))
    loss.backward()
    assert loss.isnan()
    assert logits.grad is not None
    assert logits.grad.isnan().any()
    assert token_loss(LOGITS, LABELS, num_loss_tokens=torch.tensor(-1)).isnan()


# --- counted in one process ----------------------------------------------------------------------

ROWS = [
    {"input_ids": [1, 2, 3, 4], "loss_mask": [1, 0, 1, 0.5]},
    {"input_ids": [5, 6], "loss_mask": [0, 0]},
    {"input_ids": [7, 8, 9], "loss_mask": [0, 1, 1]},
]
COLLATORS: list[Callable[[Sequence[Any]], Batch]] = [
    PaddedCollator(0),
    PaddedCollator(0, padding_side="right", normalize_loss=False),
    PackedCollator(0, max_tokens=4),
    PackedCollator(0, max_tokens=4, parallel=ParallelLayout(dp=5), normalize_loss=False),
]


@pytest.mark.parametrize("collate", COLLATORS)
def test_a_batch_and_its_micro_batches_have_the_same_count(
    collate: Callable[[Sequence[Any]], Batch],
) -> None:
    batch = collate(ROWS)
    micro_batches = [batch[i : i + 1] for i in range(len(batch))]
    for counted in (batch, batch["labels"], micro_batches, iter(micro_batches)):
        number = global_num_loss_tokens(counted)
        assert number.dtype == torch.int64
        assert number.shape == ()
        assert number.item() == 4 == batch.metadata["num_loss_tokens"]


def test_nothing_is_read_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = PackedCollator(0, max_tokens=4)(ROWS)

    def refuse(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a tensor was read")

    for name in ("cpu", "numpy", "tolist", "item", "__array__", "__bool__", "__int__", "nonzero"):
        monkeypatch.setattr(Tensor, name, refuse)
    number = global_num_loss_tokens([batch, batch["labels"]])
    monkeypatch.undo()
    assert number.item() == 8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"labels": LABELS}, r"got dict; pass the Batch .*, or its labels"),
        ([{"labels": LABELS}], r"got dict; pass the Batch .*, or its labels"),
        (UserDict(labels=LABELS), r"got UserDict; pass the Batch"),
        (17, r"got int; pass the Batch"),
        (["labels"], r"got str; pass the Batch"),
    ],
)
def test_what_cannot_be_counted_is_refused(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=rf"a Batch, labels or a list of these, {message}"):
        global_num_loss_tokens(given)


@pytest.mark.parametrize(
    ("backends", "device"),
    [("cpu:gloo,cuda:nccl", "cpu"), ("cpu:gloo", "cpu"), ("meta:host-less", "meta")],
)
def test_the_sum_is_made_on_a_device_that_the_backend_has(
    backends: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nccl has none for a batch in host memory; meta stands in for cuda."""
    reduced: list[Tensor] = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group: reduced.append(x))
    number = global_num_loss_tokens(LABELS)
    assert reduced == [number]
    assert number.device.type == device


# --- over two ranks ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, Any]:
    """A step on two ranks, with the DataLoader under accelerate.prepare."""
    pytest.importorskip("accelerate")
    from tests.two_ranks_loader import on_rank

    return on_two_ranks(on_rank)[0]


def test_the_loss_of_two_ranks_is_the_token_mean(two_ranks: dict[str, Any]) -> None:
    model = tiny_model("qwen3", "sdpa", dtype=torch.float64).train()
    expected, gradients = loss_and_gradients(model, one_at_a_time(model, examples()))
    assert two_ranks["num_processes"] == 2
    assert two_ranks["loss"] == pytest.approx(expected, abs=1e-9)
    assert np.allclose(two_ranks["gradients"], gradients.numpy(), rtol=0, atol=1e-9)


def test_the_metadata_of_a_prepared_loader_is_of_one_rank(two_ranks: dict[str, Any]) -> None:
    """So it is no divisor: each rank's mean, averaged over the ranks, is another number."""
    assert sum(two_ranks["metadata"]) == two_ranks["number"]
    assert min(two_ranks["metadata"]) > 0
    assert abs(two_ranks["loss_by_metadata"] - two_ranks["loss"]) > 1e-3


def test_a_group_is_counted_alone(two_ranks: dict[str, Any]) -> None:
    assert two_ranks["alone"] == [4, 8]
