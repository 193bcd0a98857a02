"""A test that hangs fails, with the line it hangs in, instead of holding up the suite."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

GUARD_SECONDS = 300  # the longest test takes ten, and a busy machine has few of them


@contextmanager
def fails_when_it_hangs(seconds: float = GUARD_SECONDS) -> Iterator[None]:
    """Raises in the main thread, also out of a lock that it waits for."""

    def too_late(number: int, frame: object) -> None:
        raise TimeoutError(f"the test hung for {seconds} s")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupt_main_thread() -> None:
    """Ctrl-C, as the terminal does it."""
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


def once_main_thread_waits(action: Callable[[], object]) -> threading.Thread:
    """A thread that does ``action`` when the main thread waits for something of another one."""

    def watch() -> None:
        num_seen = 0
        while num_seen < 5:  # in a row: frames may change while one looks at them
            time.sleep(0.001)
            num_seen = num_seen + 1 if _main_thread_waits() else 0
        action()

    thread = threading.Thread(target=watch, daemon=True)  # for ever, if it never waits
    thread.start()
    return thread


def _main_thread_waits() -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident)
    if frame is None or frame.f_code is not threading.Condition.wait.__code__:
        return False
    while frame is not None and frame.f_code is not threading.Thread.start.__code__:
        frame = frame.f_back
    return frame is None  # else it only waits until a thread has started


def our_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("torch_collate_kit")]
