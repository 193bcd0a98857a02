"""The single slot: what is handed out, what is refused, what a fault on the thread does."""

from __future__ import annotations

import gc
import threading
import traceback
from concurrent.futures import Future
from queue import SimpleQueue

import pytest

from tests.loading.hang_guard import interrupt_main_thread, once_main_thread_waits, our_threads
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading import AsyncBatchCollator


class Held:
    """A compute that waits, in its thread, until it is released."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.started, self.released = threading.Event(), threading.Event()
        self.num_finished = 0
        self.error = error

    def __call__(self, step: int) -> int:
        self.started.set()
        self.released.wait()
        self.num_finished += 1
        if self.error is not None:
            raise self.error
        return step


def explode(step: int) -> int:
    raise ValueError(f"step {step}")


def test_submit_builds_on_one_thread_while_the_caller_goes_on_and_get_alone_in_the_caller():
    with AsyncBatchCollator(lambda step: threading.current_thread()) as collator:
        assert collator.get(3) is threading.main_thread()
        assert our_threads() == []
        threads = set()
        for step in range(4):
            collator.submit(step)
            threads.add(collator.get(step))
        assert list(threads) == our_threads()
    compute = Held()
    with AsyncBatchCollator(compute) as collator:
        collator.submit(0)
        compute.started.wait()  # it is being built, and here we are
        assert compute.num_finished == 0
        assert len(our_threads()) == 1
        compute.released.set()
        assert collator.get(0) == 0


def test_a_second_submit_and_a_get_of_another_step_are_refused_and_the_first_one_stays():
    with AsyncBatchCollator(str) as collator:
        collator.submit(4)
        with pytest.raises(StateError, match=r"submit\(5\) while the slot holds step 4.*get\(4\)"):
            collator.submit(5)
        with pytest.raises(StateError, match=r"get\(5\), but the slot holds step 4"):
            collator.get(5)
        assert collator.get(4) == "4"


def test_an_exception_is_raised_at_its_step_with_the_traceback_of_the_thread():
    with AsyncBatchCollator(explode) as collator:
        collator.submit(7)
        with pytest.raises(ValueError, match="step 7") as caught:
            collator.get(7)
        assert "explode" in [frame.name for frame in traceback.extract_tb(caught.tb)]
        with pytest.raises(ValueError, match="step 8"):  # the slot is empty again
            collator.get(8)


def test_an_interrupt_while_waiting_leaves_the_batch_in_the_slot():
    compute = Held()
    with AsyncBatchCollator(compute) as collator:
        collator.submit(0)
        compute.started.wait()
        interrupt = once_main_thread_waits(interrupt_main_thread)
        with pytest.raises(KeyboardInterrupt):
            collator.get(0)
        interrupt.join()
        compute.released.set()
        assert collator.get(0) == 0
        assert compute.num_finished == 1


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_interrupt_in_submit_leaves_no_batch_that_nobody_waits_for(monkeypatch, has_begun):
    compute = Held()
    compute.released.set()

    class Interrupted(SimpleQueue):
        def put(self, request):
            if request is None or compute.num_finished != 1:
                return super().put(request)
            if has_begun:
                compute.started.clear()
                super().put(request)
                compute.started.wait()
            raise KeyboardInterrupt

    monkeypatch.setattr(f"{AsyncBatchCollator.__module__}.SimpleQueue", Interrupted)
    with AsyncBatchCollator(compute) as collator:
        collator.submit(0)
        assert collator.get(0) == 0
        with pytest.raises(KeyboardInterrupt):
            collator.submit(1)
        assert collator.get(1) == 1
        assert compute.num_finished == 2


def test_a_batch_from_before_an_interrupted_clear_is_refused(monkeypatch):
    def interrupted(future):
        raise KeyboardInterrupt

    with AsyncBatchCollator(str) as collator:
        collator.submit(0)
        with monkeypatch.context() as patch:
            patch.setattr(Future, "exception", interrupted)
            with pytest.raises(KeyboardInterrupt):
                collator.clear()
        with pytest.raises(StateError, match=r"step 0 from before clear\(\)"):
            collator.get(0)
        with pytest.raises(StateError, match="while the slot holds step 0"):
            collator.submit(0)
        collator.clear()
        assert collator.get(0) == "0"


def test_nothing_goes_after_shutdown_which_may_be_repeated():
    collator = AsyncBatchCollator(str)
    collator.submit(0)
    collator.shutdown()
    collator.shutdown()
    assert our_threads() == []
    with pytest.raises(StateError, match=r"get\(0\) after shutdown"):
        collator.get(0)
    with pytest.raises(StateError, match=r"submit\(0\) after shutdown"):
        collator.submit(0)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_interrupts_on_the_thread_are_never_swallowed(stop):
    for use in (lambda c: c.get(0), lambda c: c.clear(), lambda c: c.shutdown()):
        compute = Held(stop())
        compute.released.set()
        collator = AsyncBatchCollator(compute)
        collator.submit(0)
        with pytest.raises(stop):
            use(collator)
        collator.shutdown()
        assert our_threads() == []


def test_a_thread_ends_when_its_collator_is_gone():
    collator = AsyncBatchCollator(str)
    collator.submit(0)
    (thread,) = our_threads()
    del collator
    gc.collect()
    thread.join()


def test_clear_waits_and_drops():
    compute = Held()
    with AsyncBatchCollator(compute) as collator:
        collator.submit(0)
        compute.started.wait()
        release = once_main_thread_waits(compute.released.set)
        collator.clear()
        release.join()
        assert compute.num_finished == 1
        collator.submit(1)
        assert collator.get(1) == 1
