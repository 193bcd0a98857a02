"""One position: a state is of what was received, whoever takes it, also while a loader is moved."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.building import mixed_sampler, packed_stream
from tests.loading.prefetch.test_fork import in_a_fork
from tests.loading.prefetch.toy_data import OwnSampler, digests_of, make_loader, make_sampler
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading import PrefetchingSampler, PrefetchLoader
from torch_collate_kit.testing import batch_digest

NUM_EXAMPLES, NUM_FOLLOWING = 7, 9


def slow(examples: Any) -> Any:
    time.sleep(0.002)
    return examples


def number_of(batch: Any) -> Any:
    """A batch as it can be compared: its examples, or the first token of each row."""
    return batch["input_ids"][:, 0].tolist() if hasattr(batch, "metadata") else list(batch)


def sampled(num_workers: int = 0, sampler: Any = None) -> PrefetchLoader:
    sampler = sampler or PrefetchingSampler(NUM_EXAMPLES, batch_size=2, seed=1)
    data = DataLoader(
        range(NUM_EXAMPLES), batch_sampler=sampler, collate_fn=slow, num_workers=num_workers
    )
    return PrefetchLoader(data)


def mixed(num_workers: int = 0) -> PrefetchLoader:
    return sampled(num_workers, mixed_sampler([4, 3], batch_size=2, seed=1))


def streamed(num_workers: int = 0) -> PrefetchLoader:
    examples = [{"input_ids": [i] * 4} for i in range(NUM_EXAMPLES)]
    stream = packed_stream(examples, tokenizer=0, max_tokens=4, buffer_size=2, num_shards=2)
    data = DataLoader(stream, batch_size=None, num_workers=num_workers, collate_fn=slow)
    return PrefetchLoader(data)


class Watching:
    """Takes states from outside: each with the batches received before and after it was taken."""

    def __init__(self, loader: PrefetchLoader) -> None:
        self.loader = loader
        self.received: list[Any] = []
        self.states: list[tuple[int, int, str]] = []

    def take(self, *_: object) -> None:
        before = len(self.received)
        state = json.dumps(self.loader.state_dict())
        self.states.append((before, len(self.received), state))

    def train(self, num_batches: int) -> None:
        """Loops that are left by a break, at the end of an epoch, or after some steps."""
        while len(self.received) < num_batches:
            which = len(self.received) % 3
            for batch in self.loader.steps(4) if which else self.loader:
                self.received.append(number_of(batch))
                if which < 2 and len(self.received) % 5 in (1, 3):
                    break


def by_a_thread(watching: Watching, work: Callable[[], object]) -> None:
    is_over, errors = threading.Event(), []

    def take_on() -> None:
        try:
            while not is_over.is_set():
                watching.take()
                time.sleep(1e-4)  # the loop would wait for Python's lock for most of the time
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=take_on)
    thread.start()
    try:
        work()
    finally:
        is_over.set()
        thread.join()
    assert errors == []


def by_a_signal_handler(watching: Watching, work: Callable[[], object]) -> None:
    """One that comes at every line of the loading package that this thread executes."""
    taking = False

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal taking
        if "torch_collate_kit/loading" not in frame.f_code.co_filename:
            return None
        if event == "line" and not taking:
            taking = True
            watching.take()
            taking = False
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)


def check_states(watching: Watching, make: Callable[[], PrefetchLoader]) -> None:
    """Each is of a position received meanwhile, and what follows it is what followed."""
    with make() as loader:
        following = [number_of(batch) for batch in loader.steps(len(watching.received) + 20)]
    assert following[: len(watching.received)] == watching.received
    places: dict[str, list[int]] = {}
    for place in range(len(following) - NUM_FOLLOWING):
        places.setdefault(str(following[place : place + NUM_FOLLOWING]), []).append(place)
    wrong, known = [], {}
    for before, after, state in watching.states:
        if state not in known:
            with make() as loader:
                loader.load_state_dict(json.loads(state))
                known[state] = str([number_of(b) for b in loader.steps(NUM_FOLLOWING)])
        # a batch counts as received when the loader hands it over, just before the loop notes it
        if not any(before <= place <= after + 1 for place in places.get(known[state], [])):
            wrong.append((before, after, state))
    assert len(known) > 5, "too few states to tell"
    assert wrong == [], f"{len(wrong)} of {len(watching.states)} states are wrong"


@pytest.mark.parametrize(
    ("make", "take", "num_workers", "num_batches"),
    [
        (sampled, by_a_thread, 0, 25),
        (sampled, by_a_signal_handler, 0, 14),
        (mixed, by_a_thread, 0, 25),
        (streamed, by_a_thread, 0, 25),
        (streamed, by_a_signal_handler, 0, 14),
        (sampled, by_a_thread, 1, 8),
        (streamed, by_a_thread, 1, 8),
    ],
)
def test_states_taken_at_all_moments(make, take, num_workers, num_batches):
    with make(num_workers=num_workers) as loader:
        watching = Watching(loader)
        take(watching, lambda: watching.train(num_batches))
    check_states(watching, make)


def moved(loader: PrefetchLoader, start: dict[str, Any], reshuffles: bool) -> Iterator[None]:
    """What a consumer may do with a loader, one after the other."""
    loader.load_state_dict(start)
    yield
    for _ in loader.steps(2):
        yield
    if reshuffles:
        loader.reshuffle()
        yield
    for _ in loader.steps(1):  # it is still read then
        yield
    loader.load_state_dict(start)
    yield
    for _ in loader:
        yield
        break
    loader.set_epoch(2)
    yield
    for _ in loader:
        yield
    yield


@pytest.mark.parametrize("take", [by_a_thread, by_a_signal_handler])
@pytest.mark.parametrize("make", [sampled, streamed])
def test_states_taken_while_the_loader_is_moved(make, take):
    with make() as loader:
        watching, start = Watching(loader), loader.state_dict()
        right = [json.dumps(start)]
        for _ in moved(loader, start, make is sampled):
            right.append(json.dumps(loader.state_dict()))
        num_times = 6 if take is by_a_thread else 1
        for _ in range(num_times):
            take(watching, lambda: list(moved(loader, start, make is sampled)))
    taken = {state for _, _, state in watching.states}
    assert len(taken) > 3
    assert taken <= set(right)


def test_a_question_of_another_thread_that_the_consumer_overtakes_is_asked_again():
    asked, gate = threading.Event(), threading.Event()

    class Slow(PrefetchingSampler):
        def state_at(self, epoch: int, step: int) -> dict[str, Any]:
            if threading.current_thread() is not threading.main_thread() and not gate.is_set():
                asked.set()
                gate.wait()
            return super().state_at(epoch, step)

    with sampled(sampler=Slow(NUM_EXAMPLES, batch_size=2)) as loader:
        states: list[Any] = []
        thread = threading.Thread(target=lambda: states.append(loader.state_dict()))
        thread.start()
        asked.wait()
        batches = iter(loader)
        next(batches)  # the sampler stands at the next epoch now
        gate.set()
        thread.join()
        assert states == [loader.state_dict()]


# ---- one consumer ----


def test_a_second_thread_that_draws_meanwhile_is_told_so_and_changes_nothing():
    began, gate = threading.Event(), threading.Event()

    def gated(examples: Any) -> Any:
        began.set()
        gate.wait()
        return examples

    sampler = PrefetchingSampler(6, batch_size=2, shuffle=False)
    with PrefetchLoader(DataLoader(range(6), batch_sampler=sampler, collate_fn=gated)) as loader:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(loader))
        thread.start()
        began.wait()
        with pytest.raises(
            StateError, match="another thread is waiting for a batch of this loader"
        ):
            next(iter(loader))
        gate.set()
        thread.join()
        assert found == [[0, 1], [2, 3], [4, 5]]


def test_two_loops_in_two_threads_lose_and_repeat_nothing():
    with sampled() as loader:
        found, errors = [], []

        def train() -> None:
            try:
                for batch in loader.steps(2):
                    found.append(batch)
                    time.sleep(0.003)
            except StateError as error:
                errors.append(str(error))

        threads = [threading.Thread(target=train) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors
        assert all("one consumer" in error for error in errors)
    with sampled() as loader:
        assert sorted(found) == sorted(loader.steps(len(found)))


@pytest.mark.parametrize("prefetch", [True, False])
def test_close_in_another_thread_ends_a_loop_by_a_message_of_the_loader(prefetch):
    sampler = PrefetchingSampler(100, batch_size=1)
    data = DataLoader(range(100), batch_sampler=sampler, collate_fn=slow)
    for delay in (0.0005, 0.001, 0.002, 0.004):
        loader = PrefetchLoader(data, prefetch=prefetch)
        closer = threading.Timer(0.005 + delay, loader.close)
        closer.start()
        with pytest.raises(StateError, match=r"^the loader is closed; make a new PrefetchLoader$"):
            for _ in loader.steps(100_000):
                pass
        closer.join()


def loader_of(sampler: OwnSampler) -> PrefetchLoader:
    return PrefetchLoader(DataLoader(range(40), batch_sampler=sampler, collate_fn=list))


def test_a_state_taken_while_the_sampler_is_half_moved_is_the_one_before() -> None:
    sampler, states = OwnSampler(4), []
    with loader_of(sampler) as loader:
        assert next(iter(loader)) == [0]
        sampler.between = lambda: states.append(loader.state_dict()["sampler"])
        loader.set_epoch(2)
        assert loader.state_dict()["sampler"] == {"epoch": 2, "step": 0}
        loader.load_state_dict({**loader.state_dict(), "sampler": {"epoch": 1, "step": 3}})
        assert [list(loader), list(loader)] == [[[13]], [[20], [21], [22], [23]]]
    assert states == [{"epoch": 0, "step": 1}, {"epoch": 2, "step": 0}]


def test_an_interrupt_while_the_sampler_is_half_moved_back_loses_nothing() -> None:
    sampler = OwnSampler(4)

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
