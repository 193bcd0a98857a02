"""A wait that takes too long is logged once: the step, who is waited for, where that thread is."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.loading.hang_guard import once_main_thread_waits, our_threads
from tests.loading.prefetch.test_fork import in_a_fork
from tests.loading.prefetch.toy_data import COLLATORS, Watched, expected_digests, make_loader
from torch_collate_kit.loading.prefetch import PrefetchLoader
from torch_collate_kit.loading.prefetch.watchdog import Watchdog
from torch_collate_kit.testing import batch_digest

SOON, NEVER = 0.05, 1000.0
"""Seconds. A busy machine may make any wait longer than SOON, so tests count the warnings of those
that they make long. None is longer than NEVER."""


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.001)


def told_of(said: list[str], step: int, epoch: int = 0) -> list[str]:
    return [message for message in said if f" for step {step} of epoch {epoch}," in message]


def opened_when_told(gate: Any, said: list[str], step: int, epoch: int = 0) -> threading.Thread:
    """Opens the gate after a warning of this step, and some more time for a second one."""

    def wait_and_open() -> None:
        until(lambda: told_of(said, step, epoch))
        time.sleep(4 * SOON)
        gate.set()

    thread = threading.Thread(target=wait_and_open, daemon=True)
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
    epoch, step = divmod(number, 4)
    opener = opened_when_told(collate.gates[number], said, step, epoch)
    with make_loader(collate, prefetch=prefetch, warn_after=SOON) as loader:
        found = [batch_digest(batch) for batch in loader.steps(8)]
    opener.join()
    assert found == expected_digests(2)
    (message,) = told_of(said, step, epoch)
    first, *stack = message.splitlines()
    seconds = float(first.split()[3])
    assert SOON <= seconds < NEVER
    assert first == (
        f"PrefetchLoader has waited {seconds:.3g} s for step {step} of epoch {epoch}, "
        f"and waits on: the batch is being collated in {where}. Stack of {where}:"
    )
    assert any("toy_data.py" in line and "in __call__" in line for line in stack)
    assert "self.gates[number].wait()" in message


def test_every_slow_batch_is_told(said):
    collate = Watched()
    openers = []
    for number in (1, 2):
        collate.gates[number] = threading.Event()
        openers.append(opened_when_told(collate.gates[number], said, number))
    with make_loader(collate, warn_after=SOON) as loader:
        assert len(list(loader)) == 4
    for opener in openers:
        opener.join()
    assert [len(told_of(said, step)) for step in (1, 2)] == [1, 1]


@pytest.mark.parametrize("warn_after", [None, NEVER])
def test_nothing_is_said_before_its_time(said, warn_after):
    collate = Watched()
    collate.gates[1] = threading.Event()
    with make_loader(collate, warn_after=warn_after) as loader:
        batches = iter(loader)
        next(batches)
        once_main_thread_waits(lambda: (time.sleep(4 * SOON), collate.gates[1].set()))
        next(batches)
    assert said == []


def test_time_in_the_training_step_is_no_wait(said):
    """However long it takes, and whenever the watchdog looks."""
    with make_loader(warn_after=NEVER) as loader:
        for _ in loader:
            assert loader._reader.run._watchdog.look(0.0) == 0.0
    assert said == []


def test_a_logging_handler_that_raises_costs_its_own_message_alone(said, capsys):
    class Full(logging.Handler):
        def emit(self, record: Any) -> None:
            if told_of([record.getMessage()], 1):
                raise OSError("no space left on device")

    def open_when_printed() -> None:
        until(lambda: "no space left" in capsys.readouterr().err)
        collate.gates[1].set()

    handler, logger = Full(), logging.getLogger("torch_collate_kit.loading")
    logger.handlers.insert(0, handler)  # before the one of `said`
    collate = Watched()
    collate.gates |= {1: threading.Event(), 2: threading.Event()}
    try:
        with make_loader(collate, warn_after=SOON) as loader:
            batches = iter(loader)
            next(batches)
            threading.Thread(target=open_when_printed).start()
            next(batches)
            opened_when_told(collate.gates[2], said, 2)
            assert len(list(batches)) == 2
    finally:
        logger.removeHandler(handler)
    assert told_of(said, 1) == []
    assert len(told_of(said, 2)) == 1


def test_an_error_ends_a_wait(said):
    collate = Watched()
    collate.errors[1] = ValueError("bad batch")
    with make_loader(collate, warn_after=NEVER, prefetch=False) as loader:
        batches = loader.steps(4)
        next(batches)
        watchdog = loader._reader.run._watchdog
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
    opener = opened_when_told(collate.gate, said, 0)
    options = {"num_workers": num_workers, "prefetch": prefetch, "warn_after": SOON}
    with make_loader(collate, **options) as loader:
        found = [batch_digest(batch) for batch in loader.steps(4)]
        pids = {collate.pids.get() for _ in found}
    opener.join()
    assert found == expected_digests(1)
    (message,) = told_of(said, 0)
    pid = int(message.partition("pid ")[2].partition(",")[0])
    assert pid in pids
    assert message.splitlines()[0].partition("waits on: ")[2] == (
        f"the batch is to come from DataLoader worker 0 of {num_workers} (pid {pid}, alive; "
        f"`py-spy dump --pid {pid}` shows where it is). Stack of the thread of the training loop:"
    )
    assert "_get_data" in message


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
        state = Path(f"/proc/{pid}/stat")

        def wake() -> None:
            until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
            # its last batch may still be in its hands
            until(lambda: told_of(said, 1) + told_of(said, 2))
            os.kill(pid, signal.SIGCONT)

        waker = threading.Thread(target=wake, daemon=True)
        waker.start()
        found += [batch_digest(batch) for batch in batches]
        waker.join()
    assert found == expected_digests(1)
    message = (told_of(said, 1) + told_of(said, 2))[-1]
    assert f"from DataLoader worker 0 of 1 (pid {pid}, alive" in message
    assert "Stack of the prefetch thread:" in message


class Iterating:
    """Has the attributes of a DataLoader's iterator, and waits in the method of that name."""

    def __init__(self, task: Any, **attributes: Any) -> None:
        self._rcvd_idx, self._task_info = 4, {4: task}
        vars(self).update(attributes)
        self.began, self.gate = threading.Event(), threading.Event()

    def _get_data(self) -> None:
        self.began.set()
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
    batches.began.wait()
    watchdog.collating = thread.ident
    with watchdog.waiting(3, 7):
        until(lambda: said)
    batches.gate.set()
    thread.join()
    watchdog.stop()
    assert "for step 7 of epoch 3" in said[0]
    assert expected in said[0]


def test_a_thread_that_has_ended_has_no_stack(said):
    watchdog = Watchdog(SOON)
    with watchdog.waiting(0, 0):
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
        thread.join()


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
        opener = opened_when_told(collate.gates[1], said, 1)
        found += [batch_digest(batch) for batch in batches]
        opener.join()
    assert found == expected_digests(2)
    assert len(told_of(said, 1)) == 1


def test_forks_while_the_watchdog_looks():
    """What is locked at a fork stays locked in the child, and the child has to end."""
    watchdog = Watchdog(1e-4)
    try:
        for _ in range(20):
            with watchdog.waiting(0, 0):
                pass
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


@pytest.mark.parametrize("warn_after", [2, 2.0, np.float32(2), np.float64(2), np.int64(2)])
def test_seconds_are_a_number_of_python_or_numpy(warn_after):
    assert repr(make_loader(warn_after=warn_after)).endswith("warn_after=2.0) [epoch 0, step 0]")


def test_the_repr_names_it_where_it_is_not_the_default():
    assert "warn_after" not in repr(make_loader())
    assert ", warn_after=None)" in repr(make_loader(warn_after=None))
    assert isinstance(make_loader(warn_after=1e300), PrefetchLoader)
    with make_loader(warn_after=1e300) as loader:  # longer than a lock can wait
        assert len(list(loader)) == 4
