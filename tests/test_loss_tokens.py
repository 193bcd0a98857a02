"""The divisor of the loss: what token_loss takes, and the count over micro-batches and ranks."""

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
from tests.test_packed_training import examples, loss_and_gradients, one_at_a_time
from tests.tiny_models import tiny_model
from torch_collate_kit import (
    Batch,
    PackedCollator,
    PaddedCollator,
    ParallelLayout,
    global_num_loss_tokens,
    token_loss,
)

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


def test_a_tensor_divides_as_exactly_as_a_number() -> None:
    logits = torch.randn(1, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = token_loss(logits, LABELS, num_loss_tokens=7)
    loss = token_loss(logits, LABELS, num_loss_tokens=torch.tensor(7))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-15)


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


def test_a_first_label_that_is_trained_is_counted_as_little_as_it_is_lost() -> None:
    """Nothing predicts it."""
    examples = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    for collate in (PaddedCollator(0), PaddedCollator(0, padding_side="right")):
        batch = collate(examples)
        assert batch.metadata["num_loss_tokens"] == int(global_num_loss_tokens(batch)) == 2
    batch = PackedCollator(0, max_tokens=4)(examples)
    assert batch.metadata["num_loss_tokens"] == int(global_num_loss_tokens(batch)) == 2
    logits = torch.zeros(1, 4, 9)
    assert token_loss(logits, batch, num_loss_tokens=1).item() == pytest.approx(2 * math.log(9))
