"""One batch ahead: a slot that a thread fills, and an epoch of a loader that is read with it."""

from __future__ import annotations

import atexit
import copy
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from torch_collate_kit._checks import KindAndSize, call_repr
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.device_copy import DeviceCopy
from torch_collate_kit.loading.resumable_loaders import Position, ResumableLoader
from torch_collate_kit.loading.skipping import Collated
from torch_collate_kit.loading.watchdog import PATIENCE, Watchdog, is_collecting

T = TypeVar("T")
END: Any = object()


class _Thread(threading.Thread):
    """A thread that builds one batch after the other, until it is asked to end."""

    def __init__(self) -> None:
        # a daemon: the interpreter joins other threads before it exits, and a read may be stuck
        super().__init__(name="torch_collate_kit prefetch", daemon=True)
        self.requests: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.is_given_up = False

    def run(self) -> None:
        while (request := self.requests.get()) is not None:
            request()
            del request  # it would keep the batch alive until the next one


@atexit.register
def _end_threads() -> None:
    """Let each thread end its batch: one that is in torch when the interpreter ends may abort."""
    deadline = time.monotonic() + PATIENCE
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _Thread)]
    for thread in threads:
        thread.requests.put(None)
    for thread in threads:
        if not thread.is_given_up:
            thread.join(max(0.0, deadline - time.monotonic()))


class _Slot(NamedTuple):
    step: int
    future: Future[Any]  # of the batch that is being built, or that waits to be taken


class AsyncBatchCollator(Generic[T]):
    """A double buffer with a single slot: ``submit(step)`` builds ahead, ``get(step)`` takes.

    Args:
        compute: builds the batch of a step. It runs on one background thread after ``submit``, in
            the caller's thread in a ``get`` without one, and never twice at the same time.

    A batch is returned only for the step that it was built for. All methods are for one consumer
    thread. The background thread starts with the first ``submit`` and ends with ``shutdown``, which
    leaving the ``with`` block calls. In a forked process the batch in the slot is refused.
    ``clear`` and ``shutdown`` drop it without waiting there, in the background thread itself, and
    where the garbage collector calls them.

    Raises:
        StateError: a second ``submit`` before ``get``; a ``get`` while the slot holds another step,
            or a batch from before a ``clear``; either of them after ``shutdown`` or a fork.

    >>> with AsyncBatchCollator(lambda step: [step] * 2) as collator:
    ...     for step in range(3):
    ...         batch = collator.get(step)
    ...         collator.submit(step + 1)
    >>> batch
    [2, 2]
    """

    def __init__(self, compute: Callable[[int], T]) -> None:
        self._compute = compute
        self._slot: _Slot | None = None
        self._is_clearing = False
        self._thread: _Thread | None = None
        self._pid = 0  # of the process that has the thread
        self._is_shut_down = False

    def __repr__(self) -> str:
        slot, state = self._slot, "shut down" if self._is_shut_down else "empty"
        if slot is not None and not self._is_shut_down:
            state = f"{'holds' if slot.future.done() else 'builds'} step {slot.step}"
        return f"{call_repr(self, repr(KindAndSize(self._compute)))} [{state}]"

    def submit(self, step: int) -> None:
        """Start building the batch of ``step`` on the thread."""
        self._check_open("submit", step)
        if self._slot is not None:
            raise StateError(
                f"submit({step}) while the slot holds step {self._slot.step}; there is one slot: "
                f"get({self._slot.step}) takes the batch, clear() drops it"
            )
        thread = self._thread if self._pid == os.getpid() else None
        is_new, thread = thread is None, thread or _Thread()
        future: Future[T] = Future()
        self._slot = _Slot(step, future)  # first: no batch is ever built unnoticed
        thread.is_given_up = False
        try:
            thread.requests.put(partial(_compute_into, future, self._compute, step))
            if is_new:
                self._thread, self._pid = thread, os.getpid()
                weakref.finalize(self, thread.requests.put, None).atexit = False
                thread.start()
        except BaseException:  # Ctrl-C in here: either the thread has begun, or it never will
            if is_new:  # it may run or not, so the next one is another
                thread.requests.put(None)
                self._thread = None
            if future.cancel():
                self._slot = None
            raise

    def get(self, step: int) -> T:
        """Return the batch of ``step``: wait for it if it was submitted, otherwise build it now.

        An exception of ``compute`` is raised here, with the thread's traceback, and empties the
        slot. An interrupt while waiting leaves the batch in the slot.
        """
        self._check_open("get", step)
        slot = self._slot
        if slot is None:
            return self._compute(step)
        if self._is_clearing:
            raise StateError(
                f"get({step}), but the slot holds step {slot.step} from before clear(), which was "
                "interrupted; call clear() again"
            )
        if slot.step != step:
            raise StateError(
                f"get({step}), but the slot holds step {slot.step}; get({slot.step}), or clear() "
                "to drop it"
            )
        slot.future.exception()  # waits; an interrupt leaves the batch where it is
        self._slot = None
        return slot.future.result()

    def clear(self) -> None:
        """Wait until nothing is being built, and empty the slot.

        An exception of the dropped batch is dropped too, unless it is no ``Exception``
        (``KeyboardInterrupt``, ``SystemExit``). In a forked process it does not wait.
        """
        error = None
        if self._slot is not None and self._may_wait():
            self._is_clearing = True
            error = self._slot.future.exception()  # waits
        self._slot, self._is_clearing = None, False
        if error is not None and not isinstance(error, Exception):
            raise error

    def shutdown(self) -> None:
        """Call ``clear()``, then end the thread, even if that raises. May be called again."""
        self._is_shut_down = True
        try:
            self.clear()
        finally:
            if self._thread is not None:
                self._thread.requests.put(None)
                if self._may_wait():
                    self._thread.join()

    def __enter__(self) -> AsyncBatchCollator[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _holds(self, step: int) -> bool:
        """Return whether the slot is empty, or for this step."""
        return self._slot is None or self._slot.step == step

    def _settled(self, seconds: float | None) -> bool:
        """Wait at most so long, once for each batch; None: for ever. Return whether it is built."""
        slot, thread = self._slot, self._thread
        if slot is None or slot.future.done():
            return True
        is_given_up = thread is not None and thread.is_given_up
        if self._may_wait() and (seconds is None or not is_given_up):
            wait([slot.future], seconds)
            if thread is not None:
                thread.is_given_up = not slot.future.done()
        return slot.future.done()

    def _abandon(self) -> None:
        """Empty the slot without waiting. The thread ends when ``compute`` returns."""
        self._is_shut_down, self._slot = True, None
        if self._thread is not None:
            self._thread.requests.put(None)

    def _may_wait(self) -> bool:
        """Return whether a wait will end: not in a fork, the thread itself, or a collection."""
        is_own = self._thread is not None and self._thread.ident == threading.get_ident()
        return self._pid == os.getpid() and not is_own and not is_collecting()

    def _check_open(self, method: str, step: int) -> None:
        if self._is_shut_down:
            raise StateError(f"{method}({step}) after shutdown(); make a new AsyncBatchCollator")
        if self._slot is not None and self._pid != os.getpid():
            raise StateError(
                f"{method}({step}) in process {os.getpid()}, a fork: the slot holds step "
                f"{self._slot.step} of process {self._pid}, whose thread is not here; clear() "
                "drops it"
            )


def _compute_into(future: Future[T], compute: Callable[[int], T], step: int) -> None:
    """Build a batch, in the thread."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(compute(step))
    except BaseException as error:
        future.set_exception(error)
        del future  # or the error's traceback would keep itself alive


_Times: TypeAlias = tuple[float, float, float]  # at which a batch was begun, collated, copied


class Reading:
    """An epoch that is read on a thread: at most one batch ahead of the consumer.

    It has no position: the consumer passes its own, and receives the next one with a batch.
    """

    def __init__(
        self,
        loader: ResumableLoader,
        begin: Position,
        to_device: DeviceCopy | None,
        warn_after: float | None,
    ) -> None:
        # workers are forked here: in the consumer's thread, while no other one runs
        batches = loader.begin(begin)
        self.is_over = False  # the end has been drawn
        self._loader, self._to_device = loader, to_device
        self._watchdog = Watchdog(warn_after)
        # not a method: the thread would keep this object alive
        build = partial(_build, loader, batches, to_device, begin.epoch, self._watchdog)
        self._collator = AsyncBatchCollator(build)
        self._end_lost = weakref.finalize(self, _end_lost_workers, loader, os.getpid())
        self._end_lost.atexit = False

    def take(self, position: Position, *, ahead: bool) -> tuple[Any, Position, _Times]:
        """Return the batch after a position, or END, the position after it, and its times.

        ``ahead``: begin to build the batch that follows.
        """
        epoch, step = position.epoch, position.step
        self._loader.check(epoch)
        with self._watchdog.waiting(epoch, step):
            (batch, outcomes, mark), times = self._collator.get(step)
        if batch is END:
            self.is_over = True
            return END, position, times
        skipped = position.skipped.with_batch(epoch, step, outcomes)
        if ahead:
            self._collator.submit(step + 1)
        if self._to_device is not None:
            batch = self._to_device.receive(batch)
        return batch, Position(epoch, step + 1, mark, skipped, self), times

    def has(self, step: int) -> bool:
        """Return whether a step can be taken; not where an interrupt has lost it."""
        return not self.is_over and self._collator._holds(step)

    def is_settled(self, position: Position, seconds: float | None) -> bool:
        """Wait at most so long for a batch in flight; None: for ever. Return whether it is built.

        Always False in a collection of garbage, which must not wait.
        """
        if seconds is not None and is_collecting():
            return False
        with self._watchdog.waiting(position.epoch, position.step):
            return self._collator._settled(seconds)

    def end(self) -> None:
        """Drop what is built ahead, and end the thread and the workers of the epoch."""
        self._end_lost.detach()
        try:
            self._watchdog.stop()
            self._collator.shutdown()
        finally:
            self._loader.end()

    def abandon(self, position: Position) -> None:
        """Kill the workers without waiting. The thread ends when its batch does, and is ignored."""
        if not is_collecting():
            self._watchdog.report_abandoned(position.epoch, position.step)
        self._collator._abandon()
        self._end_lost()
        self._watchdog.stop()


def _end_lost_workers(loader: ResumableLoader, pid: int) -> None:
    """End the workers of a reading that nobody has any more. The collector may call it."""
    if os.getpid() == pid:
        loader.end(0)
        loader.close(0)


def _build(
    loader: ResumableLoader,
    batches: Iterator[Any],
    to_device: DeviceCopy | None,
    epoch: int,
    watchdog: Watchdog,
    step: int,
) -> tuple[Collated, _Times]:
    """Build the next batch, that of ``step``, or END, in the thread."""
    watchdog.collating = threading.get_ident()
    began = time.perf_counter()
    try:
        batch = next(batches)
    except StopIteration as error:
        if _is_of_a_batch(error):  # it would end the epoch in silence
            raise RuntimeError(f"building the batch of step {step} raised StopIteration") from error
        batch = END
    ended = copied = time.perf_counter()
    collated = batch if isinstance(batch, Collated) else Collated(batch)
    if batch is END or loader.is_closed:  # closed: the thread was abandoned, and touches nothing
        return collated, (began, ended, copied)
    batch = _named(collated, epoch, step, keep=not loader.has_sampler)
    if to_device is not None:
        batch = to_device.send(batch)
        copied = time.perf_counter()
    return collated._replace(batch=batch), (began, ended, copied)


def _is_of_a_batch(error: StopIteration) -> bool:
    """Return whether code that reads or collates raised it, here or in a worker, by its frames."""
    names = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    return not names.isdisjoint({"fetch", "reraise"})  # of torch's DataLoader


def _named(collated: Collated, epoch: int, step: int, *, keep: bool) -> Any:
    """Return a Batch with its epoch, step and skipped examples in its metadata; others as is."""
    batch = collated.batch
    if not isinstance(batch, Batch):
        return batch
    named = copy.copy(batch)  # a collate function may keep its own
    names: dict[str, Any] = {"epoch": epoch, "step": step}
    if any(collated.outcomes):
        names["skipped"] = [one.example for one in collated.outcomes if one]
    named.metadata = {**batch.metadata, **names, **(batch.metadata if keep else {})}
    return named
