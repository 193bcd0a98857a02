"""Forked processes inherit locks and loaders but no threads, and wait for none of them."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.loading.hang_guard import fails_when_it_hangs, our_threads
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator, RolloutCollator
from torch_collate_kit.testing import batch_digest

CHILD_SECONDS = 8


@pytest.fixture(autouse=True)
def guard() -> Iterator[None]:
    with fails_when_it_hangs():
        yield
    assert our_threads() == []


def in_a_fork(work: Callable[[], object]) -> str:
    """How a forked child that does ``work`` ends: "" as it should, else its traceback or signal."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it waits for
            signal.alarm(CHILD_SECONDS)
            work()
            code = 0
        except BaseException:
            os.write(write, traceback.format_exc()[-4000:].encode())
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == -signal.SIGALRM:
        return f"the child hung for {CHILD_SECONDS} s"
    return said or ("" if code == 0 else f"the child ended with {code}")


# ---- locks ----


def rollout(num_tokens: int) -> dict[str, Any]:
    ones = np.ones(num_tokens, dtype=np.int64)
    return {"prompt_ids": ones, "response_ids": ones, "rewards": 1.0, "loss_mask": ones}


def tokens(*lengths: int) -> list[dict[str, Any]]:
    return [{"input_ids": np.ones(n, dtype=np.int64)} for n in lengths]


def batches(scale: int) -> list[Batch]:
    """One of every layout; long ones spend their time where NumPy releases the GIL."""
    few, many = scale, 3 * scale
    return [
        PaddedCollator(0)(tokens(many, *[1] * 5)),  # mostly pads
        PackedCollator(0, max_tokens=many)(tokens(few, few, many)),
        RolloutCollator(0)([rollout(many), rollout(few)]),
        PackedCollator(0, max_tokens=2 * many)([rollout(many), rollout(few)]),
    ]


def test_two_hundred_forks_while_a_thread_collates():
    """A lock that is held at a fork is held in the child for good."""
    expected = [batch_digest(batch) for batch in batches(5)]
    is_over = threading.Event()

    def collate_on() -> None:
        while not is_over.is_set():
            batches(10_000)

    def collate() -> None:
        assert [batch_digest(batch) for batch in batches(5)] == expected

    thread = threading.Thread(target=collate_on)
    thread.start()
    try:
        for fork in range(200):
            assert in_a_fork(collate) == "", f"fork {fork} of 200"
    finally:
        is_over.set()
        thread.join()
