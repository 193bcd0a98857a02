"""States that were edited, cut or mixed up: one StateError each, and nothing has changed."""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from torch_collate_kit import (
    Mixture,
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    ParallelLayout,
    PrefetchingSampler,
    PrefetchLoader,
    StateError,
    TokenizedDataset,
)
from torch_collate_kit.loading import merge_states

LENGTHS = [3, 9, 4, 7, 2, 8, 5, 6, 1, 9, 3, 4]
EXAMPLES = [{"input_ids": [7] * n} for n in LENGTHS]
DATA = TokenizedDataset(EXAMPLES)
COLLATE = PackedCollator(0, max_tokens=12)


def by_examples() -> Any:
    sampler = PrefetchingSampler(12, batch_size=2, seed=3)
    sampler.set_epoch(0, step=1)
    sampler.reshuffle()
    sampler.set_epoch(1, step=2)
    return sampler


def by_rows() -> Any:
    sampler = PackedBatchSampler(DATA, COLLATE, batch_rows=2, seed=3)
    sampler.set_epoch(1, step=1)
    return sampler


def mixed() -> Any:
    sampler = PrefetchingSampler(Mixture([8, 4], weights=[3, 1]), batch_size=2, seed=3)
    sampler.set_epoch(1, step=2)
    return sampler


def stream(**options: Any) -> Any:
    dataset = PackedIterableDataset(
        EXAMPLES, COLLATE, buffer_size=4, shuffle=True, seed=1, num_shards=2, **options
    )
    list(islice(dataset, 3))
    return dataset


def skipping() -> Any:
    examples = [*EXAMPLES[:3], {"input_ids": []}, *EXAMPLES[3:]]
    dataset = PackedIterableDataset(examples, COLLATE, buffer_size=4, on_error="skip")
    list(islice(dataset, 3))
    return dataset


def loader() -> Any:
    made = PrefetchLoader(DataLoader(DATA, batch_sampler=by_rows(), collate_fn=COLLATE))
    next(made.steps(1))
    return made


def stream_loader() -> Any:
    made = PrefetchLoader(DataLoader(stream(), batch_size=None))
    next(iter(made))
    return made


KINDS = [by_examples, by_rows, mixed, stream, skipping, loader, stream_loader]


@pytest.fixture(params=KINDS, ids=lambda make: make.__name__)
def make(request: pytest.FixtureRequest) -> Callable[[], Any]:
    found: Callable[[], Any] = request.param
    return found


def edits(value: Any) -> Iterator[Any]:
    """Other values in place of one: each leaf changed, each entry removed."""
    if isinstance(value, dict):
        for key in value:
            if key == "sources":
                continue
            yield {k: v for k, v in value.items() if k != key}
            yield from ({**value, key: other} for other in edits(value[key]))
        yield {**value, "another": 0}
    elif isinstance(value, list):
        yield from (value[:i] + value[i + 1 :] for i in range(len(value)))
        yield from (
            [*value[:i], o, *value[i + 1 :]] for i in range(len(value)) for o in edits(value[i])
        )
        yield [*value, 0]
    elif isinstance(value, bool) or not isinstance(value, int):
        yield from (not value, f"{value}x", 3, {1}, {1: 2, "a": 3})
    else:
        yield from (value + 1, -1, float(value), str(value), None, value == 1)


def test_every_edit_is_noticed_and_nothing_has_changed(make: Callable[[], Any]) -> None:
    one = make()
    state = one.state_dict()
    others = list(edits(state))
    assert len(others) > 50
    for other in others:
        with pytest.raises(StateError, match=r"is damaged, was edited|has version"):
            one.load_state_dict(other)
    assert one.state_dict() == state
    for other in (None, [], 3, "state"):
        with pytest.raises(StateError, match=r"the state must be a mapping, got .*; pass what sta"):
            one.load_state_dict(other)
    with pytest.raises(StateError, match="the state has version None, this release reads version"):
        one.load_state_dict({})
    one.load_state_dict(state)


def test_parts_of_two_states_do_not_fit_together() -> None:
    with loader() as one:
        first = one.state_dict()
        next(one.steps(1))
        second = one.state_dict()
        assert first["sampler"] != second["sampler"]
        with pytest.raises(StateError, match="mixes parts of several: its checksum does not fit"):
            one.load_state_dict(first | {"sampler": second["sampler"]})


def test_what_is_loaded_and_returned_is_a_copy() -> None:
    one, two = stream(), stream()
    state = one.state_dict()
    kept = copy.deepcopy(state)
    two.load_state_dict(state)
    state["shards"].clear()
    assert two.state_dict() == kept
    two.state_dict()["shards"].clear()
    assert two.state_dict() == kept


SAVED = {
    "json": (lambda state: json.loads(json.dumps(state))),
    "pickle": (lambda state: pickle.loads(pickle.dumps(state))),
}


@pytest.mark.parametrize("way", SAVED)
def test_states_survive_what_saves_them(make: Callable[[], Any], way: str) -> None:
    state = make().state_dict()
    again = make()
    again.load_state_dict(SAVED[way](state))
    assert again.state_dict() == state


class Odd:
    """A value of a source's own state that is no JSON."""

    def __init__(self, place: int) -> None:
        self.place = place


class OddSource:
    """A stream with a state of objects, sets, NumPy ints and int keys."""

    def __init__(self) -> None:
        self._place = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self._place < 60:
            self._place += 1
            yield EXAMPLES[self._place % 12]

    def state_dict(self) -> dict[Any, Any]:
        at = self._place
        return {"at": Odd(at), "seen": {*range(at)}, "np": np.int64(at), 1: 2, (3, 4): 5}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        assert state["at"].place == state["np"] == len(state["seen"])
        assert state[1] == 2
        self._place = state["at"].place


def odd_stream() -> PackedIterableDataset:
    return PackedIterableDataset(OddSource(), COLLATE, buffer_size=2)


def ids(batches: Any) -> list[Any]:
    return [batch["input_ids"].tolist() for batch in batches]


def test_the_state_of_a_source_may_hold_anything(tmp_path: Path) -> None:
    whole = odd_stream()
    batches = iter(whole)
    list(islice(batches, 20))
    state, rest = whole.state_dict(), ids(batches)
    assert len(rest) > 1
    assert isinstance(state["sources"]["0"]["at"], Odd)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    for kept in (pickle.loads(pickle.dumps(state)), torch.load(buffer, weights_only=False)):
        again = odd_stream()
        again.load_state_dict(kept)
        assert ids(again) == rest
    (tmp_path / "state").write_bytes(pickle.dumps(state))
    program = (
        "import pickle, sys; from tests.loading.test_sealed_states import ids, odd_stream; "
        "one = odd_stream(); one.load_state_dict(pickle.load(open(sys.argv[1], 'rb'))); "
        "print(ids(one))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "state")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(rest)


def test_a_loader_does_not_seal_what_is_not_the_kits() -> None:
    """The state of a source inside a stream, and that of a sampler of one's own."""
    with PrefetchLoader(DataLoader(odd_stream(), batch_size=None)) as one:
        batches = iter(one)
        list(islice(batches, 20))
        state, rest = pickle.loads(pickle.dumps(one.state_dict())), ids(batches)
    with PrefetchLoader(DataLoader(odd_stream(), batch_size=None)) as two:
        two.load_state_dict(state)
        assert ids(two) == rest

    class OwnSampler(PrefetchingSampler):
        def state_at(self, epoch: int, step: int) -> dict[str, Any]:
            return {**super().state_at(epoch, step), "own": {1, 2}}

        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict({k: v for k, v in state.items() if k != "own"})

    data = [*range(12)]
    with PrefetchLoader(DataLoader(data, batch_sampler=OwnSampler(12, batch_size=4))) as three:
        assert len(list(three.steps(1))) == 1
        own = three.state_dict()
        assert own["sampler"]["own"] == {1, 2}
        three.load_state_dict(own)


class JsonSource(OddSource):
    """A stream whose state has int keys, which JSON makes strings."""

    def state_dict(self) -> dict[Any, Any]:
        return {0: self._place}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        ((key, self._place),) = state.items()
        assert key in (0, "0")


def test_int_keys_of_a_source_do_not_break_the_seal_in_json() -> None:
    one, two = (PackedIterableDataset(JsonSource(), COLLATE, buffer_size=2) for _ in range(2))
    batches = iter(one)
    list(islice(batches, 20))
    state = json.loads(json.dumps(one.state_dict()))
    assert list(state["sources"]["0"]) == ["0"]
    two.load_state_dict(state)
    assert ids(two) == ids(batches) != []


def test_merged_states_are_sealed_anew() -> None:
    def of(rank: int) -> PackedIterableDataset:
        collate = PackedCollator(0, max_tokens=12, parallel=ParallelLayout(dp=2))
        return PackedIterableDataset(EXAMPLES, collate, buffer_size=4, num_shards=2, dp_rank=rank)

    states = []
    for rank in (0, 1):
        one = of(rank)
        list(islice(one, 2))
        states.append(one.state_dict())
    damaged = {**states[1], "ended": [0]}
    with pytest.raises(StateError, match="state 1 is damaged, was edited, or mixes parts"):
        merge_states([states[0], damaged])
    merged = merge_states(states)
    of(0).load_state_dict(merged)
    with pytest.raises(StateError, match="the state is damaged"):
        of(0).load_state_dict({**merged, "ended": [0]})
