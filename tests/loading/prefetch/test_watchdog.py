"""A wait that takes too long is logged once, and holds up no error, no Ctrl-C, no collection."""

from __future__ import annotations

import gc
import json
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.loading.hang_guard import interrupt_main_thread, once_main_thread_waits, our_threads
from tests.loading.prefetch import stuck_reads
from tests.loading.prefetch.test_fork import in_a_fork
from tests.loading.prefetch.toy_data import (
    COLLATORS,
    EXAMPLES,
    Watched,
    expected_digests,
    make_loader,
    make_sampler,
)
from torch_collate_kit.loading import PrefetchingSampler, PrefetchLoader
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
        for _ in range(10):
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


MOST_SECONDS = 6.0  # one and a half, on a machine that has the time


@pytest.fixture(scope="module")
def ends() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.loading.prefetch.stuck_reads"]
    halves = [list(stuck_reads.CASES)[half::2] for half in range(2)]  # they mostly wait
    ran = [subprocess.Popen([*command, *half], stdout=subprocess.PIPE) for half in halves]
    first, second = (json.loads(one.communicate(timeout=120)[0]) for one in ran)
    return first | second


@pytest.mark.parametrize("case", stuck_reads.CASES)
def test_a_process_ends_at_once_and_says_why(ends, case):
    seconds, said = ends[case]["seconds"], ends[case]["said"]
    assert seconds < MOST_SECONDS, said
    last = said.splitlines()[-1]
    if case.startswith("100"):
        assert last == "all were collected"
        return
    assert last == ("KeyboardInterrupt" if "ctrl-c" in case else "RuntimeError: of the body")
    abandoned = [line for line in said.splitlines() if "abandons it" in line]
    if "with" not in case:
        assert abandoned == []
        return
    assert "0 workers are left" in said
    (line,) = abandoned
    what = "it was to come from DataLoader worker 0 of 1" if "worker" in case else "the prefetch "
    assert line.startswith(
        "PrefetchLoader is closed while step 2 of epoch 0 is being built, which takes more than "
        f"0.8 s, and abandons it: {what}"
    )


def test_a_loop_that_is_left_while_a_batch_is_late_goes_on_with_it():
    collate = Watched()
    collate.gates[1] = threading.Event()
    with make_loader(collate) as loader:
        found = [batch_digest(next(iter(loader)))]
        state = loader.state_dict()
        assert collate.num_begun == 2
        collate.release_later(1)
        found += [batch_digest(batch) for batch in loader.steps(7)]
        assert collate.num_begun == 8
        loader.load_state_dict(state)
        assert batch_digest(next(iter(loader))) == found[1]
    assert found == expected_digests(2)


def test_an_interrupt_where_a_batch_is_handed_over_loses_none(monkeypatch):
    collate = Watched()
    collate.gates[2] = threading.Event()
    data = DataLoader(EXAMPLES, batch_sampler=make_sampler(), collate_fn=collate)
    with PrefetchLoader(data, device="meta") as loader:
        batches = iter(loader)
        steps = [next(batches).metadata["step"]]
        with monkeypatch.context() as patch:
            patch.setattr(loader._to_device, "receive", lambda sent: interrupt_main_thread())
            with pytest.raises(KeyboardInterrupt):
                next(batches)  # the one after it is in flight, and late
        assert loader.state_dict()["sampler"]["step"] == 1
        collate.release_later(2)
        steps += [batch.metadata["step"] for batch in loader]
    assert steps == [0, 1, 2, 3]


def test_a_thread_that_was_abandoned_changes_and_copies_nothing_later(said, monkeypatch):
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

    def spied(batch: list[int]) -> Any:
        copied.append(batch)
        return send(batch)

    monkeypatch.setattr(loader._to_device, "send", spied)
    batches = iter(loader)
    assert next(batches) == [0, 1]
    began.wait()
    state = loader.state_dict()
    loader.close()
    assert len([message for message in said if "abandons it" in message]) == 1
    assert loader.state_dict() == state
    (thread,) = our_threads()
    gate.set()
    thread.join()
    assert loader.state_dict() == state
    assert copied == [[0, 1]]
    with PrefetchLoader(data) as other:
        other.load_state_dict(state)
        assert list(other) == [[2, 3], [4, 5]]
