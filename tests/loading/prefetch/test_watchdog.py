"""A wait that takes too long is logged once: the step, who is waited for, where that thread is."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.loading.hang_guard import fails_when_it_hangs, our_threads
from tests.loading.prefetch.test_fork import in_a_fork
from tests.loading.prefetch.toy_data import COLLATORS, Watched, expected_digests, make_loader
from torch_collate_kit.loading.prefetch import PrefetchLoader
from torch_collate_kit.loading.prefetch.watchdog import Watchdog
from torch_collate_kit.testing import batch_digest

SOON, PATIENCE = 0.15, 10.0


@pytest.fixture(autouse=True)
def guard() -> Iterator[None]:
    with fails_when_it_hangs():
        yield
    assert our_threads() == []


@pytest.fixture
def said(caplog) -> Iterator[list[str]]:
    """What was logged, without the stacks."""
    caplog.set_level(logging.WARNING, "torch_collate_kit")
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("torch_collate_kit.loading").addHandler(handler)
    yield messages
    logging.getLogger("torch_collate_kit.loading").removeHandler(handler)


def until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


def opened_when_said(gate: Any, said: list[str], count: int = 1) -> threading.Thread:
    """Opens the gate after so many warnings, and some more time for a second one."""

    def wait_and_open() -> None:
        try:
            until(lambda: len(said) >= count)
            time.sleep(2 * SOON)
        finally:
            gate.set()

    thread = threading.Thread(target=wait_and_open)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("number", "prefetch", "where"),
    [
        (0, True, "the thread of the training loop"),  # nothing is ahead of the first batch
        (0, False, "the thread of the training loop"),
        (2, False, "the thread of the training loop"),
        (2, True, "the prefetch thread"),
        (6, True, "the prefetch thread"),
    ],
)
def test_a_slow_batch_is_told_once_and_comes(said, number, prefetch, where):
    collate = Watched()
    collate.gates[number] = threading.Event()
    opener = opened_when_said(collate.gates[number], said)
    with make_loader(collate, prefetch=prefetch, warn_after=SOON) as loader:
        found = [batch_digest(batch) for batch in loader.steps(8)]
    opener.join()
    assert found == expected_digests(2)
    (message,) = said
    first, *stack = message.splitlines()
    seconds = float(first.split()[3])
    assert SOON <= seconds < PATIENCE
    assert first == (
        f"PrefetchLoader has waited {seconds:.3g} s for step {number % 4} of epoch {number // 4}, "
        f"and waits on: the batch is being collated in {where}. Stack of {where}:"
    )
    assert any("toy_data.py" in line and "in __call__" in line for line in stack)
    assert "self.gates[number].wait()" in message


def test_every_slow_batch_is_told(said):
    collate = Watched()
    openers = []
    for count, number in enumerate((1, 2), start=1):
        collate.gates[number] = threading.Event()
        openers.append(opened_when_said(collate.gates[number], said, count))
    with make_loader(collate, warn_after=SOON) as loader:
        assert len(list(loader)) == 4
    for opener in openers:
        opener.join()
    steps = [message.partition("for ")[2].partition(",")[0] for message in said]
    assert steps == ["step 1 of epoch 0", "step 2 of epoch 0"]


@pytest.mark.parametrize("warn_after", [None, PATIENCE])
def test_nothing_is_said_before_its_time(said, warn_after):
    collate = Watched()
    collate.gates[1] = threading.Event()
    with make_loader(collate, warn_after=warn_after) as loader:
        batches = iter(loader)
        next(batches)
        threading.Timer(2 * SOON, collate.gates[1].set).start()
        next(batches)
        time.sleep(2 * SOON)
    assert said == []


def test_time_in_the_training_step_is_no_wait(said):
    with make_loader(warn_after=SOON) as loader:
        for _ in loader:
            time.sleep(2 * SOON)
    assert said == []


def test_an_error_ends_a_wait(said):
    collate = Watched()
    collate.errors[1] = ValueError("bad batch")
    with make_loader(collate, warn_after=SOON, prefetch=False) as loader:
        batches = loader.steps(4)
        next(batches)
        watchdog = loader._run._watchdog
        with pytest.raises(ValueError, match="bad batch"):
            next(batches)
        assert watchdog._wait is None
    assert said == []


# ---- workers ----


class Gated:
    """Of worker processes: each batch waits until the gate is open, and says whose it is."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.gate, self.pids = context.Event(), context.Queue()

    def __call__(self, examples: Any) -> Any:
        self.pids.put(os.getpid())
        self.gate.wait()
        return COLLATORS["packed"](examples)


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_slow_worker_is_named(said, num_workers, prefetch):
    collate = Gated()
    opener = opened_when_said(collate.gate, said)
    options = {"num_workers": num_workers, "prefetch": prefetch, "warn_after": SOON}
    with make_loader(collate, **options) as loader:
        found = [batch_digest(batch) for batch in loader.steps(4)]
        pids = {collate.pids.get(timeout=PATIENCE) for _ in range(num_workers)}
    opener.join()
    assert found == expected_digests(1)
    pid = int(said[0].partition("pid ")[2].partition(",")[0])
    assert pid in pids
    assert said[0].splitlines()[0].partition("waits on: ")[2] == (
        f"the batch is to come from DataLoader worker 0 of {num_workers} (pid {pid}, alive; "
        f"`py-spy dump --pid {pid}` shows where it is). Stack of the thread of the training loop:"
    )
    assert "_get_data" in said[0]
    assert len(said) == 1


class Halting:
    """The worker stops itself, as a debugger would, before a batch."""

    def __init__(self) -> None:
        self.num_batches = 0

    def __call__(self, examples: Any) -> Any:
        self.num_batches += 1
        if self.num_batches == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        return COLLATORS["packed"](examples)


def test_a_wait_of_the_prefetch_thread_for_a_worker(said):
    with make_loader(Halting(), num_workers=1, warn_after=SOON) as loader:
        batches = loader.steps(4)
        found = [batch_digest(next(batches))]
        (pid,) = [worker.pid for worker in multiprocessing.active_children()]
        wake = SimpleNamespace(set=lambda: os.kill(pid, signal.SIGCONT))
        opener = opened_when_said(wake, said)
        found += [batch_digest(batch) for batch in batches]
        opener.join()
    assert found == expected_digests(1)
    (message,) = said
    # its last batch may still be in its hands
    assert re.search(r"for step [12] of epoch 0, and waits on", message)
    assert f"from DataLoader worker 0 of 1 (pid {pid}, alive" in message
    assert "Stack of the prefetch thread:" in message


class Iterating:
    """Has the attributes of a DataLoader's iterator, and waits in the method of that name."""

    def __init__(self, task: Any, **attributes: Any) -> None:
        self._rcvd_idx, self._task_info = 4, {4: task}
        vars(self).update(attributes)
        self.gate = threading.Event()

    def _get_data(self) -> None:
        self.gate.wait()


def worker(pid: int, *, is_alive: bool) -> Any:
    return SimpleNamespace(pid=pid, is_alive=lambda: is_alive)


WORKERS = [worker(11, is_alive=True), worker(12, is_alive=False)]


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        (Iterating((1,), _workers=WORKERS), "DataLoader worker 1 of 2 (pid 12, dead)"),
        (Iterating((0,), _workers=WORKERS), "DataLoader worker 0 of 2 (pid 11, alive; `py-spy"),
        (Iterating(None, _workers=WORKERS), "one of 2 DataLoader workers"),
        (Iterating((5,), _workers=WORKERS), "one of 2 DataLoader workers"),
        (Iterating((1,), _workers=WORKERS, _task_info={}), "one of 2 DataLoader workers"),
        (Iterating((1,)), "being collated in the prefetch thread"),  # somebody else's _get_data
    ],
)
def test_a_worker_is_described_by_what_the_iterator_has(said, batches, expected):
    watchdog = Watchdog(SOON)
    thread = threading.Thread(target=batches._get_data)
    thread.start()
    watchdog.collating = thread.ident
    watchdog.wait_begins(3, 7)
    until(lambda: said)
    batches.gate.set()
    thread.join()
    watchdog.stop()
    assert "for step 7 of epoch 3" in said[0]
    assert expected in said[0]


def test_a_thread_that_has_ended_has_no_stack(said):
    watchdog = Watchdog(SOON)
    watchdog.wait_begins(0, 0)
    until(lambda: said)
    watchdog.stop()
    assert said[0].endswith("Stack of the prefetch thread:\n  it has ended")


# ---- what is left behind ----


def test_the_thread_ends_with_the_loop_the_epoch_and_the_loader():
    with make_loader(prefetch=False) as loader:
        batches = iter(loader)
        next(batches)
        assert len(our_threads()) == 1
        batches.close()
        assert our_threads() == []
        list(loader)
        assert our_threads() == []
        next(iter(loader.steps(3)))
        list(loader.steps(1))
        assert len(our_threads()) == 1  # the epoch is not over
    assert our_threads() == []


def test_the_thread_ends_when_nobody_has_the_loader():
    loader = make_loader()
    list(loader.steps(2))
    threads = our_threads()
    assert "torch_collate_kit watchdog" in [thread.name for thread in threads]
    del loader
    gc.collect()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_a_fork_does_not_wait_for_the_thread_of_its_parent(said):
    collate = Watched()
    collate.gates[1] = threading.Event()
    with make_loader(collate, warn_after=SOON) as loader:
        batches = loader.steps(8)
        found = [batch_digest(next(batches))]

        def own_loader() -> None:
            loader.close()
            with make_loader(warn_after=SOON) as mine:
                assert [batch_digest(batch) for batch in mine] == expected_digests(1)
            assert our_threads() == []

        assert in_a_fork(own_loader) == ""
        opener = opened_when_said(collate.gates[1], said)
        found += [batch_digest(batch) for batch in batches]
        opener.join()
    assert found == expected_digests(2)
    assert len(said) == 1


def test_two_hundred_forks_while_the_watchdog_looks():
    """What is locked at a fork stays locked in the child, and the child has to end."""
    watchdog = Watchdog(1e-4)
    try:
        for _ in range(200):
            watchdog.wait_begins(0, 0)
            watchdog.wait_ends()
            assert in_a_fork(watchdog._release) == ""
    finally:
        watchdog.stop()


# ---- settings ----


@pytest.mark.parametrize(
    ("warn_after", "error", "message"),
    [
        (0, ValueError, "warn_after must be more than 0 seconds, got 0; None is never"),
        (-1.5, ValueError, "warn_after must be more than 0 seconds, got -1.5; None is never"),
        (np.inf, ValueError, "warn_after must be more than 0 seconds, got inf; None is never"),
        (np.nan, ValueError, "warn_after must be more than 0 seconds, got nan; None is never"),
        ("60", TypeError, "warn_after must be a number of seconds or None, got '60'"),
        (True, TypeError, "warn_after must be a number of seconds or None, got True"),
    ],
)
def test_seconds_are_a_positive_number(warn_after, error, message):
    with pytest.raises(error) as caught:
        make_loader(warn_after=warn_after)
    assert str(caught.value) == message


def test_the_repr_names_it_where_it_is_not_the_default():
    assert "warn_after" not in repr(make_loader())
    assert ", warn_after=None)" in repr(make_loader(warn_after=None))
    assert isinstance(make_loader(warn_after=1e300), PrefetchLoader)
    with make_loader(warn_after=1e300) as loader:  # longer than a lock can wait
        assert len(list(loader)) == 4
