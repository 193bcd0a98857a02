"""How long a loader's consumer waits: the times of its steps, and a warning of a long wait.

Both show what prefetching does not hide. The times are those of batches that have come; the warning
says what a batch that does not come is waiting for: the step, the worker, the stack.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from torch_collate_kit.loading.prefetch.workers import PATIENCE, is_collecting

__all__ = [
    "BuildTimes",
    "StepTimes",
    "Timeline",
    "Watchdog",
    "checked_seconds",
]

_logger = logging.getLogger("torch_collate_kit.loading")
_MOST_STEPS = 1000
_MOST_SECONDS = 1e6  # at a time: a lock cannot wait for as long as one likes


class BuildTimes(NamedTuple):
    """When a batch was built, by ``time.perf_counter()``."""

    began: float
    collated: float
    copied: float


class StepTimes(NamedTuple):
    """The times of one batch, in seconds of ``time.perf_counter()``.

    A batch that was built ahead began before it was asked for; otherwise the consumer waited for
    all of it.

    >>> step = StepTimes(0, 3, 1.0, 1.5, 1.6, 1.4, 1.6, 2.0)
    >>> step.was_ahead, round(step.build_seconds, 1), round(step.wait_seconds, 1)
    (True, 0.6, 0.2)
    """

    epoch: int
    step: int
    collate_began: float
    """When the next batch was asked of the DataLoader: collation, or waiting for a worker."""
    collate_ended: float
    copy_ended: float
    """When it had been sent to the device; without one, when it was collated. On CUDA the copy
    itself may end later, without anybody waiting for it here."""
    wait_began: float
    """When the consumer asked for it."""
    wait_ended: float
    train_ended: float | None
    """When the consumer asked for the next one, or left its loop; None until then."""

    @property
    def build_seconds(self) -> float:
        """Collation and copy."""
        return self.copy_ended - self.collate_began

    @property
    def wait_seconds(self) -> float:
        """What the consumer waited."""
        return self.wait_ended - self.wait_began

    @property
    def was_ahead(self) -> bool:
        """Whether building began before the consumer asked."""
        return self.collate_began < self.wait_began


class Timeline:
    """The times of the last steps. Written by the consumer's thread, read by any.

    A step is a list until somebody asks: making a StepTimes twice would cost more than all else.
    """

    def __init__(self) -> None:
        self._steps: deque[list[Any]] = deque(maxlen=_MOST_STEPS)
        self._last: list[Any] | None = None  # that is being trained on

    def received(
        self, epoch: int, step: int, built: BuildTimes, wait_began: float, wait_ended: float
    ) -> None:
        """The consumer has the batch of ``step`` now."""
        self._last = [epoch, step, built, wait_began, wait_ended, None]
        self._steps.append(self._last)

    def trained(self) -> None:
        """The consumer is done with the last batch that it has received."""
        if self._last is not None:
            self._last[-1] = time.perf_counter()
            self._last = None

    def steps(self) -> list[StepTimes]:
        """Oldest first. Copying a deque is one operation, which no append interrupts."""
        return [
            StepTimes._make((epoch, step, *built, *waited))
            for epoch, step, built, *waited in self._steps.copy()
        ]


class _Wait(NamedTuple):
    """For which batch the consumer waits, since when, and in which thread it does."""

    epoch: int
    step: int
    began: float
    thread: int


class Watchdog:
    """Logs one warning for each wait that is longer than ``warn_after`` seconds; None: never.

    A second thread must look at the clock, since the one that waits may be deep in somebody's code.
    It sleeps for ``warn_after`` seconds at a time, so a step costs two assignments. It ends with
    ``stop``, or when nobody has the watchdog any more. A forked process has none.
    ``collating`` is the identifier of the thread that collates or waits for a worker; whoever
    builds batches sets it.
    """

    def __init__(self, warn_after: float | None) -> None:
        self.collating = 0
        self._wait: _Wait | None = None
        self._told: _Wait | None = None
        end = threading.Lock()  # released to end the thread; an Event might stay locked
        end.acquire()
        self._release = weakref.finalize(self, end.release)
        self._release.atexit = False
        self._thread: threading.Thread | None = None
        if warn_after is not None:
            arguments = (weakref.ref(self), end, warn_after)
            name = "torch_collate_kit watchdog"
            self._thread = threading.Thread(target=_watch, args=arguments, name=name, daemon=True)
            self._thread.start()

    def wait_begins(self, epoch: int, step: int) -> None:
        """The consumer, whose thread calls this, now waits for a batch."""
        self._wait = _Wait(epoch, step, time.perf_counter(), threading.get_ident())

    def wait_ends(self) -> None:
        """It has the batch, or an error."""
        self._wait = None

    def stop(self) -> None:
        """Ends the thread and waits for its end."""
        self._release()
        is_own = self._thread is threading.current_thread()
        if self._thread is not None and not is_own and not is_collecting():
            self._thread.join()

    def abandons(self, epoch: int, step: int) -> None:
        """Log that nobody waits for the batch that is being built."""
        frame = sys._current_frames().get(self.collating)
        worker = _worker_waited_for(frame)
        _logger.warning(
            "PrefetchLoader is closed while step %d of epoch %d is being built, which takes more "
            "than %g s, and abandons it: %s. Stack of the prefetch thread:\n%s",
            *(step, epoch, PATIENCE),
            f"it was to come from {worker}, which is killed"
            if worker
            else "the prefetch thread ends after that batch, or with the process",
            _stack(frame),
        )

    def look(self, warn_after: float) -> float:
        """Says what takes too long, once. Returns the seconds until the next look."""
        wait = self._wait
        if wait is None or wait is self._told:
            return warn_after
        seconds = time.perf_counter() - wait.began
        if seconds < warn_after:
            return warn_after - seconds
        self._told = wait
        _logger.warning("%s", _report(wait, seconds, self.collating))
        return warn_after


def _watch(watchdog: weakref.ref[Watchdog], end: Any, warn_after: float) -> None:
    """What the thread does: it keeps nothing alive while it sleeps."""
    seconds = warn_after
    while not end.acquire(timeout=min(seconds, _MOST_SECONDS)):
        seconds = _look(watchdog, warn_after)


def _look(watchdog: weakref.ref[Watchdog], warn_after: float) -> float:
    looking = watchdog()
    try:
        return warn_after if looking is None else looking.look(warn_after)
    except Exception:  # of a logging handler: what it says is lost, and the watch goes on
        traceback.print_exc()
        return warn_after


def _report(wait: _Wait, seconds: float, collating: int) -> str:
    frame = sys._current_frames().get(collating)
    is_own = collating == wait.thread
    thread = "the thread of the training loop" if is_own else "the prefetch thread"
    worker = _worker_waited_for(frame)
    doing = f"is being collated in {thread}" if worker is None else f"is to come from {worker}"
    return (
        f"PrefetchLoader has waited {seconds:.3g} s for step {wait.step} of epoch {wait.epoch}, "
        f"and waits on: the batch {doing}. Stack of {thread}:\n{_stack(frame)}"
    )


def _stack(frame: FrameType | None) -> str:
    return "".join(traceback.format_stack(frame)).rstrip() if frame else "  it has ended"


def _worker_waited_for(frame: FrameType | None) -> str | None:
    """The worker that a thread waits for, if it stands in a DataLoader's wait for its workers."""
    while frame is not None and frame.f_code.co_name != "_get_data":
        frame = frame.f_back
    batches = None if frame is None else frame.f_locals.get("self")
    workers = getattr(batches, "_workers", None)
    return _described_worker(batches, workers) if isinstance(workers, list) else None


def _described_worker(batches: Any, workers: list[Any]) -> str:
    """By the attributes of torch's and torchdata's iterators, which are private."""
    task = getattr(batches, "_task_info", {}).get(getattr(batches, "_rcvd_idx", None))
    if not isinstance(task, tuple) or task[0] not in range(len(workers)):
        return f"one of {len(workers)} DataLoader workers"
    worker = workers[task[0]]
    pid = getattr(worker, "pid", None)
    said = f"DataLoader worker {task[0]} of {len(workers)} (pid {pid}"
    if not worker.is_alive():
        return f"{said}, dead)"
    return f"{said}, alive; `py-spy dump --pid {pid}` shows where it is)"


def checked_seconds(name: str, seconds: Any) -> float | None:
    """A positive number of seconds, or None."""
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a number of seconds or None, got {seconds!r}")
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name} must be more than 0 seconds, got {seconds!r}; None is never")
    return float(seconds)
