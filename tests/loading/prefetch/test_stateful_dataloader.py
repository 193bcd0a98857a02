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
    "rows": lambda: PackedBatchSampler(DATA, COLLATE, batch_rows=2, window=2, seed=3),
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


class Numbers:
    """A dataset that returns the numbers it is asked for."""

    def __getitems__(self, part: Any) -> list[int]:
        return part if isinstance(part, list) else part.indices


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("name", KINDS)
def test_a_sampler_saved_at_the_end_of_an_epoch_goes_on_with_the_next(stateful, name, num_workers):
    sampler = KINDS[name]()
    epochs = [list(map(Numbers().__getitems__, sampler)) for _ in range(3)]
    options: dict[str, Any] = {"num_workers": num_workers, "collate_fn": list}
    if num_workers and name != "PackedBatchSampler":
        options["prefetch_factor"] = 8  # more than an epoch has, so drawn ahead to its end
    if num_workers and name == "mixture":
        options["persistent_workers"] = True
    if name == "rows":
        options["snapshot_every_n_steps"] = 10  # the state is of the beginning, and read from there

    def make(state: Any = None) -> Any:
        loader = stateful(Numbers(), batch_sampler=KINDS[name](), **options)
        if state is not None:
            loader.load_state_dict(state)
        return loader

    loader = make()
    *_, in_loop = (loader.state_dict() for _ in loader)
    resumed = make(loader.state_dict())
    state = resumed.state_dict()  # makes an iterator
    assert [list(resumed), list(resumed)] == epochs[1:]
    for saved in (in_loop, state):  # and a loop that is left goes on with the next epoch
        resumed = make(saved)
        if num_workers and name == "rows" and saved is in_loop:
            assert not list(resumed)
        assert [next(iter(resumed)), next(iter(resumed))] == [epochs[1][0], epochs[2][0]]


@pytest.mark.parametrize("name", KINDS)
def test_an_iterator_loaded_at_the_beginning_counts_at_its_end(name):
    sampler, plain = KINDS[name](), KINDS[name]()
    next(iter(plain))
    assert plain.epoch == iter(plain).epoch == 1  # a loop that is left counts
    steps = iter(sampler)
    steps.load_state_dict(sampler.state_at(1, 0))
    next(steps)
    assert (iter(sampler).epoch, iter(sampler).step) == (1, 0)
    steps.load_state_dict(sampler.state_at(1, 0))
    list(steps)
    assert iter(sampler).epoch == 2
    steps.load_state_dict(sampler.state_at(1, 1))
    next(steps)
    assert iter(sampler).epoch == 2


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
