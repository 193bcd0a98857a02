"""Samplers and streams inside torchdata's StatefulDataLoader; PrefetchLoader inside Accelerate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.building import mixed_sampler
from tests.loading.prefetch.toy_data import (
    COLLATORS,
    EXAMPLES,
    digests,
    expected_digests,
    make_loader,
    make_sampler,
)
from torch_collate_kit.loading import (
    PackedBatchSampler,
    PackedIterableDataset,
    PrefetchLoader,
    TokenizedDataset,
)
from torch_collate_kit.testing import assert_exact_resume

DATA = TokenizedDataset(EXAMPLES)
COLLATE = COLLATORS["packed"]
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@pytest.fixture
def stateful() -> Any:
    reason = "torchdata is not installed"
    return pytest.importorskip("torchdata.stateful_dataloader", reason=reason).StatefulDataLoader


KINDS: dict[str, Callable[[], Any]] = {
    "PrefetchingSampler": make_sampler,
    "PackedBatchSampler": lambda: PackedBatchSampler(DATA, COLLATE, batch_size=4, seed=3),
    "mixture": lambda: mixed_sampler([6, 7], batch_size=4, seed=3),
}


def of_sampler(kind: Any, name: str, num_workers: int) -> Any:
    sampler = KINDS[name]()
    return kind(DATA, batch_sampler=sampler, collate_fn=COLLATE, num_workers=num_workers)


def of_stream(kind: Any, num_workers: int, **options: Any) -> Any:
    stream = PackedIterableDataset(EXAMPLES, COLLATE, buffer_size=2, **options)
    return kind(stream, batch_size=None, collate_fn=stream.as_is, num_workers=num_workers)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", KINDS)
def test_a_sampler_resumes_exactly_inside_it(stateful, name, num_workers):
    with PrefetchLoader(of_sampler(DataLoader, name, 0), prefetch=False) as loader:
        expected = [batch["input_ids"].tolist() for batch in loader.steps(6)]
    whole = of_sampler(stateful, name, num_workers)
    assert [b["input_ids"].tolist() for _ in range(2) for b in whole][:6] == expected
    stops = [3] if num_workers else range(1, 6)
    assert_exact_resume(lambda: of_sampler(stateful, name, num_workers), num_steps=6, stops=stops)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"num_shards": 2}])
def test_a_stream_resumes_exactly_inside_it(stateful, options, num_workers):
    whole = list(of_stream(stateful, num_workers, **options))
    tokens = sorted(t for b in whole for t in b["input_ids"].flatten().tolist() if t)
    assert tokens == sorted(t for e in EXAMPLES for t in e["input_ids"] if t)
    stops = [3] if num_workers else range(1, len(whole))
    assert_exact_resume(
        lambda: of_stream(stateful, num_workers, **options), num_steps=len(whole), stops=stops
    )


def test_prefetch_loader_refuses_it(stateful):
    for loader in (of_sampler(stateful, "PrefetchingSampler", 0), of_stream(stateful, 0)):
        with pytest.raises(TypeError) as caught:
            PrefetchLoader(loader)
        assert str(caught.value) == (
            "a StatefulDataLoader keeps a position of its own, and PrefetchLoader another; pass a "
            "torch.utils.data.DataLoader with the same arguments, or use the StatefulDataLoader "
            "alone: samplers and streams of torch_collate_kit resume inside it"
        )


def test_accelerate_takes_it_as_it_is_and_saves_it(tmp_path):
    from accelerate import Accelerator

    expected = expected_digests(2)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    with make_loader() as loader:
        prepared_model, prepared = accelerator.prepare(model, loader)
        assert prepared is loader
        assert prepared_model is not None
        accelerator.register_for_checkpointing(loader)
        batches = loader.steps(8)
        for _ in range(3):
            next(batches)
        accelerator.save_state(str(tmp_path))  # the fourth is in flight
        assert digests(batches) == expected[3:]
        accelerator.load_state(str(tmp_path))
        assert digests(loader.steps(5)) == expected[3:]
    accelerator.free_memory()

    accelerator = Accelerator(cpu=True)
    with make_loader() as loader:  # another process
        accelerator.prepare(torch.nn.Linear(1, 1))
        accelerator.register_for_checkpointing(loader)
        accelerator.load_state(str(tmp_path))
        assert digests(loader.steps(5)) == expected[3:]
