"""PrefetchLoader around a plain DataLoader of a PackedIterableDataset."""

from __future__ import annotations

import json
import os
import signal
import weakref
from itertools import islice
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.building import packed_stream
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading import PackedIterableDataset, PrefetchingSampler, PrefetchLoader
from torch_collate_kit.testing import assert_exact_resume

# shard 0 has twelve examples of a row each, shard 1 two, shard 2 five
LENGTHS = {0: 12, 1: 2, 2: 5}
SETTINGS: dict[str, Any] = {
    "tokenizer": 0,
    "max_tokens": 4,
    "buffer_size": 3,
    "strategy": "sequential",
}


def part(shard: int) -> list[dict[str, Any]]:
    return [{"input_ids": [100 * shard + i] * 4} for i in range(LENGTHS[shard])]


def make_stream(**options: Any) -> PackedIterableDataset:
    uneven = {"num_shards": 3, "presharded": True}
    return packed_stream(part, **SETTINGS | uneven | options)


def make(
    stream: Any = None, num_workers: int = 0, *, prefetch: bool = True, **options: Any
) -> PrefetchLoader:
    plain = DataLoader(stream or make_stream(), batch_size=None, num_workers=num_workers, **options)
    return PrefetchLoader(plain, prefetch=prefetch)


def ids(batches: Any) -> list[int]:
    """The example of each batch."""
    return [int(batch["input_ids"][0, 0]) for batch in batches]


ORDER = [0, 100, 200, 1, 101, 201, 2, 202, 3, 203, 4, 204, 5, 6, 7, 8, 9, 10, 11]


def test_any_stop_goes_on_with_any_number_of_workers() -> None:
    states = []
    with make() as loader:
        states.append(loader.state_dict())
        for _ in loader:
            states.append(json.loads(json.dumps(loader.state_dict())))
    for num_workers, stops in ((0, range(20)), (1, (7,)), (2, (1, 19)), (3, (13,))):
        for stop in stops:
            with make(num_workers=num_workers) as loader:
                loader.load_state_dict(states[stop])
                assert json.loads(json.dumps(loader.state_dict())) == states[stop]
                found = []
                if stop < 17:
                    found = ids(islice(loader, 2))
                    assert loader.state_dict() == states[stop + 2]  # workers or not
                assert found + ids(loader) == ORDER[stop:], (num_workers, stop)
                assert loader.epoch == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_without_a_number_of_shards_keeps_its_number_of_workers(num_workers: int) -> None:
    examples = [{"input_ids": [i] * (1 + i % 4)} for i in range(40)]

    def make_plain(num_workers: int = num_workers) -> PrefetchLoader:
        return make(packed_stream(examples, **SETTINGS, dp_rank=1, dp_size=2), num_workers)

    with make_plain() as loader:
        batches = list(loader)
        assert sum(batch.metadata["num_examples"] for batch in batches) == 20
        state = loader.state_dict()
    stops = [3, len(batches)] if num_workers else None
    assert_exact_resume(make_plain, num_steps=len(batches) + 2, stops=stops)
    message = f"num_workers={num_workers}, the dataset has num_workers="
    with make_plain(2) as other, pytest.raises(StateError, match=message):
        other.load_state_dict(state)


def test_persistent_workers_read_pass_after_pass() -> None:
    with make(num_workers=2, persistent_workers=True) as loader:
        assert ids(loader) == ORDER
        first = {process.pid for process in active_children()}
        assert len(first) == 2
        batches = list(loader)
        assert {process.pid for process in active_children()} == first
        assert ids(batches) == ORDER
        assert {batch.metadata["epoch"] for batch in batches} == {1}
        loader.set_epoch(5)
        assert ids(islice(loader, 1)) == ORDER[:1]
        assert {process.pid for process in active_children()}.isdisjoint(first)


def test_a_batch_that_the_loop_gave_up_is_freed_before_the_next_is_made() -> None:
    made: list[weakref.ref[dict[str, Any]]] = []
    num_alive: list[int] = []

    class Own(dict[str, Any]):
        """A dict that can be pointed to weakly."""

    def collate(batch: Batch) -> dict[str, Any]:
        num_alive.append(sum(ref() is not None for ref in made))
        own = Own(batch)
        made.append(weakref.ref(own))
        return own

    with make(prefetch=False, collate_fn=collate) as loader:
        for batch in loader:
            assert batch["input_ids"].shape == (1, 4)
            del batch
    assert num_alive == [0] * len(ORDER)


def test_the_dataloader_and_its_stream_are_not_moved() -> None:
    stream = make_stream()
    plain = DataLoader(stream, batch_size=None, collate_fn=stream.as_is)
    before = stream.state_dict()
    with PrefetchLoader(plain) as loader:
        assert ids(loader) == ORDER
    assert plain.dataset is stream
    assert stream.state_dict() == before
    assert ids(plain) == ORDER
    assert repr(loader).startswith("PrefetchLoader(DataLoader(<PackedIterableDataset>))")


def test_a_state_that_the_stream_has_loaded_is_where_the_loader_begins() -> None:
    whole = make_stream()
    list(islice(whole, 4))
    for num_workers in (0, 2):
        stream = make_stream()
        stream.load_state_dict(whole.state_dict())
        with make(stream, num_workers) as loader:
            assert ids(loader) == ORDER[4:]
            assert ids(islice(loader, 3)) == ORDER[:3]
    plain = packed_stream(part(0), **SETTINGS)
    list(islice(plain, 4))
    stream = packed_stream(part(0), **SETTINGS)
    stream.load_state_dict(plain.state_dict())
    with make(stream) as loader:
        assert ids(loader) == list(range(4, 12))
    stream.load_state_dict(plain.state_dict())
    with pytest.raises(StateError, match="state is of num_workers=0, the dataset has num_workers="):
        make(stream, 2)


def shuffled(num_examples: int) -> Any:
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": [i] * 4} for i in range(num_examples)]
    source = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=4)
    return source.shuffle(seed=3, buffer_size=5)


def test_the_epoch_of_the_source_must_agree() -> None:
    def stream_of(epoch: int) -> PackedIterableDataset:
        source = shuffled(24)
        source.set_epoch(epoch)
        return packed_stream(source, **SETTINGS, num_shards=2)

    with make(stream_of(4)) as loader:
        assert loader.state_dict()["stream"]["epoch"] == 4
        found = ids(islice(loader, 5))
        state = loader.state_dict()
        found += ids(loader)
    assert sorted(found) == list(range(24))
    assert found != sorted(found)
    with make(stream_of(0)) as loader, pytest.raises(StateError, match="epoch=4, the dataset has"):
        loader.load_state_dict(state)
    with make(stream_of(4), 2) as loader:
        loader.load_state_dict(state)
        assert ids(loader) == found[5:]


# --- refusals ---


def test_an_epoch_is_an_int() -> None:
    with make() as loader:
        assert ids(islice(loader, 2)) == ORDER[:2]
        with pytest.raises(ValueError, match="epoch must be at most 4294967295, got 4294967296"):
            loader.set_epoch(2**32)
        with pytest.raises(TypeError, match="epoch must be an int, got True of type bool"):
            loader.set_epoch(True)
        assert ids(islice(loader, 2)) == ORDER[2:4]
        loader.set_epoch(np.int64(3))
        assert json.loads(json.dumps(loader.state_dict()))["epoch"] == 3


def test_a_dataloader_that_does_not_fit_is_refused() -> None:
    message = "has batch_size=2, but a PackedIterableDataset yields whole batches; build it with ba"
    with pytest.raises(ValueError, match=message):
        PrefetchLoader(DataLoader(make_stream(), batch_size=2))


def test_states_of_other_loaders_are_refused() -> None:
    sampler = PrefetchingSampler(3, batch_size=2)
    with PrefetchLoader(DataLoader([[1], [2], [3]], batch_sampler=sampler)) as sampled:
        other = sampled.state_dict()
    with make() as loader:
        list(islice(loader, 3))
        state = loader.state_dict()
        with pytest.raises(StateError, match="no stream; it is of another kind of loader: wrap a"):
            loader.load_state_dict(other)
        assert loader.state_dict() == state
        assert ids(loader) == ORDER[3:]
        with pytest.raises(TypeError, match=r"reshuffle\(\): the order of a stream is its source"):
            loader.reshuffle()


class KilledAtItsEnd:
    """Its worker process dies by a signal when it is told to end, as spawned ones may."""

    def __init__(self) -> None:
        self.is_registered = False

    def __call__(self, batch: Any) -> Any:
        if not self.is_registered:
            Finalize(None, os.kill, (os.getpid(), signal.SIGKILL), exitpriority=100)
            self.is_registered = True
        return batch


@pytest.mark.parametrize(("kind", "prefetch"), [("stream", True), ("sampler", False)])
def test_a_worker_that_dies_at_the_end_of_an_epoch_is_no_error(kind: str, prefetch: bool) -> None:
    """Nor in the training step, where torch's handler of signals may run."""
    for _ in range(2):
        options: dict[str, Any] = {"num_workers": 2, "collate_fn": KilledAtItsEnd()}
        if kind == "stream":
            plain = DataLoader(make_stream(), batch_size=None, **options)
        else:
            sampler = PrefetchingSampler(6, batch_size=2)
            plain = DataLoader(range(6), batch_sampler=sampler, **options)
        with PrefetchLoader(plain, prefetch=prefetch) as loader:
            for _ in range(2):
                num_batches = sum(1 for _ in loader)
                assert num_batches == (len(ORDER) if kind == "stream" else 3)
                assert active_children() == []
            assert next(iter(loader)) is not None  # and at the end of a loop that is left


def test_another_error_while_workers_are_ended_is_raised(monkeypatch) -> None:
    joins = iter([RuntimeError("the ending failed")])
    join = BaseProcess.join

    def fails(worker: Any, timeout: float | None = None) -> None:
        join(worker, timeout)
        for error in joins:
            raise error

    loader = make(num_workers=1)
    batches = iter(loader)
    assert ids(islice(batches, 2)) == ORDER[:2]
    monkeypatch.setattr(BaseProcess, "join", fails)
    del batches
    with pytest.raises(RuntimeError, match="the ending failed"):
        loader.close()
    loader.close()


def test_on_epoch_moves_the_source_before_its_pass() -> None:
    source = shuffled(12)

    def of_epoch(epoch: int) -> list[int]:
        source.set_epoch(epoch)
        return ids(packed_stream(source, **SETTINGS, num_shards=2))

    expected = [*of_epoch(0), *of_epoch(1), *of_epoch(2)]
    assert expected[:12] != expected[12:24]
    for num_workers in (0, 2):
        with make(packed_stream(source, **SETTINGS, num_shards=2), num_workers) as loader:
            assert ids(loader.steps(36, on_epoch=source.set_epoch)) == expected
