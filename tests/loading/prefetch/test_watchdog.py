"""A wait that takes too long is logged once: the step, the worker, the stack."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.loading.hang_guard import once_main_thread_waits, our_threads
from tests.loading.prefetch.test_fork import in_a_fork
from tests.loading.prefetch.toy_data import COLLATORS, Watched, expected_digests, make_loader
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
    with make_loader(prefetch=False, warn_after=1e-4) as loader:
        batches = iter(loader)
        next(batches)
        watchdog = loader._at.reading._watchdog
        for _ in range(20):
            with watchdog.waiting(0, 0):
                pass
            assert in_a_fork(watchdog._release) == ""


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
