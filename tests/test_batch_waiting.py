"""Fields are made on a device without waiting for it: as tests/gpu, on the meta device.

It has no values, so whatever needs one fails; shapes and dtypes are those of the host.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.batch_samples import tensors_of
from tests.gpu.test_batch_gpu import ATTENTIONS, BATCHES, FOR_A_MODEL, OPERATIONS
from tests.no_waiting import NoWaiting
from torch_collate_kit.losses import token_loss
from torch_collate_kit.ragged import Ragged


def waits() -> dict[str, Callable[[], object]]:
    value = torch.ones(2, device="meta")
    return {
        "item": lambda: torch.ones(1).item(),
        "nonzero": lambda: torch.ones(1).nonzero(),
        "mask": lambda: torch.ones(1)[torch.ones(1) > 0],
        "to the device": lambda: torch.ones(2).to("meta"),
        "copied there": lambda: value.copy_(torch.ones(2)),
    }


@pytest.mark.parametrize("name", waits())
def test_the_mode_sees_what_waits(name: str) -> None:
    with pytest.raises(AssertionError), NoWaiting():
        waits()[name]()


def test_the_mode_lets_pass_what_does_not() -> None:
    with NoWaiting() as mode:
        moved = torch.ones(2).to("meta", non_blocking=True)
        moved.copy_(torch.ones(2), non_blocking=True)
        moved[torch.ones(1, dtype=torch.int64).to("meta", non_blocking=True)].add_(1)
    assert mode.seen > 3


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kind", BATCHES)
def test_no_field_waits_for_the_device(kind: str, name: str) -> None:
    batch = BATCHES[kind]()
    moved = batch.to("meta")
    with NoWaiting() as mode:
        found = OPERATIONS[name](moved)
        fields = dict(found)
    assert mode.seen > 0
    expected = OPERATIONS[name](batch)
    assert list(fields) == list(expected)
    for key, field in fields.items():
        value, wanted = (f.values if isinstance(f, Ragged) else f for f in (field, expected[key]))
        assert value.is_meta, key
        assert (value.shape, value.dtype) == (wanted.shape, wanted.dtype), key
    assert all(tensor.is_meta for tensor in tensors_of(found))


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("kind", FOR_A_MODEL)
def test_model_inputs_and_the_loss_do_not_wait(kind: str, attention: str) -> None:
    moved = BATCHES[kind]().to("meta")
    logits = torch.zeros(*moved["input_ids"].shape, 16, device="meta", requires_grad=True)
    with NoWaiting() as mode:
        inputs = moved.model_inputs(attention, labels=False)
        loss = token_loss(logits, moved, num_loss_tokens=7)
        loss.backward()
    assert mode.seen > 10
    assert {v.device.type for v in inputs.values() if isinstance(v, torch.Tensor)} == {"meta"}
