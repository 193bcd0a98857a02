"""Fields, model inputs and losses are made on a device without waiting for it.

The meta device has no values, so whatever needs one fails there; shapes and dtypes are those of the
host. On a CUDA device the values are, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.batch_samples import KINDS, tensors_of
from tests.devices import NoWaiting, no_waiting
from torch_collate_kit.batch import Batch
from torch_collate_kit.losses import global_num_loss_tokens, token_loss
from torch_collate_kit.ragged import Ragged

ATTENTIONS = ("torch_varlen", "flash_attention_2", "sdpa", "eager")
# Of rollouts the collator does not know the model, so nothing can be said of its positions.
# Shared prefixes have attentions of their own, in tests/test_trees.py.
FOR_A_MODEL = [name for name in KINDS if name not in ("rollouts", "trees")]
DEVICE = pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])


def _changed(batch: Batch) -> Batch:
    batch["input_ids"].add_(3)
    batch["loss_mask"].mul_(2)
    return batch


OPERATIONS: dict[str, Callable[[Batch], Batch]] = {
    "whole": lambda b: b,
    "slice": lambda b: b[1:],
    "step": lambda b: b[::2],
    "no row": lambda b: b[:0],
    "chunk": lambda b: b.chunk(len(b))[-1],
    "select": lambda b: b.select([len(b) - 1, 0, 0]),
    "pad_rows": lambda b: b.pad_rows(multiple_of=len(b) + 2),
    "cat": lambda b: Batch.cat([b[1:], b[:1]]),
    "with_fields": lambda b: b.with_fields(attention_mask=b["attention_mask"] * 2),
    "divided": lambda b: Batch.of_storage(b.stored().with_divisor(7)),
    "changed": lambda b: _changed(b)[1:],
}


def check_equal(found: Any, expected: Any, device: str, name: str) -> None:
    """Check shape and dtype, on the device; where it has values, these to the last bit."""
    if isinstance(expected, Ragged):
        assert found.lengths.tolist() == expected.lengths.tolist(), name
        found, expected = found.values, expected.values
    if not isinstance(expected, torch.Tensor):
        assert found == expected, name
        return
    assert found.device.type == device, name
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
    if device == "cuda":
        assert torch.equal(found.cpu(), expected), name


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


@pytest.mark.gpu
def test_torch_sees_what_waits() -> None:
    value = torch.ones(1, device="cuda")
    with no_waiting("cuda"), pytest.raises(RuntimeError, match="synchroniz"):
        value.item()


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kind", KINDS)
@DEVICE
def test_no_field_waits_for_the_device(device: str, kind: str, name: str) -> None:
    batch = KINDS[kind]()
    moved = batch.to(device)
    with no_waiting(device):
        found = OPERATIONS[name](moved)
        fields = dict(found)
    expected = OPERATIONS[name](batch)
    assert list(fields) == list(expected)
    for key, field in fields.items():
        check_equal(field, expected[key], device, key)
    assert {tensor.device.type for tensor in tensors_of(found)} == {device}


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("kind", FOR_A_MODEL)
@DEVICE
def test_model_inputs_and_the_loss_do_not_wait(device: str, kind: str, attention: str) -> None:
    batch = KINDS[kind]()
    moved = batch.to(device)
    logits = torch.randn(*batch["input_ids"].shape, 512, generator=torch.Generator().manual_seed(0))
    on_device = logits.to(device).requires_grad_()
    with no_waiting(device):
        inputs = moved.model_inputs(attention, labels=False)
        loss = token_loss(on_device, moved, num_loss_tokens=7)
        loss.backward()
    expected = batch.model_inputs(attention, labels=False)
    assert list(inputs) == list(expected)
    for name, value in inputs.items():
        check_equal(value, expected[name], device, name)
    if device == "cuda":
        torch.testing.assert_close(loss.cpu(), token_loss(logits, batch, num_loss_tokens=7))


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_block_mask_is_made_on_the_device_without_waiting(attention: str) -> None:
    batch = KINDS["packed"]()
    options: dict[str, Any] = {"mask": "block", "sliding_window": 4}
    moved = batch.to("cuda")
    with no_waiting("cuda"):
        masks = moved.model_inputs(attention, **options)["attention_mask"]
    for name, mask in batch.model_inputs(attention, **options)["attention_mask"].items():
        check_equal(masks[name], mask, "cuda", name)


@pytest.mark.gpu
def test_loss_tokens_are_counted_without_waiting() -> None:
    batch = KINDS["packed"]()
    micro_batches = [batch[i : i + 1].to("cuda") for i in range(len(batch))]
    with no_waiting("cuda"):
        number = global_num_loss_tokens(micro_batches)
    assert number.item() == batch.metadata["num_loss_tokens"]
