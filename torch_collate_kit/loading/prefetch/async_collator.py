"""One batch ahead: the next one is built on a thread while this one trains.

AsyncBatchCollator is the slot for that batch; ReadAhead reads an epoch of a loader through it.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from torch_collate_kit._reprs import Shown, call_repr
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.prefetch.device_copy import DeviceCopy
from torch_collate_kit.loading.prefetch.positioned import LoaderPosition
from torch_collate_kit.loading.prefetch.resumable_loaders import ResumableLoader
from torch_collate_kit.loading.prefetch.skipped_examples import Collated, SkippedExamples
from torch_collate_kit.loading.prefetch.waits import BuildTimes, Watchdog

__all__ = ["END", "AsyncBatchCollator", "ReadAhead"]

T = TypeVar("T")

END: Any = object()


class _Slot(NamedTuple):
    """The one batch that is being built, or that waits to be taken."""

    step: int
    future: Future[Any]


class AsyncBatchCollator(Generic[T]):
    """A double buffer with a single slot: ``submit(step)`` builds ahead, ``get(step)`` takes.

    Args:
        compute: builds the batch of a step. It runs on one background thread after ``submit``, in
            the caller's thread in a ``get`` without one, and never twice at the same time.

    A batch is given out only for the step that it was built for. All methods are for one consumer
    thread. The background thread starts with the first ``submit`` and ends with ``shutdown``, which
    leaving the ``with`` block calls. In a forked process the batch in the slot is refused, and
    ``clear`` and ``shutdown`` drop it without waiting.

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
        self._executor: ThreadPoolExecutor | None = None
        self._pid = 0  # of the process that has the executor's thread
        self._is_shut_down = False

    def __repr__(self) -> str:
        slot = self._slot
        if self._is_shut_down:
            state = "shut down"
        elif slot is None:
            state = "empty"
        else:
            state = f"{'holds' if slot.future.done() else 'builds'} step {slot.step}"
        return f"{call_repr(self, repr(Shown(self._compute)))} [{state}]"

    def submit(self, step: int) -> None:
        """Starts building the batch of ``step`` on the thread."""
        self._check_open("submit", step)
        if self._slot is not None:
            raise StateError(
                f"submit({step}) while the slot holds step {self._slot.step}; there is one slot: "
                f"get({self._slot.step}) takes the batch, clear() drops it"
            )
        if self._executor is None or self._pid != os.getpid():
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="torch_collate_kit")
            self._pid = os.getpid()
        future: Future[T] = Future()
        self._slot = _Slot(step, future)  # first: no batch is ever built unnoticed
        try:
            self._executor.submit(_compute_into, future, self._compute, step)
        except BaseException:  # Ctrl-C in here: either the thread has begun, or it never will
            if future.cancel():
                self._slot = None
            raise

    def get(self, step: int) -> T:
        """The batch of ``step``. Waits for it if it was submitted, otherwise builds it now.

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
        """Waits until nothing is being built, and empties the slot.

        An exception of the dropped batch is dropped too, unless it is no ``Exception``
        (``KeyboardInterrupt``, ``SystemExit``). In a forked process it does not wait.
        """
        error = None
        if self._slot is not None and self._pid == os.getpid():
            self._is_clearing = True
            error = self._slot.future.exception()  # waits
        self._slot, self._is_clearing = None, False
        if error is not None and not isinstance(error, Exception):
            raise error

    def shutdown(self) -> None:
        """``clear()``, then ends the thread, even if ``clear`` raises. May be called again."""
        self._is_shut_down = True
        try:
            self.clear()
        finally:
            if self._executor is not None and self._pid == os.getpid():
                self._executor.shutdown(wait=True)

    def __enter__(self) -> AsyncBatchCollator[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

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
    """What the thread does for a step."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(compute(step))
    except BaseException as error:
        future.set_exception(error)
        del future  # or the error's traceback would keep itself alive


class _Built(NamedTuple):
    """A batch on its way to its device, or END, and what there is to know of it."""

    collated: Collated
    mark: Any  # of the position after it
    times: BuildTimes


class ReadAhead:
    """One reading of an epoch. ``position`` is after the batch that the consumer received last."""

    def __init__(
        self,
        loader: ResumableLoader,
        to_device: DeviceCopy | None,
        *,
        prefetch: bool,
        warn_after: float | None,
        skipped: SkippedExamples,
    ) -> None:
        position = loader.position()
        # workers are forked here: in the consumer's thread, while no other one runs
        self.num_steps, batches = loader.begin()
        self.position = position._replace(mark=loader.mark())
        self._loader, self._to_device, self._prefetch = loader, to_device, prefetch
        self._skipped = skipped
        self._has_ended = False
        self._watchdog = Watchdog(warn_after)
        # not a method: the thread would keep this object alive
        build = partial(_build, loader, batches, to_device, position.epoch, self._watchdog)
        self._collator = AsyncBatchCollator(build)

    @property
    def is_over(self) -> bool:
        """Whether the consumer has received the whole epoch."""
        has_all = self.num_steps is not None and self.position.step >= self.num_steps
        return has_all or self._has_ended

    def take(self) -> tuple[Any, BuildTimes]:
        """The next batch, or END, and its times; the one after it is then on its way."""
        epoch, step, _ = self.position
        self._loader.check(epoch)
        self._watchdog.wait_begins(epoch, step)
        try:
            built: _Built = self._collator.get(step)
        finally:
            self._watchdog.wait_ends()
        batch = built.collated.batch
        if self.num_steps is not None and (batch is END) != (step >= self.num_steps):
            raise StateError(
                f"epoch {epoch} has {self.num_steps} steps, but the loader yields "
                f"{'fewer' if batch is END else 'more'}; len(batch_sampler) must be what its "
                "iter() yields"
            )
        if batch is END:
            self._has_ended = True
            return END, built.times
        self._skipped.add(epoch, step, built.collated)
        following = LoaderPosition(epoch, step + 1, built.mark)
        if self._prefetch and following.step != self.num_steps:
            self._collator.submit(following.step)
        if self._to_device is not None:
            batch = self._to_device.receive(batch)
        self.position = following
        return batch, built.times

    def stop(self) -> None:
        """Drops what is in flight, and ends the threads and workers."""
        try:
            self._watchdog.stop()
            self._collator.shutdown()
        finally:
            self._loader.end()


def _build(
    loader: ResumableLoader,
    batches: Iterator[Any],
    to_device: DeviceCopy | None,
    epoch: int,
    watchdog: Watchdog,
    step: int,
) -> _Built:
    """The next batch, which comes from the loader's iterator."""
    watchdog.collating = threading.get_ident()
    began = time.perf_counter()
    batch = next(batches, END)
    ended = copied = time.perf_counter()
    collated = batch if isinstance(batch, Collated) else Collated(batch)
    if batch is END:
        return _Built(collated, None, BuildTimes(began, ended, copied))
    mark = loader.mark()
    batch = _named(collated, epoch, step, keep=not loader.has_sampler)
    if to_device is not None:
        batch = to_device.send(batch)
        copied = time.perf_counter()
    return _Built(collated._replace(batch=batch), mark, BuildTimes(began, ended, copied))


def _named(collated: Collated, epoch: int, step: int, *, keep: bool) -> Any:
    """A Batch with its epoch and step in its metadata, and what it is without; others as is."""
    batch = collated.batch
    if not isinstance(batch, Batch):
        return batch
    named = copy.copy(batch)  # a collate function may keep its own
    names: dict[str, Any] = {"epoch": epoch, "step": step}
    if collated.failed:
        names["skipped"] = [failed.example for failed in collated.failed]
    named.metadata = {**batch.metadata, **names, **(batch.metadata if keep else {})}
    return named
