"""A test that hangs fails, with the line it hangs in, instead of holding up the suite."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

GUARD_SECONDS = 60


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


def our_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("torch_collate_kit")]
