"""PrefetchLoader around torchdata's StatefulDataLoader, and inside Accelerate."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from multiprocessing import active_children
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.loading.prefetch.toy_data import (
    COLLATORS,
    EXAMPLES,
    Watched,
    expected_digests,
    make_loader,
    make_sampler,
)
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.prefetch import PrefetchLoader
from torch_collate_kit.testing import assert_exact_resume, batch_digest


@pytest.fixture
def stateful() -> Any:
    return pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed"
    ).StatefulDataLoader


class Numbers(IterableDataset):
    """A stream that saves its position; its dict is always the same object, to catch sharing."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.state = {"at": 0, "kind": (1, "tuple")}

    def __iter__(self) -> Iterator[int]:
        while self.state["at"] < self.length:
            self.state["at"] += 1
            yield self.state["at"]
        self.state["at"] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["kind"] == (1, "tuple")
        self.state = state


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_shuffled_stateful_loader_resumes_exactly(stateful, num_workers, prefetch):
    def make() -> PrefetchLoader:
        torch.manual_seed(5)  # the loader draws its own seed
        loader = stateful(
            EXAMPLES,
            batch_size=4,
            shuffle=True,
            collate_fn=COLLATORS["packed"],
            num_workers=num_workers,
        )
        return PrefetchLoader(loader, prefetch=prefetch)

    stops = [0, 2, 4, 5] if num_workers else None  # starting worker processes takes a while
    found = assert_exact_resume(make, num_steps=6, stops=stops)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_stream_resumes_exactly(stateful, num_workers):
    found = assert_exact_resume(
        lambda: PrefetchLoader(stateful(Numbers(10), batch_size=3, num_workers=num_workers)),
        num_steps=6,
        stops=[0, 2, 4, 5] if num_workers else None,
    )
    assert len(set(found)) == 4 or num_workers  # two workers are in other states every epoch


def test_a_stateful_loader_with_our_sampler_goes_by_the_sampler(stateful):
    def make() -> PrefetchLoader:
        return PrefetchLoader(
            stateful(EXAMPLES, batch_sampler=make_sampler(), collate_fn=COLLATORS["packed"])
        )

    assert assert_exact_resume(make, num_steps=8) == expected_digests(2)
    with make() as loader:
        assert "sampler" in loader.state_dict()


def test_a_broken_off_stateful_loop_goes_on_behind_what_was_received(stateful):
    with PrefetchLoader(stateful(Numbers(10), batch_size=3)) as loader:
        for batch in loader:
            assert batch.tolist() == [1, 2, 3]
            break
        state = json.loads(json.dumps(loader.state_dict()))
        assert state["position"] == {"epoch": 0, "step": 1}
        assert [batch.tolist() for batch in loader] == [[4, 5, 6], [7, 8, 9], [10]]
        assert loader.epoch == 1
        loader.load_state_dict(state)
        assert loader.epoch == 0
        rest = [batch.tolist() for batch in loader.steps(4)]
        assert rest == [[4, 5, 6], [7, 8, 9], [10], [1, 2, 3]]


def test_a_stateful_state_is_loaded_after_what_is_in_flight_was_drained(stateful):
    collate = Watched()
    collate.gates[2] = threading.Event()
    loader = stateful(EXAMPLES, batch_size=4, collate_fn=collate)
    load = loader.load_state_dict

    def load_unread(state: dict[str, Any]) -> None:
        assert not collate.is_reading
        load(state)

    loader.load_state_dict = load_unread
    with PrefetchLoader(loader) as loader:
        batches = iter(loader)
        first = next(batches)["input_ids"].tolist()
        state = loader.state_dict()
        second = next(batches)["input_ids"].tolist()
        collate.wait_until_begun(3)
        collate.release_later(2)
        loader.load_state_dict(state)
        assert collate.num_built == 3
        found = [batch["input_ids"].tolist() for batch in loader.steps(5)]
    assert found[0] == second
    assert found[3] == first


def test_hooks_of_a_stateful_loader_run_between_epochs(stateful):
    seen: list[int] = []
    with PrefetchLoader(stateful(Numbers(4), batch_size=3)) as loader:
        list(loader.steps(5, on_epoch=seen.append))
        state = loader.state_dict()
    assert seen == [0, 1, 2]
    with PrefetchLoader(stateful(Numbers(4), batch_size=3)) as loader:
        loader.load_state_dict(state)
        assert [b.tolist() for b in loader.steps(2, on_epoch=seen.append)] == [[4], [1, 2, 3]]
    assert seen == [0, 1, 2, 3]


def test_a_stateful_state_between_epochs_is_not_the_one_loaded(stateful):
    def make() -> PrefetchLoader:
        return PrefetchLoader(stateful(Numbers(4), batch_size=3))

    with make() as loader:
        assert next(loader.steps(1)).tolist() == [1, 2, 3]
        in_the_epoch = loader.state_dict()
    with make() as loader:
        loader.load_state_dict(in_the_epoch)
        assert [batch.tolist() for batch in loader] == [[4]]
        between = loader.state_dict()
    assert between["position"] == {"epoch": 1, "step": 0}
    with make() as loader:
        loader.load_state_dict(between)
        assert [batch.tolist() for batch in loader] == [[1, 2, 3], [4]]


def test_what_a_stateful_loader_does_not_do(stateful):
    with PrefetchLoader(stateful(Numbers(4), batch_size=3)) as loader:
        with pytest.raises(TypeError, match="goes from epoch to epoch by itself"):
            loader.set_epoch(3)
        with pytest.raises(TypeError, match="order is the StatefulDataLoader's own"):
            loader.reshuffle()
        with pytest.raises(TypeError, match="is known only at its end"):
            len(loader)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fits": {"length": 9}}, "is of a loader with {'length': 9}, this one has"),
        ({"version": 7}, "version=7"),
        ({"max_tokens": 5}, "max_tokens=5"),
        ({"loader": "AAAA"}, "was changed or damaged after it was saved"),
        ({"loader": "x"}, "was changed or damaged"),
        ({"loader": "\ud800"}, "was changed or damaged"),
        ({"loader": None}, "was changed or damaged"),
        ({"position": {"epoch": 0}}, "position={'epoch': 0}, not an epoch and a step"),
        ({"position": {"epoch": "0", "step": 1}}, "position=.*, not an epoch and a step"),
        ({"position": {"epoch": 0, "step": True}}, "position=.*, not an epoch and a step"),
        ({"position": {"epoch": 0, "step": -1}}, "position=.*, not an epoch and a step"),
        ({"position": {"epoch": 10**40, "step": 1}}, "position=.*, not an epoch and a step"),
        ({"position": {"epoch": 0, "step": 2**32}}, "position=.*, not an epoch and a step"),
        ({"digest": None}, "was changed or damaged after it was saved"),
        ({"digest": np.arange(2)}, "was changed or damaged after it was saved"),
        ({"version": np.arange(2)}, r"version=array\(\[0, 1\]\), this loader has 1"),
        ({"fits": np.arange(2)}, r"the state is of a loader with \[0 1\], this one has"),
        (
            {"fits": {"length": None, "batch_size": np.arange(2), "num_workers": 0}},
            "the state is of a loader with .*, this one has .*resume with the same dataset",
        ),
        (
            {"fits": {"length": None, "batch_size": 3, "num_workers": False}},
            "the state is of a loader with .*, this one has .*resume with the same dataset",
        ),
        (3, "a state must be a mapping, got int; pass what"),
    ],
    ids=str,
)
def test_a_stateful_state_that_does_not_fit_is_refused(stateful, change, message):
    check_refused(
        stateful, lambda state: state | change if type(change) is dict else change, message
    )


def check_refused(stateful: Any, changed: Any, message: str) -> None:
    with PrefetchLoader(stateful(Numbers(10), batch_size=3)) as loader:
        batches = iter(loader)
        next(batches)
        before = loader.state_dict()
        with pytest.raises(StateError, match=message):
            loader.load_state_dict(changed(before))
        assert loader.state_dict() == before
        assert next(batches).tolist() == [4, 5, 6]


@pytest.mark.parametrize("place", range(0, 1000, 40))
def test_a_stateful_state_with_another_letter_somewhere_is_refused(stateful, place):
    def with_another_letter(state: dict[str, Any]) -> dict[str, Any]:
        text = state["loader"]
        place_in_text = place * len(text) // 1000
        letter = "B" if text[place_in_text] == "A" else "A"
        return state | {"loader": text[:place_in_text] + letter + text[place_in_text + 1 :]}

    check_refused(stateful, with_another_letter, "was changed or damaged after it was saved")


@pytest.mark.parametrize("mark", [{}, None, [], {"at": 3}], ids=str)
def test_a_stateful_state_made_by_hand_is_refused(stateful, mark):
    buffer = io.BytesIO()
    torch.save(mark, buffer)
    text = base64.b64encode(buffer.getvalue()).decode()
    check_refused(stateful, lambda state: state | {"loader": text}, "was changed or damaged")


def test_a_stateful_state_without_a_digest_is_refused(stateful):
    def older(state: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in state.items() if key != "digest"}

    check_refused(
        stateful, older, "no digest: it is of another kind of loader, or .* older version"
    )


def test_the_state_of_a_sampler_is_not_one_of_a_stateful_loader(stateful):
    with make_loader(list) as other, PrefetchLoader(stateful(Numbers(3))) as loader:
        with pytest.raises(
            StateError, match="no digest, fits, loader, position: it is of another kind"
        ):
            loader.load_state_dict(other.state_dict())
        with pytest.raises(StateError, match="no sampler; it is of another kind"):
            other.load_state_dict(loader.state_dict())


def test_the_state_after_loading_is_the_loaded_one_and_starts_no_worker(stateful):
    def make() -> PrefetchLoader:
        return PrefetchLoader(stateful(Numbers(4), batch_size=3, num_workers=1))

    with make() as loader, make() as resumed:
        next(iter(loader))
        state = loader.state_dict()
        loader.close()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert not active_children()


def test_a_state_that_could_not_be_loaded_is_refused_when_it_is_saved(stateful):
    class Odd(Numbers):
        def state_dict(self) -> dict[str, Any]:
            return {"at": Numbers(3)}

    with PrefetchLoader(stateful(Odd(3))) as loader, pytest.raises(StateError, match="read"):
        loader.state_dict()


def test_an_empty_stream_is_an_error_in_steps(stateful, monkeypatch):
    monkeypatch.setattr("torch_collate_kit.loading.prefetch.loader._MAX_EMPTY_EPOCHS", 20)
    with PrefetchLoader(stateful(Numbers(0), batch_size=3)) as loader:
        assert list(loader) == []
        batches = loader.steps(1)
        with pytest.raises(StateError, match="had no batch"):
            next(batches)


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
        rest = [batch_digest(batch) for batch in batches]
        assert rest == expected[3:]
        accelerator.load_state(str(tmp_path))
        assert [batch_digest(batch) for batch in loader.steps(5)] == expected[3:]
    accelerator.free_memory()

    accelerator = Accelerator(cpu=True)
    with make_loader() as loader:  # another process
        accelerator.prepare(torch.nn.Linear(1, 1))
        accelerator.register_for_checkpointing(loader)
        accelerator.load_state(str(tmp_path))
        assert [batch_digest(batch) for batch in loader.steps(5)] == expected[3:]


def test_accelerate_may_prepare_a_model_beside_a_plain_loader_of_the_same_sampler():
    """The loader that we wrap is copied: its own sampler is untouched."""
    sampler = make_sampler()
    plain = DataLoader(EXAMPLES, batch_sampler=sampler, collate_fn=COLLATORS["packed"])
    with PrefetchLoader(plain) as loader:
        next(iter(loader))
        assert plain.batch_sampler is sampler
        assert not hasattr(sampler, "batch_size")
