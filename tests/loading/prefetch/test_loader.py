"""The same stream whatever runs ahead; exact resume; faults that surface; nothing left behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.loading.hang_guard import our_threads
from tests.loading.prefetch.toy_data import (
    COLLATORS,
    EXAMPLES,
    OwnSampler,
    Watched,
    digests,
    digests_of,
    expected_digests,
    make_loader,
    make_sampler,
)
from tests.loading.seals import resealed
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading import PrefetchingSampler, PrefetchLoader
from torch_collate_kit.testing import assert_exact_resume

# ---- one stream ----


def expected_with_reshuffle(collate: Any, tail: str) -> list[str]:
    """Three epochs; after the second batch of the second one, the rest in a new order."""
    sampler = make_sampler(tail=tail)
    first, second = list(sampler), list(sampler)[:2]
    sampler.set_epoch(1, step=2)
    sampler.reshuffle()
    return digests_of([first, [*second, *sampler], list(sampler)], collate)


class Reshuffled:
    """A loader whose consumer reshuffles on receiving the second batch of epoch 1."""

    def __init__(self, loader: PrefetchLoader) -> None:
        self.loader = loader
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict
        self.close = loader.close

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            state = self.loader.state_dict()["sampler"]
            if (state["epoch"], state["step"]) == (1, 2):
                self.loader.reshuffle()
            yield batch


TWO_WORKERS = {"num_workers": 2, "persistent_workers": True}


@pytest.mark.parametrize(
    ("name", "tail", "setting"),
    [
        ("padded", "keep", {"prefetch": False}),
        ("padded", "wrap", {}),
        ("packed", "keep", {}),
        ("packed", "drop", {}),
        ("packed", "wrap", {"prefetch": False, "num_workers": 1}),
        ("packed", "keep", {"num_workers": 2}),
        ("packed", "wrap", TWO_WORKERS),
    ],
)
def test_one_stream_whatever_runs_ahead_and_wherever_it_is_resumed(name, tail, setting):
    expected = expected_with_reshuffle(COLLATORS[name], tail)
    assert len(set(expected)) == len(expected) >= 9
    stops = [3, 6] if "num_workers" in setting else None  # workers take a while to start
    found = assert_exact_resume(
        lambda: Reshuffled(make_loader(COLLATORS[name], tail=tail, **setting)),
        num_steps=9,
        stops=stops,
    )
    assert found == expected[:9]


def test_epochs_without_a_batch_are_passed_over():
    sampler = PrefetchingSampler(3, batch_size=7, shuffle=False, tail="wrap")
    with PrefetchLoader(DataLoader(range(3), batch_sampler=sampler)) as loader:
        assert len(loader) == 0
        assert list(loader) == []
        seen: list[int] = []
        found = [batch.tolist() for batch in loader.steps(2, on_epoch=seen.append)]
    assert found == [[0, 1, 2, 0, 1, 2, 0], [1, 2, 0, 1, 2, 0, 1]]
    assert seen == [1, 2, 3, 4]


def test_an_iterator_of_the_callers_sampler_that_nothing_was_drawn_from_does_not_count():
    sampler = PrefetchingSampler(5, batch_size=2, shuffle=False, tail="wrap")  # 2 and 3 steps
    with PrefetchLoader(DataLoader(range(5), batch_sampler=sampler)) as loader:
        iter(sampler)
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
        assert [batch.tolist() for batch in loader] == [[4, 0], [1, 2], [3, 4]]


def test_the_sampler_moved_under_a_loop_is_an_error():
    sampler = make_sampler()
    loader = DataLoader(EXAMPLES, batch_sampler=sampler, collate_fn=COLLATORS["packed"])
    with PrefetchLoader(loader) as loader:
        batches = iter(loader)
        next(batches)
        sampler.set_epoch(5)
        with pytest.raises(StateError, match="moved to epoch 5 while the loader read epoch 0"):
            next(batches)


def test_the_loop_after_steps_that_end_with_an_epoch_is_the_next_epoch():
    sampler = PrefetchingSampler(6, batch_size=2, shuffle=False)
    with PrefetchLoader(DataLoader(range(6), batch_sampler=sampler)) as loader:
        assert len(list(loader.steps(3))) == 3
        assert (loader.epoch, len(loader)) == (0, 3)
        for epoch in (1, 2):
            steps = [batch.tolist() for batch in loader]
            assert steps == [[0, 1], [2, 3], [4, 5]]
            assert loader.state_dict()["sampler"]["epoch"] == epoch + 1


def test_a_loop_reads_what_the_sampler_yields_whatever_its_length_says():
    class Odd(PrefetchingSampler):
        def __len__(self) -> int:
            return 2

    with PrefetchLoader(DataLoader(range(6), batch_sampler=Odd(6, batch_size=2))) as loader:
        assert [len(list(loader)) for _ in range(2)] == [3, 3]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sampler_of_ones_own(num_workers):
    def make() -> PrefetchLoader:
        loader = DataLoader(range(100), batch_sampler=OwnSampler(), num_workers=num_workers)
        return PrefetchLoader(loader)

    with make() as loader:
        assert [batch.item() for batch in loader.steps(7)] == [0, 1, 2, 10, 11, 12, 20]
        with pytest.raises(TypeError, match="OwnSampler cannot reshuffle"):
            loader.reshuffle()
    assert_exact_resume(make, num_steps=7, stops=[2] if num_workers else None)


# ---- the slot ----


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_step_is_built_while_the_one_before_trains_but_for_the_first_of_an_epoch(prefetch):
    collate = Watched()
    with make_loader(collate, prefetch=prefetch, warn_after=None) as loader:
        for number, _ in enumerate(loader.steps(8), start=1):
            expected = number + 1 if prefetch and number % 4 else number
            collate.wait_until_begun(expected)
            assert collate.num_begun == expected
            assert prefetch or our_threads() == []


def test_on_epoch_runs_at_every_epoch_while_nothing_reads_and_its_changes_are_seen():
    data = [dict(example) for example in EXAMPLES]
    collate = Watched()
    calls: list[tuple[int, int]] = []

    def change(epoch: int) -> None:
        assert not collate.is_reading
        calls.append((epoch, collate.num_begun))
        for example in data:
            example["input_ids"] = [(7 * token + epoch) % 50 for token in example["input_ids"]]

    streams = []
    for prefetch in (False, True):
        data[:] = [dict(example) for example in EXAMPLES]
        collate = Watched()
        loader = DataLoader(data, batch_sampler=make_sampler(), collate_fn=collate)
        with PrefetchLoader(loader, prefetch=prefetch) as loader:
            streams.append(digests(loader.steps(10, on_epoch=change)))
    assert calls == [(0, 0), (1, 4), (2, 8)] * 2
    assert streams[0] == streams[1]


def test_the_order_of_an_epoch_is_asked_for_after_its_hook():
    """A user's order may depend on what the hook does: it must not exist before."""
    known = [0]

    def order(epoch: int, rng: Any) -> list[int]:
        assert epoch <= known[-1]
        return [epoch % 2, 1 - epoch % 2]

    sampler = PrefetchingSampler(2, batch_size=1, order=order)
    with PrefetchLoader(DataLoader(range(2), batch_sampler=sampler)) as loader:
        found = [batch.item() for batch in loader.steps(6, on_epoch=known.append)]
    assert found == [0, 1, 1, 0, 0, 1]

    known[:] = [0]
    sampler = PrefetchingSampler(2, batch_size=1, order=order)
    with PrefetchLoader(DataLoader(range(2), batch_sampler=sampler)) as loader:
        assert len(list(loader)) == 2
        assert loader.state_dict()["sampler"]["epoch"] == loader.epoch == 1


def test_reshuffle_drains_what_is_in_flight():
    collate = Watched()
    collate.gates[2] = threading.Event()
    with make_loader(collate) as loader:
        batches = loader.steps(13)
        found = digests([next(batches), next(batches)])
        collate.wait_until_begun(3)  # of the old order
        collate.release_later(2)
        loader.reshuffle()
        assert not collate.is_reading
        assert collate.num_built == 3
        found += digests(batches)
    sampler = make_sampler()
    sampler.set_epoch(0, step=2)
    sampler.reshuffle()
    epochs = [[*list(make_sampler())[:2], *sampler], [*sampler], [*sampler], list(sampler)[:1]]
    assert found == digests_of(epochs)
    assert found[2:4] != expected_digests(1)[2:4]


MOVES: dict[str, Any] = {
    "set_epoch": lambda loader: loader.set_epoch(2),
    "load_state_dict": lambda loader: loader.load_state_dict(loader.state_dict()),
    "close": lambda loader: loader.close(),
    "a newer loop": lambda loader: next(iter(loader.steps(1))),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_loop_is_over_when_the_loader_is_moved(move):
    collate = Watched()
    collate.gates[1] = threading.Event()
    with make_loader(collate) as loader:
        batches = iter(loader)
        next(batches)
        collate.wait_until_begun(2)
        collate.release_later(1)
        MOVES[move](loader)
        assert not collate.is_reading or move == "a newer loop"
        with pytest.raises(StateError, match="closed" if move == "close" else "loop .* is over"):
            next(batches)
        if move == "set_epoch":
            assert digests(loader) == expected_digests(3)[8:]


# ---- resume ----


def sized(length: int, batch_size: int, **options: Any) -> PrefetchLoader:
    sampler = PrefetchingSampler(length, batch_size=batch_size, **options)
    return PrefetchLoader(DataLoader(range(length), batch_sampler=sampler))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (sized(12, 4).state_dict(), "12 examples"),
        (sized(13, 2).state_dict(), "batch_size=2"),
        (sized(13, 4, dp_rank=0, dp_size=2, tail="drop").state_dict(), "tail='drop'"),
        (resealed({"version": 2}), "no sampler"),
    ],
    ids=str,
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_changed(state, message):
    with sized(13, 4, seed=0) as loader:
        stream = [batch.tolist() for batch in loader.steps(7)]
        loader.set_epoch(0)
        batches = loader.steps(7)
        found = [next(batches).tolist()]
        before = loader.state_dict()
        with pytest.raises(StateError, match=message):
            loader.load_state_dict(state)
        assert loader.state_dict() == before
        found += [batch.tolist() for batch in batches]  # the loop that was live still is
        assert found == stream


@pytest.mark.parametrize(("saved", "mine"), [(8, 16), (None, 8)])
def test_other_max_tokens_are_the_same_examples_in_other_rows_and_that_is_said(caplog, saved, mine):
    def collator(max_tokens: int | None) -> Any:
        return PaddedCollator(0) if max_tokens is None else PackedCollator(0, max_tokens=max_tokens)

    with make_loader(collator(saved)) as loader:
        next(loader.steps(1))
        state = json.loads(json.dumps(loader.state_dict()))
    assert state["max_tokens"] == saved
    with make_loader(collator(mine)) as loader:
        loader.load_state_dict(state)
        assert digests(loader.steps(7)) == expected_digests(2, collator(mine))[1:]
        assert loader.state_dict()["max_tokens"] == mine
    assert [record.getMessage() for record in caplog.records] == [
        f"the state is of a run with max_tokens={saved}, this collator has {mine}: the same "
        "examples per step, in other rows"
    ]
