"""Waits: a warning of a long one, and the end of worker processes within a bounded time."""

from __future__ import annotations

import gc
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

import torch

_logger = logging.getLogger("torch_collate_kit.loading")
PATIENCE = 0.8
"""Seconds that leaving a loop, and ``close``, wait for what is in flight."""
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


# ---- the end of waits ----

_collector = 0  # the thread in which Python collects cycles now


def _note_collection(phase: str, info: object) -> None:
    global _collector
    _collector = threading.get_ident() if phase == "start" else 0


gc.callbacks.append(_note_collection)


def is_collecting() -> bool:
    """Return whether Python's cycle collector is the caller: it must not wait for anything."""
    return _collector == threading.get_ident()


def end_workers(batches: Any, seconds: float) -> None:
    """Ask the workers of a DataLoader's iterator to end; kill those that need more seconds.

    Torch would wait five seconds for each. With 0 they are not asked, and no lock is taken. One
    that dies meanwhile is no error, so torch's handler of SIGCHLD, which would raise it, is told.
    """
    if getattr(batches, "_shutdown", True):  # without workers it has no such attribute
        return
    batches._shutdown = True
    if getattr(batches, "_worker_pids_set", False):
        torch._C._remove_worker_pids(id(batches))
        batches._worker_pids_set = False
    try:
        if seconds and not is_collecting():
            deadline = time.monotonic() + seconds
            ending = list(batches._workers)
            # in torch's order: first the thread that pins batches, which reads the queue of
            # results, where a worker that ends may leave half a batch
            if hasattr(batches, "_pin_memory_thread"):
                batches._pin_memory_thread_done_event.set()
                batches._worker_result_queue.put((None, None))
                ending.insert(0, batches._pin_memory_thread)
            batches._workers_done_event.set()
            for queue in batches._index_queues:
                queue.put(None)
            for one in ending:
                one.join(max(0.0, deadline - time.monotonic()))
            for queue in batches._index_queues:
                queue.cancel_join_thread()
                queue.close()
    finally:
        alive = [worker for worker in batches._workers if worker.is_alive()]
        for worker in alive:
            worker.kill()
        for worker in alive:
            worker.join(PATIENCE)
