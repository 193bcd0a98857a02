"""PrefetchLoader on a CUDA device: pinned, copied on a stream of its own, waited for by streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.loading.hang_guard import fails_when_it_hangs, our_threads
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.loading import PrefetchingSampler, PrefetchLoader
from torch_collate_kit.loading.device_copy import DeviceCopy
from torch_collate_kit.testing import batch_digest

pytestmark = pytest.mark.gpu

EXAMPLES = [{"input_ids": [1 + (i + t) % 90 for t in range(5 + 7 * i % 40)]} for i in range(37)]
COLLATORS = {
    "padded": PaddedCollator(0),
    "packed": PackedCollator(0, max_tokens=64),
    "model inputs": PackedCollator(0, max_tokens=64, train_all=True).for_trainer(),
}


@pytest.fixture(autouse=True)
def guard() -> Iterator[None]:
    with fails_when_it_hangs():
        yield
    assert our_threads() == []


def make_loader(name: str = "packed", device: Any = "cuda", **options: Any) -> PrefetchLoader:
    prefetch = options.pop("prefetch", True)
    loader = DataLoader(
        EXAMPLES,  # type: ignore[arg-type]
        batch_sampler=PrefetchingSampler(len(EXAMPLES), batch_size=8, seed=1),
        collate_fn=COLLATORS[name],
        **options,
    )
    return PrefetchLoader(loader, device=device, prefetch=prefetch)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("padded", {"prefetch": False}),
        ("packed", {"num_workers": 2}),
        ("model inputs", {"pin_memory": True}),
    ],
)
def test_the_batches_of_the_host(name, options):
    with make_loader(name, None) as loader:
        expected = [batch_digest(batch) for batch in loader.steps(12)]
    with make_loader(name, **options) as loader:
        for batch, wanted in zip(loader.steps(12), expected, strict=True):
            assert batch["input_ids"].is_cuda
            assert batch_digest(batch) == wanted


def test_the_copy_is_from_pinned_memory_on_a_stream_of_its_own(monkeypatch):
    seen = []
    batch = COLLATORS["packed"](EXAMPLES[:8])
    copy = DeviceCopy(torch.device("cuda"))
    to = type(batch).to

    def watched(self, device, *, non_blocking=False):
        stream = torch.cuda.current_stream()
        seen.append((self.column("input_ids").is_pinned(), non_blocking, stream))
        return to(self, device, non_blocking=non_blocking)

    monkeypatch.setattr(type(batch), "to", watched)
    copy.receive(copy.send(batch))
    ((is_pinned, non_blocking, stream),) = seen
    assert is_pinned
    assert non_blocking
    assert stream != torch.cuda.current_stream()


def test_receiving_makes_the_stream_wait_and_not_the_host():
    batch = COLLATORS["packed"](EXAMPLES[:8])
    copy = DeviceCopy(torch.device("cuda"))
    assert copy._stream is not None
    copy.receive(copy.send(batch))["input_ids"].sum()  # pinned memory and kernels are there now
    torch.cuda.synchronize()
    with torch.cuda.stream(copy._stream):
        torch.cuda._sleep(1_000_000_000)  # half a second in front of the copy
    sent = copy.send(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        received = copy.receive(sent)
        total = received["input_ids"].sum()  # made and queued after the copy
        assert sent.copied is not None
        assert not sent.copied.query(), "the copy was done before anybody had to wait"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert total.item() == batch["input_ids"].sum().item()


def test_memory_that_the_consumer_still_reads_is_not_written_again():
    """Without record_stream the next copy gets the block of a batch that kernels still read."""
    batch = {"x": torch.full((1 << 20,), 1, dtype=torch.int64)}
    other = {"x": torch.full((1 << 20,), 2, dtype=torch.int64)}
    copy = DeviceCopy(torch.device("cuda"))
    received = copy.receive(copy.send(batch))
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # the consumer's kernels are still queued
    total = received["x"].sum()
    del received
    following = copy.receive(copy.send(other))
    assert total.item() == 1 << 20
    assert following["x"].sum().item() == 2 << 20


def test_what_is_on_the_device_already_stays():
    moved = torch.ones(3, device="cuda")
    copy = DeviceCopy(torch.device("cuda"))
    received = copy.receive(copy.send({"x": moved, "n": 3}))
    assert received["x"].data_ptr() == moved.data_ptr()
    assert received["n"] == 3
