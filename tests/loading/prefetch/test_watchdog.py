"""A wait that takes too long is logged once: the step, the worker, the stack."""

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
from torch_collate_kit.loading.prefetch.watchdog import Watchdog
from torch_collate_kit.testing import batch_digest

SOON, NEVER = 0.05, 1000.0
"""Seconds. A busy machine may make any wait longer than SOON, so tests count the warnings of those
that they make long. None is longer than NEVER."""


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.001)


def of_step(said: list[str], step: int, epoch: int = 0) -> list[str]:
    return [message for message in said if f" for step {step} of epoch {epoch}," in message]


def opened_when_logged(gate: Any, said: list[str], step: int, epoch: int = 0) -> threading.Thread:
    """Opens the gate after a warning of this step, and some more time for a second one."""

    def wait_and_open() -> None:
        until(lambda: of_step(said, step, epoch))
        time.sleep(3 * SOON)
        gate.set()

    thread = threading.Thread(target=wait_and_open, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("prefetch", "numbers", "where"),
    [
        (True, [0], "the thread of the training loop"),  # nothing is ahead of the first batch
        (False, [0, 2], "the thread of the training loop"),
        (True, [2, 3, 6], "the prefetch thread"),
    ],
)
def test_every_slow_batch_is_logged_once_and_comes(said, prefetch, numbers, where):
    collate, openers = Watched(), []
    for number in numbers:
        collate.gates[number] = gate = threading.Event()
        openers.append(opened_when_logged(gate, said, number % 4, number // 4))
    with make_loader(collate, prefetch=prefetch, warn_after=SOON) as loader:
        assert [batch_digest(batch) for batch in loader.steps(8)] == expected_digests(2)
    for number, opener in zip(numbers, openers, strict=True):
        opener.join()
        (message,) = of_step(said, number % 4, number // 4)
        first, *stack = message.splitlines()
        seconds = float(first.split()[3])
        assert SOON <= seconds < NEVER
        assert first == (
            f"PrefetchLoader has waited {seconds:.3g} s for step {number % 4} of epoch "
            f"{number // 4}, and waits on: the batch is being collated in {where}. "
            f"Stack of {where}:"
        )
        assert any("toy_data.py" in line and "in __call__" in line for line in stack)
        assert "self.gates[number].wait()" in message


@pytest.mark.parametrize("warn_after", [None, NEVER, 1e300])  # longer than a lock can wait
def test_nothing_is_said_before_its_time(said, warn_after):
    collate = Watched()
    collate.gates[1] = threading.Event()
    with make_loader(collate, warn_after=warn_after) as loader:
        batches = iter(loader)
        next(batches)
        once_main_thread_waits(lambda: (time.sleep(2 * SOON), collate.gates[1].set()))
        next(batches)
    assert said == []


def test_the_training_step_and_what_follows_an_error_are_no_waits():
    collate = Watched()
    collate.errors[2] = ValueError("bad batch")
    with make_loader(collate, warn_after=NEVER, prefetch=False) as loader:
        batches = loader.steps(4)
        for _ in range(2):
            next(batches)
            watchdog = loader._reader.run._watchdog
            assert watchdog.look(0.0) == 0.0  # whenever it looks
        with pytest.raises(ValueError, match="bad batch"):
            next(batches)
        assert watchdog.look(0.0) == 0.0


def test_a_logging_handler_that_raises_costs_its_own_message_alone(said, capsys):
    class Full(logging.Handler):
        def emit(self, record: Any) -> None:
            if of_step([record.getMessage()], 1):
                raise OSError("no space left on device")

    def open_when_printed() -> None:
        until(lambda: "no space left" in capsys.readouterr().err)
        collate.gates[1].set()

    handler, logger = Full(), logging.getLogger("torch_collate_kit.loading")
    logger.handlers.insert(0, handler)  # before the one of `said`
    collate = Watched()
    collate.gates |= {1: threading.Event(), 2: threading.Event()}
    opener = opened_when_logged(collate.gates[2], said, 2)
    threading.Thread(target=open_when_printed).start()
    try:
        with make_loader(collate, warn_after=SOON) as loader:
            assert len(list(loader)) == 4
    finally:
        logger.removeHandler(handler)
    opener.join()
    assert (of_step(said, 1), len(of_step(said, 2))) == ([], 1)


# ---- workers ----


class Gated:
    """Of worker processes: each batch waits until the gate is open."""

    def __init__(self) -> None:
        self.gate = multiprocessing.get_context("fork").Event()

    def __call__(self, examples: Any) -> Any:
        self.gate.wait()
        return COLLATORS["packed"](examples)


def test_a_slow_worker_is_named(said):
    collate = Gated()
    opener = opened_when_logged(collate.gate, said, 0)
    with make_loader(collate, num_workers=1, warn_after=SOON) as loader:
        batches = loader.steps(4)
        found = [batch_digest(next(batches))]
        (pid,) = [worker.pid for worker in multiprocessing.active_children()]
        assert found + [batch_digest(batch) for batch in batches] == expected_digests(1)
    opener.join()
    (message,) = of_step(said, 0)
    assert message.splitlines()[0].partition("waits on: ")[2] == (
        f"the batch is to come from DataLoader worker 0 of 1 (pid {pid}, alive; "
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
            until(lambda: of_step(said, 1) + of_step(said, 2))
            os.kill(pid, signal.SIGCONT)

        waker = threading.Thread(target=wake, daemon=True)
        waker.start()
        found += [batch_digest(batch) for batch in batches]
        waker.join()
    assert found == expected_digests(1)
    message = (of_step(said, 1) + of_step(said, 2))[-1]
    assert f"from DataLoader worker 0 of 1 (pid {pid}, alive" in message
    assert "Stack of the prefetch thread:" in message


class Iterating:
    """Has the attributes of a DataLoader's iterator, and waits in the method of that name."""

    def __init__(self, task: Any, *workers: Any) -> None:
        self._rcvd_idx, self._task_info, self._workers = 4, {4: task}, list(workers)
        self.gate = threading.Event()

    def _get_data(self) -> None:
        self.gate.wait()


DEAD = SimpleNamespace(pid=12, is_alive=lambda: False)
DESCRIBED = [
    (Iterating((0,), DEAD), "the batch is to come from DataLoader worker 0 of 1 (pid 12, dead)"),
    (Iterating((5,), DEAD, DEAD), "the batch is to come from one of 2 DataLoader workers"),
    (Iterating(None, DEAD, DEAD), "the batch is to come from one of 2 DataLoader workers"),
]


@pytest.mark.parametrize(("batches", "expected"), DESCRIBED)
def test_a_worker_is_described_by_what_the_iterator_has(said, batches, expected):
    watchdog = Watchdog(SOON)
    thread = threading.Thread(target=batches._get_data)
    thread.start()
    watchdog.collating = thread.ident
    with watchdog.waiting(3, 7):
        until(lambda: said)
    watchdog.stop()
    batches.gate.set()
    thread.join()
    assert f"for step 7 of epoch 3, and waits on: {expected}" in said[0]


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
        assert len(list(loader.steps(1))) == len(our_threads()) == 1  # the epoch is not over
    assert our_threads() == []
    loader = make_loader()
    list(loader.steps(2))
    threads = our_threads()
    assert "torch_collate_kit watchdog" in [thread.name for thread in threads]
    del loader, batches
    gc.collect()
    for thread in threads:
        thread.join()


def test_forks_while_the_watchdog_looks():
    """What is locked at a fork stays locked in the child, and the child has to end."""
    watchdog = Watchdog(1e-4)
    for _ in range(20):
        with watchdog.waiting(0, 0):
            pass
        assert in_a_fork(watchdog._release) == ""
    watchdog.stop()


# ---- settings ----


@pytest.mark.parametrize(
    ("warn_after", "error", "message"),
    [
        (0, ValueError, "warn_after must be more than 0 seconds, got 0; None is never"),
        (np.inf, ValueError, "warn_after must be more than 0 seconds, got inf; None is never"),
        (np.nan, ValueError, "warn_after must be more than 0 seconds, got nan; None is never"),
        ("60", TypeError, "warn_after must be a number of seconds or None, got '60'"),
        (True, TypeError, "warn_after must be a number of seconds or None, got True"),
    ],
)
def test_seconds_are_a_positive_number(warn_after, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        make_loader(warn_after=warn_after)


def test_the_repr_names_it_where_it_is_not_the_default():
    assert ", warn_after=2.0)" in repr(make_loader(warn_after=np.float32(2)))
    assert ", warn_after=None)" in repr(make_loader(warn_after=None))
    assert "warn_after" not in repr(make_loader())
