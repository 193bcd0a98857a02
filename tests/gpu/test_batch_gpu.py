"""Pinning a batch and copying it to a CUDA device, and the memory that it takes there."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from tests.batch_samples import KINDS, contents, storages_of, tensors_of
from tests.devices import no_waiting
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.losses import token_loss

pytestmark = pytest.mark.gpu
COLLATE = PackedCollator(0, max_tokens=64)


def examples(count: int = 12) -> list[dict[str, Any]]:
    lengths = [5 + 7 * i % 40 for i in range(count)]
    return [{"input_ids": [1 + (i + t) % 30 for t in range(n)]} for i, n in enumerate(lengths)]


@pytest.fixture(params=list(KINDS))
def batch(request: pytest.FixtureRequest) -> Batch:
    return KINDS[request.param]()


class _HostToDevice(TorchDispatchMode):
    """Counts copies from the host to the device, and those from pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.pinned = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::_to_copy", "aten::copy_"):
            source = args[0] if func._schema.name == "aten::_to_copy" else args[1]
            if source.device.type == "cpu" and result.device.type == "cuda":
                self.count += 1
                self.pinned += source.is_pinned()
        return result


def check_equal(found: Batch, expected: Batch) -> None:
    assert contents(found.to("cpu")) == contents(expected)


def parts_of(batch: Batch) -> Iterator[Batch]:
    yield batch
    yield batch[1:]


def test_pinned_memory_moves_with_one_copy_that_does_not_wait(batch: Batch) -> None:
    for given in parts_of(batch):
        pinned = given.pin_memory()
        assert len(storages_of(pinned)) == 1
        assert all(tensor.is_pinned() for tensor in tensors_of(pinned) if tensor.numel())
        with no_waiting("cuda"), _HostToDevice() as copies:
            moved = pinned.to("cuda", non_blocking=True)
        assert (copies.count, copies.pinned) == (1, 1)
        assert {tensor.device.type for tensor in tensors_of(moved)} == {"cuda"}
        assert len(storages_of(moved)) == 1
        check_equal(moved, given)
        assert moved.to("cuda") is moved
        assert moved.pin_memory() is moved
    assert not batch.column("input_ids").is_pinned()


def test_a_slice_moves_with_one_copy_and_on_the_device_with_none(batch: Batch) -> None:
    with _HostToDevice() as copies:
        moved = batch[1:].to("cuda")
    assert copies.count == 1
    check_equal(moved, batch[1:])
    pinned = batch.pin_memory()[1:]
    with no_waiting("cuda"), _HostToDevice() as copies:
        moved = pinned.to("cuda", non_blocking=True)
    assert (copies.count, copies.pinned) == (1, 1)
    check_equal(moved, batch[1:])
    whole = batch.to("cuda")
    with no_waiting("cuda"), _HostToDevice() as copies:
        part = whole[1:].to("cuda")
    assert copies.count == 0
    check_equal(part, batch[1:])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataloader_pins_the_whole_batch(num_workers: int) -> None:
    options: dict[str, Any] = {"num_workers": num_workers, "pin_memory": True}
    loader = DataLoader(examples(24), batch_size=12, collate_fn=COLLATE, **options)
    for i, batch in enumerate(loader):
        assert not batch._made
        assert len(storages_of(batch)) == 1
        assert all(tensor.is_pinned() for tensor in tensors_of(batch))
        check_equal(batch, COLLATE(examples(24)[12 * i : 12 * i + 12]))


def test_the_memory_of_a_batch_is_that_of_what_it_stores() -> None:
    batch = COLLATE(examples(4000))
    assert batch.nbytes < 7 * batch.num_tokens
    COLLATE(examples(2)).to("cuda")
    gc.collect()
    before = torch.cuda.memory_allocated()
    moved = batch.to("cuda")
    stored = torch.cuda.memory_allocated() - before
    assert batch.nbytes <= stored <= batch.nbytes + 64 * len(tensors_of(batch)) + 512
    del moved
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_the_memory_of_the_loss_follows_from_the_response_tokens() -> None:
    example = {"input_ids": list(range(1024)), "loss_mask": [0] * 922 + [1] * 102}
    batch = PackedCollator(0, max_tokens=1024)([example] * 4).to("cuda")
    vocabulary = 32_768
    logits = torch.randn(4, 1024, vocabulary, device="cuda", dtype=torch.bfloat16)
    logits.requires_grad_()
    token_loss(logits, batch, num_loss_tokens=408).backward()  # fields and kernels are there
    logits.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = token_loss(logits, batch, num_loss_tokens=408)
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    in_fp32, mebibyte = 4 * 408 * vocabulary, 2**20
    assert in_fp32 <= kept <= in_fp32 + 2 * mebibyte
    assert peak <= logits.nbytes + 4 * in_fp32 + 4 * mebibyte  # the gradient, and a tenth of fp32
