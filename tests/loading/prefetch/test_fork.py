"""The slot and its thread; forked processes, which inherit locks and loaders but no threads."""

from __future__ import annotations

import gc
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from torch.utils.data import DataLoader

import torch_collate_kit
from tests.loading.hang_guard import interrupt_main_thread, once_main_thread_waits, our_threads
from tests.loading.prefetch.toy_data import Watched, every_layout, expected_digests, make_loader
from torch_collate_kit import Mixture, PackedBatchSampler, PackedCollator, TokenizedDataset
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading import AsyncBatchCollator, PrefetchLoader
from torch_collate_kit.testing import batch_digest


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


CHILD_SECONDS = 120  # of milliseconds' work, on a machine that may have no time


def in_a_fork(work: Callable[[], object]) -> str:
    """How a forked child that does ``work`` ends: "" as it should, else its traceback or signal."""
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if not child:
            code = 1
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends it, whatever it waits for
                signal.alarm(CHILD_SECONDS)
                work()
                code = 0
            except BaseException:
                said.write(traceback.format_exc().encode())
                said.flush()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        if code == -signal.SIGALRM:
            return f"the child hung for {CHILD_SECONDS} s"
        return said.read().decode() or ("" if code == 0 else f"the child ended with {code}")


# ---- locks ----


def test_forks_while_a_thread_collates():
    """A lock that is held at a fork is held in the child for good."""
    expected = [batch_digest(batch) for batch in every_layout(5)]
    is_over = threading.Event()

    def collate_on() -> None:
        while not is_over.is_set():
            every_layout(10_000)

    def collate() -> None:
        assert [batch_digest(batch) for batch in every_layout(5)] == expected

    thread = threading.Thread(target=collate_on)
    thread.start()
    try:
        for fork in range(10):
            assert in_a_fork(collate) == "", f"fork {fork}"
    finally:
        is_over.set()
        thread.join()


def collate_trees(scale: int) -> Any:
    """A batch of rows that share prefixes, planned by a sampler over a mixture."""
    collate = PackedCollator(0, max_tokens=8 * scale, share_prefixes=True)
    rows = [{"input_ids": [[*range(scale), i], [*range(scale), 9, i]]} for i in range(10, 14)]
    mixture = Mixture([TokenizedDataset(rows[:2]), TokenizedDataset(rows[2:])])
    sampler = PackedBatchSampler(mixture, collate, batch_rows=1, shuffle=False)
    return collate(mixture.__getitems__(next(iter(sampler))))


def test_forks_while_a_tree_is_collated():
    """Where a property holds a lock while it computes, the first child waits for it."""
    is_inside, gate = threading.Event(), threading.Event()
    trees_of = pkgutil.resolve_name("torch_collate_kit.reading.examples:trees_of")

    def held(*arguments: Any) -> Any:
        if threading.current_thread() is thread:
            is_inside.set()
            gate.wait()
        return trees_of(*arguments)

    thread = threading.Thread(target=collate_trees, args=(4,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_collate_kit.reading.examples.trees_of", held)
        patch.setattr("tests.loading.prefetch.test_fork.CHILD_SECONDS", 20)
        thread.start()
        is_inside.wait()
        try:
            assert in_a_fork(lambda: collate_trees(4)) == ""
        finally:
            gate.set()
            thread.join()


def test_no_property_on_the_way_of_a_batch_holds_a_lock():
    package = Path(torch_collate_kit.__file__).parent
    files = [path for path in package.rglob("*.py") if "reporting" not in path.parts]
    assert len(files) > 100
    assert [path.name for path in files if "cached_property" in path.read_text()] == []


TOO_SOON = 3  # the collation was over before the first fork
FIRST_COLLATION = f"""
import os, signal, sys, threading, time
from tests.loading.prefetch.toy_data import every_layout

began, children, before = threading.Event(), [], set(sys.modules)

def collate_first():
    began.set()
    every_layout(5)

thread = threading.Thread(target=collate_first)
sys.setswitchinterval(1e-5)
thread.start()
began.wait()
while thread.is_alive():
    child = os.fork()
    if not child:
        signal.alarm(10)  # of milliseconds' work
        every_layout(5)
        os._exit(0)
    children.append(child)
    time.sleep(0.0002)
if late := sorted(set(sys.modules) - before):
    sys.exit("imported by a first collation: " + str(late))
ends = [os.waitpid(child, 0)[1] for child in children]
if not ends:
    sys.exit({TOO_SOON})
sys.exit(f"{{sum(map(bool, ends))}} of {{len(ends)}} children hung" if any(ends) else 0)
"""


# Python 3.12 and later: "This process is multi-threaded, use of fork() may lead to deadlocks"
FORK_WARNING = "ignore:This process:DeprecationWarning"


def test_a_first_collation_holds_no_import_lock():
    """A fresh interpreter: a child that is forked during an import can never import that module."""
    for _ in range(10):
        ran = subprocess.run(
            [sys.executable, "-W", FORK_WARNING, "-c", FIRST_COLLATION],
            capture_output=True,
            text=True,
            timeout=CHILD_SECONDS,
            check=False,
        )
        if ran.returncode != TOO_SOON:
            break
    assert (ran.returncode, ran.stderr) == (0, "")


# ---- the slot ----


@pytest.fixture
def in_flight() -> Iterator[AsyncBatchCollator[int]]:
    """A collator that builds step 4 on its thread until the test is over."""
    began, gate = threading.Event(), threading.Event()

    def compute(step: int) -> int:
        if step == 4:
            began.set()
            gate.wait()
        return step

    with AsyncBatchCollator(compute) as collator:
        collator.submit(4)
        began.wait()
        yield collator
        gate.set()
        assert collator.get(4) == 4  # what a child does with its copy is nothing to us


def test_what_a_parent_builds_is_refused_in_a_fork(in_flight):
    def refused() -> None:
        for use in (in_flight.get, in_flight.submit):
            with pytest.raises(StateError) as caught:
                use(4)
            assert str(caught.value) == (
                f"{use.__name__}(4) in process {os.getpid()}, a fork: the slot holds step 4 of "
                f"process {os.getppid()}, whose thread is not here; clear() drops it"
            )

    assert in_a_fork(refused) == ""


def test_a_fork_drops_what_its_parent_builds_without_waiting(in_flight):
    def cleared() -> None:
        in_flight.clear()
        in_flight.submit(5)  # on a thread of its own
        assert in_flight.get(5) == 5
        assert in_flight.get(6) == 6
        in_flight.shutdown()

    assert in_a_fork(cleared) == ""
    assert in_a_fork(in_flight.shutdown) == ""


# ---- loaders ----

SETTINGS = [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}]
ELSEWHERE = (
    "the loader is read in process {0}, and this is process {1}, a fork without its thread and "
    "workers; make a new PrefetchLoader here"
)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Cycles stay until they are collected by hand."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()
    for thread in our_threads():  # on its way out
        thread.join()


def leave_in_a_cycle(loop: Iterator[Any]) -> None:
    cycle: list[Any] = [loop]
    cycle.append(cycle)


def collect(*_: object) -> None:
    assert gc.collect() > 0


@pytest.mark.usefixtures("no_collection")
def test_an_abandoned_loop_does_not_hang_the_workers_of_another_loader():
    collate = Watched()
    collate.gates[1] = threading.Event()
    loop = iter(make_loader(collate))
    next(loop)
    collate.wait_until_begun(2)  # the second batch is in flight
    leave_in_a_cycle(loop)
    del loop
    other = DataLoader(range(4), num_workers=1, worker_init_fn=collect, timeout=CHILD_SECONDS)
    try:
        assert [batch.item() for batch in other] == [0, 1, 2, 3]
    finally:
        collate.gates[1].set()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_loop_that_a_fork_collects_goes_on_in_the_parent(setting):
    expected = expected_digests(2)
    with make_loader(**setting) as loader:
        loop = loader.steps(8)
        found = [batch_digest(next(loop))]
        leave_in_a_cycle(loop)
        del loop
        assert in_a_fork(collect) == ""
        found += [batch_digest(batch) for batch in loader.steps(7)]
    assert found == expected


def uses(loader: PrefetchLoader, loop: Iterator[Any]) -> list[Callable[[], Any]]:
    return [
        lambda: next(loop),
        lambda: next(iter(loader)),
        lambda: next(loader.steps(1)),
        loader.reshuffle,
        lambda: loader.set_epoch(3),
        lambda: loader.load_state_dict(loader.state_dict()),
    ]


@pytest.mark.parametrize("setting", [*SETTINGS, {"prefetch": False}], ids=str)
def test_a_loop_of_the_parent_is_refused_in_a_fork_and_goes_on(setting):
    with make_loader(**setting) as loader:
        loop = loader.steps(8)
        found = [batch_digest(next(loop))]
        state = loader.state_dict()

        def refused() -> None:
            for use in uses(loader, loop):
                with pytest.raises(StateError) as caught:
                    use()
                assert str(caught.value) == ELSEWHERE.format(os.getppid(), os.getpid())
            assert loader.state_dict() == state
            loader.close()

        def refused_between() -> None:
            with pytest.raises(StateError, match="a fork without its thread and workers"):
                next(iter(loader))
            loader.close()

        def left() -> None:
            with loader:
                loop.close()

        assert in_a_fork(refused) == ""
        assert in_a_fork(left) == ""
        found += [batch_digest(batch) for batch in loop]
        if "persistent_workers" in setting:  # they are the parent's between epochs, too
            assert in_a_fork(refused_between) == ""
    assert found == expected_digests(2)


@pytest.mark.parametrize(("num_epochs", "num_workers"), [(0, 0), (1, 1)])
def test_a_loader_that_reads_nothing_goes_on_in_a_fork(num_epochs, num_workers):
    expected = expected_digests(2)
    with make_loader(num_workers=num_workers) as loader:
        for _ in range(num_epochs):
            assert [batch_digest(batch) for batch in loader] == expected[:4]

        def goes_on() -> None:
            with loader:
                found = [batch_digest(batch) for batch in loader]
                assert found == expected[4 * num_epochs :][:4]

        assert in_a_fork(goes_on) == ""
