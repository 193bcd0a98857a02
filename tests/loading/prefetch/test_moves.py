"""A loader that is moved: one position, also while its sampler is half moved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.loading.prefetch.test_fork import in_a_fork
from tests.loading.prefetch.toy_data import digests_of, make_loader, make_sampler
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading import PrefetchingSampler, PrefetchLoader
from torch_collate_kit.testing import batch_digest


class TwoLines:
    """A resumable sampler of 4 steps that is moved in two lines, with ``between`` in between."""

    def __init__(self) -> None:
        self.epoch = self.first = 0
        self.between: Callable[[], object] = lambda: None

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first = self.epoch, self.first
        self.epoch, self.first = epoch + 1, 0
        return iter([[10 * epoch + step] for step in range(first, 4)])

    def set_epoch(self, epoch: int, *, step: int = 0) -> None:
        self.epoch = epoch
        self.between()
        self.first = step

    def state_dict(self) -> dict[str, Any]:
        return self.state_at(self.epoch, self.first)

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        return {"epoch": epoch, "step": step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.set_epoch(state["epoch"], step=state["step"])


def loader_of(sampler: TwoLines) -> PrefetchLoader:
    return PrefetchLoader(DataLoader(range(40), batch_sampler=sampler, collate_fn=list))


def test_a_state_taken_while_the_sampler_is_half_moved_is_the_one_before() -> None:
    sampler, states = TwoLines(), []
    with loader_of(sampler) as loader:
        assert next(iter(loader)) == [0]
        sampler.between = lambda: states.append(loader.state_dict()["sampler"])
        loader.set_epoch(2)
        assert loader.state_dict()["sampler"] == {"epoch": 2, "step": 0}
        loader.load_state_dict({**loader.state_dict(), "sampler": {"epoch": 1, "step": 3}})
        assert [list(loader), list(loader)] == [[[13]], [[20], [21], [22], [23]]]
    assert states == [{"epoch": 0, "step": 1}, {"epoch": 2, "step": 0}]


def test_an_interrupt_while_the_sampler_is_half_moved_back_loses_nothing() -> None:
    sampler = TwoLines()

    def interrupt() -> None:
        sampler.between = lambda: None
        raise KeyboardInterrupt

    with loader_of(sampler) as loader:
        for batch in loader:
            assert batch == [0]
            sampler.between = interrupt
            break
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
        assert loader.state_dict()["sampler"] == {"epoch": 0, "step": 1}
        assert list(loader) == [[1], [2], [3]]


def test_a_fork_between_epochs_does_not_use_the_workers_of_its_parent() -> None:
    with make_loader(num_workers=1, persistent_workers=True) as loader:
        num_steps = len(list(loader))

        def use() -> None:
            with pytest.raises(StateError, match="a fork without its thread and workers"):
                loader.set_epoch(0)
            with pytest.raises(StateError, match="a fork without its thread and workers"):
                next(iter(loader))

        assert in_a_fork(use) == ""
        assert len(list(loader)) == num_steps


def test_a_reshuffle_after_the_last_batch_is_one_of_the_next_epoch() -> None:
    plain, expected = make_sampler(), [list(make_sampler())]
    plain.set_epoch(1)
    plain.reshuffle()
    expected.append(list(plain))
    with make_loader() as loader:
        found = []
        for step, batch in enumerate(loader):
            found.append(batch_digest(batch))
            if step == len(expected[0]) - 1:
                loader.reshuffle()
        found += [batch_digest(batch) for batch in loader]
    assert found == digests_of(expected)
    assert found != digests_of([expected[0], list(make_sampler())])


def test_an_abandoned_thread_copies_nothing_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, began, copied = threading.Event(), threading.Event(), []

    def collate(examples: list[int]) -> list[int]:
        if 2 in examples:
            began.set()
            gate.wait()
        return examples

    sampler = PrefetchingSampler(6, batch_size=2, shuffle=False)
    data = DataLoader(range(6), batch_sampler=sampler, collate_fn=collate)
    loader = PrefetchLoader(data, device="meta")
    send = loader._to_device.send
    monkeypatch.setattr(
        loader._to_device, "send", lambda batch: [copied.append(batch), send(batch)][1]
    )
    assert next(iter(loader)) == [0, 1]
    began.wait()
    loader.close()
    (thread,) = (one for one in threading.enumerate() if one.name == "torch_collate_kit prefetch")
    gate.set()
    thread.join()
    assert copied == [[0, 1]]
