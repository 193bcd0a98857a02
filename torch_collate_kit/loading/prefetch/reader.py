"""The one reader of a loader: idle, or reading an epoch; and the position of its consumer.

``begin`` makes it read. It is idle again after ``stop`` and ``close``, and after ``leave`` unless a
batch is late.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from torch_collate_kit.loading.prefetch.positioned import LoaderPosition
from torch_collate_kit.loading.prefetch.read_ahead import ReadAhead, Taken
from torch_collate_kit.loading.prefetch.resumable_loaders import ResumableLoader
from torch_collate_kit.loading.prefetch.skipped_examples import SkippedExamples
from torch_collate_kit.loading.prefetch.workers import PATIENCE, is_collecting

__all__ = ["Reader", "Stand"]

T = TypeVar("T")


class Stand(NamedTuple):
    """The consumer's position. Replaced as a whole: a signal handler may ask at any moment."""

    position: LoaderPosition | None
    """After the batches received. None: nothing is read, and the loader itself stands there."""
    skipped: SkippedExamples
    reading: object
    """Another one after whatever moves the loader, but for a batch that is received."""


class Reader:
    """Reads a loader for one consumer, whose thread calls all but ``answer`` and ``close``.

    ``run`` is the epoch that is being read, made by ``start(epoch)``; ``stand`` is assigned by the
    consumer when it receives a batch.
    """

    def __init__(
        self, loader: ResumableLoader, start: Callable[[int], ReadAhead], skipped: SkippedExamples
    ) -> None:
        self._loader, self._start = loader, start
        self.stand = Stand(None, skipped, object())
        self.run: ReadAhead | None = None
        self.pid = 0  # of the process that reads, or that has read last

    def answer(self, ask: Callable[[LoaderPosition, SkippedExamples], T]) -> T:
        """Ask about the position after the batches received so far; any thread, at any moment.

        Where the consumer moves the loader meanwhile, the question is asked again.
        """
        while True:
            position, skipped, reading = self.stand
            try:
                answer = ask(self._loader.position() if position is None else position, skipped)
            except Exception:
                if self.stand.reading is reading:
                    raise
            else:
                if self.stand.reading is reading:
                    return answer

    def num_steps(self) -> int | None:
        """Return the number of steps in the current epoch; None until a stream has ended."""
        run = self.run
        return self._loader.num_steps() if run is None else run.num_steps

    def is_elsewhere(self) -> bool:
        """Return whether this is a fork: the parent process has the thread and workers."""
        is_in_use = self.run is not None or self._loader.has_workers()
        return is_in_use and self.pid != os.getpid()

    def take(self, run: ReadAhead) -> Taken:
        """Return the next batch, or END. The consumer assigns ``stand`` when it receives it."""
        position, skipped, _ = self.stand
        assert position is not None, "an epoch is being read"
        return run.take(position, skipped)

    def begin(self, on_epoch: Callable[[int], object] | None) -> ReadAhead:
        """Begin to read the epoch of the consumer's position."""
        position, skipped, _ = self.stand
        if position is not None:  # an interrupt came before the loader was moved there
            self._loader.move_to(position)
            self._stand_at(None, skipped)
        position = self._loader.position()
        if on_epoch is not None and position.step == 0:
            on_epoch(position.epoch)
            position = self._loader.position()
        self._stand_at(position, skipped)
        self.pid = os.getpid()
        self.run = self._start(position.epoch)
        return self.run

    def stop_if_over(self) -> None:
        """Stop where the next batch is not in this reading.

        The epoch is over, or an interrupt has lost the batch that was handed over.
        """
        run, position = self.run, self.stand.position
        if run and position and (run.is_over(position) or not run.goes_on_at(position)):
            self.stop()

    def leave(self) -> None:
        """Drop what is in flight, or keep it for the next loop if it is late.

        Often an exception leaves a loop, and is shown after this. The garbage collector waits for
        nothing.
        """
        if not is_collecting() and self.settled(PATIENCE):
            self.stop()

    def settled(self, seconds: float | None) -> bool:
        """Wait at most so long for what is in flight; None: for ever. Return whether nothing is.

        False where nothing is read here.
        """
        run, position = self.run, self.stand.position
        if run is None or position is None or self.is_elsewhere():
            return False
        return run.settled(position, seconds)

    def stop(self, *, move_back: bool = True) -> None:
        """Wait for what is in flight, and drop it. The loader then stands at the position."""
        run, position = self.run, self.stand.position
        if run is not None and position is not None and not self.is_elsewhere():
            run.settled(position, None)
            self.run = None
            if move_back:
                self._move_back(run, position)
            run.stop()

    def close(self) -> None:
        """Wait a bounded time for what is in flight, and abandon it if it is late."""
        run, position = self.run, self.stand.position
        if run is None or position is None:
            return
        if not is_collecting() and self.settled(PATIENCE):
            self.stop()
            return
        self._loader.is_closed = True  # before: then the thread leaves all as it is
        self.run = None
        self._move_back(run, position)
        run.abandon(position)

    def _move_back(self, run: ReadAhead, position: LoaderPosition) -> None:
        if run.is_over(position):
            self._loader.end_epoch(position.epoch)
        else:
            self._loader.move_to(position)
        self._stand_at(None, self.stand.skipped)

    @contextmanager
    def moving(self, skipped: SkippedExamples | None = None) -> Iterator[None]:
        """Hold the position while the loader is moved; it stays if that fails."""
        before = self.stand
        self._stand_at(self._loader.pinned(before.position), before.skipped)
        try:
            yield
        except BaseException:
            self.stand = before
            raise
        self._stand_at(None, before.skipped if skipped is None else skipped)

    def _stand_at(self, position: LoaderPosition | None, skipped: SkippedExamples) -> None:
        self.stand = Stand(position, skipped, object())
