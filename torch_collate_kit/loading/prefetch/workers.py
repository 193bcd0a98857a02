"""The end of a DataLoader's worker processes, within a bounded time."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import torch

PATIENCE = 0.8
"""Seconds that leaving a loop, and ``close``, wait for what is in flight."""

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
