"""A warning of a long wait: for which batch, for which worker, and where the thread is."""

from __future__ import annotations

import logging
import math
import numbers
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from torch_collate_kit.loading.prefetch.workers import PATIENCE, is_collecting

_logger = logging.getLogger("torch_collate_kit.loading")
_MOST_SECONDS = 1e6  # at a time: a lock cannot wait for as long as one likes


class _Wait(NamedTuple):
    epoch: int
    step: int
    began: float
    thread: int


class Watchdog:
    """Logs one warning for each wait that is longer than ``warn_after`` seconds; None: never.

    Its thread ends with ``stop``, or when nobody has the watchdog any more. ``collating`` is the
    identifier of the thread that builds batches, which sets it.
    """

    def __init__(self, warn_after: float | None) -> None:
        self.collating = 0
        self._wait: _Wait | None = None
        self._reported: _Wait | None = None
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

    @contextmanager
    def waiting(self, epoch: int, step: int) -> Iterator[None]:
        """Record that this thread waits for a batch."""
        self._wait = _Wait(epoch, step, time.perf_counter(), threading.get_ident())
        try:
            yield
        finally:
            self._wait = None

    def stop(self) -> None:
        """End the thread and wait for its end."""
        self._release()
        is_own = self._thread is threading.current_thread()
        if self._thread is not None and not is_own and not is_collecting():
            self._thread.join()

    def report_abandoned(self, epoch: int, step: int) -> None:
        """Log that nobody waits for the batch that is being built."""
        worker, stack = _place(self.collating)
        outcome = "the prefetch thread ends after that batch, or with the process"
        if worker is not None:
            outcome = f"it was to come from {worker}, which is killed"
        _logger.warning(
            "PrefetchLoader is closed while step %d of epoch %d is being built, which takes more "
            "than %g s, and abandons it: %s. Stack of the prefetch thread:\n%s",
            *(step, epoch, PATIENCE, outcome, stack),
        )

    def look(self, warn_after: float) -> float:
        """Report a wait that takes too long, once. Return the seconds until the next look."""
        wait = self._wait
        if wait is None or wait is self._reported:
            return warn_after
        seconds = time.perf_counter() - wait.began
        if seconds < warn_after:
            return warn_after - seconds
        self._reported = wait
        worker, stack = _place(self.collating)
        is_own = self.collating == wait.thread
        thread = "the thread of the training loop" if is_own else "the prefetch thread"
        _logger.warning(
            "PrefetchLoader has waited %.3g s for step %d of epoch %d, and waits on: the batch is "
            "%s. Stack of %s:\n%s",
            *(seconds, wait.step, wait.epoch),
            f"being collated in {thread}" if worker is None else f"to come from {worker}",
            *(thread, stack),
        )
        return warn_after


def _watch(watchdog: weakref.ref[Watchdog], end: Any, warn_after: float) -> None:
    """Look from time to time. It keeps nothing alive while it sleeps."""
    seconds = warn_after
    while not end.acquire(timeout=min(seconds, _MOST_SECONDS)):
        looking = watchdog()
        try:
            seconds = warn_after if looking is None else looking.look(warn_after)
        except Exception:  # of a logging handler: its message is lost, and the watch goes on
            traceback.print_exc()
            seconds = warn_after
        del looking


def _place(thread: int) -> tuple[str | None, str]:
    """Return the worker that a thread waits for, if there is one, and the stack of the thread."""
    frame = sys._current_frames().get(thread)
    stack = "".join(traceback.format_stack(frame)).rstrip() if frame else "  it has ended"
    return _worker_waited_for(frame), stack


def _worker_waited_for(frame: FrameType | None) -> str | None:
    """Describe the worker that a thread waits for, by private attributes of torch's iterator."""
    while frame is not None and frame.f_code.co_name != "_get_data":
        frame = frame.f_back
    batches = None if frame is None else frame.f_locals.get("self")
    workers = getattr(batches, "_workers", None)
    if not isinstance(workers, list):
        return None
    task = getattr(batches, "_task_info", {}).get(getattr(batches, "_rcvd_idx", None))
    if not isinstance(task, tuple) or task[0] not in range(len(workers)):
        return f"one of {len(workers)} DataLoader workers"
    worker = workers[task[0]]
    found = f"DataLoader worker {task[0]} of {len(workers)} (pid {worker.pid}"
    if not worker.is_alive():
        return f"{found}, dead)"
    return f"{found}, alive; `py-spy dump --pid {worker.pid}` shows where it is)"


def checked_seconds(name: str, seconds: Any) -> float | None:
    """Check that it is a positive number of seconds, or None."""
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real):
        raise TypeError(f"{name} must be a number of seconds or None, got {seconds!r}")
    if not 0 < float(seconds) < math.inf:
        raise ValueError(f"{name} must be more than 0 seconds, got {seconds!r}; None is never")
    return float(seconds)
