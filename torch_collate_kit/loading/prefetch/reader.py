"""The one reader of a loader: idle, or reading an epoch a batch ahead; its consumer's position."""

from __future__ import annotations

import copy
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.prefetch.async_collator import AsyncBatchCollator
from torch_collate_kit.loading.prefetch.device_copy import DeviceCopy
from torch_collate_kit.loading.prefetch.resumable_loaders import LoaderPosition, ResumableLoader
from torch_collate_kit.loading.prefetch.skipped_examples import Collated, SkippedExamples
from torch_collate_kit.loading.prefetch.watchdog import Watchdog
from torch_collate_kit.loading.prefetch.workers import PATIENCE, is_collecting

END: Any = object()
T = TypeVar("T")
_Times: TypeAlias = tuple[float, float, float]  # at which a batch was begun, collated, copied


class Stand(NamedTuple):
    """The consumer's position. Replaced as a whole: a signal handler may ask at any moment."""

    position: LoaderPosition | None
    """After the batches received. None: nothing is read, and the loader itself stands there."""
    skipped: SkippedExamples
    reading: object
    """Another one after whatever moves the loader, but for a batch that is received."""


class Taken(NamedTuple):
    """A batch, or END, and where the consumer stands once it has received it."""

    batch: Any
    position: LoaderPosition
    stand: Stand
    times: _Times


class Run:
    """An epoch that is being read; its collator holds the batch after those taken, or none."""

    def __init__(
        self,
        loader: ResumableLoader,
        to_device: DeviceCopy | None,
        warn_after: float | None,
        epoch: int,
    ) -> None:
        # workers are forked here: in the consumer's thread, while no other one runs
        self.num_steps, batches = loader.begin()
        self.has_ended = False
        self.watchdog = Watchdog(warn_after)
        # not a method: the thread would keep this object alive
        build = partial(_build, loader, batches, to_device, epoch, self.watchdog)
        self.collator = AsyncBatchCollator(build)
        self.end_lost = weakref.finalize(self, _end_lost_workers, loader, os.getpid())
        self.end_lost.atexit = False

    def is_over(self, position: LoaderPosition) -> bool:
        """Return whether a consumer at this position has received the whole epoch."""
        has_all = self.num_steps is not None and position.step >= self.num_steps
        return has_all or self.has_ended


class Reader:
    """Reads a loader for one consumer, whose thread calls all but ``answer`` and ``close``.

    ``begin`` makes it read. It is idle, without ``run``, after ``stop`` and ``close``, and after
    ``leave`` unless a batch is late. The consumer assigns ``stand`` when it receives a batch.
    """

    def __init__(
        self,
        loader: ResumableLoader,
        to_device: DeviceCopy | None,
        prefetch: bool,
        warn_after: float | None,
        skipped: SkippedExamples,
    ) -> None:
        self._loader, self.to_device, self.prefetch = loader, to_device, prefetch
        self.warn_after = warn_after
        self.stand = Stand(None, skipped, object())
        self.run: Run | None = None
        self.pid = 0  # of the process that reads, or that has read last

    def answer(self, ask: Callable[[LoaderPosition, SkippedExamples], T]) -> T:
        """Ask about the position after the batches received so far; any thread, at any moment."""
        while True:  # asked again where the consumer moves the loader meanwhile
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
        known = None if self.run is None else self.run.num_steps
        return self._loader.num_steps() if known is None else known

    def is_elsewhere(self) -> bool:
        """Return whether this is a fork: the parent process has the thread and workers."""
        is_in_use = self.run is not None or self._loader.has_workers()
        return is_in_use and self.pid != os.getpid()

    def begin(self, on_epoch: Callable[[int], object] | None) -> Run:
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
        self.run = Run(self._loader, self.to_device, self.warn_after, position.epoch)
        return self.run

    def take(self, run: Run) -> Taken:
        """Return the next batch, or END, and begin to build the one after it."""
        position, skipped, reading = self.stand
        assert position is not None, "an epoch is being read"
        epoch, step, _ = position
        self._loader.check(epoch)
        with run.watchdog.waiting(epoch, step):
            (batch, outcomes), mark, times = run.collator.get(step)
        if run.num_steps is not None and (batch is END) != (step >= run.num_steps):
            raise StateError(
                f"epoch {epoch} has {run.num_steps} steps, but the loader yields "
                f"{'fewer' if batch is END else 'more'}; len(batch_sampler) must be what its "
                "iter() yields"
            )
        if batch is END:
            run.has_ended = True
            return Taken(END, position, self.stand, times)
        skipped = skipped.with_batch(epoch, step, outcomes)
        if self.prefetch and step + 1 != run.num_steps:
            run.collator.submit(step + 1)
        if self.to_device is not None:
            batch = self.to_device.receive(batch)
        following = LoaderPosition(epoch, step + 1, mark)
        return Taken(batch, following, Stand(following, skipped, reading), times)

    def stop_if_over(self) -> None:
        """Stop where the next batch is not in this run."""
        run, position = self.run, self.stand.position  # an interrupt may have lost what was taken
        if run and position and (run.is_over(position) or not run.collator._holds(position.step)):
            self.stop()

    def leave(self) -> bool:
        """Drop what is in flight; False: it is late, and kept for the next loop."""
        is_done = not is_collecting() and self.settled(PATIENCE)
        if is_done:
            self.stop()
        return is_done

    def settled(self, seconds: float | None) -> bool:
        """Wait at most so long for a batch in flight; None: for ever. False: it is, or no run."""
        run, position = self.run, self.stand.position
        if run is None or position is None or self.is_elsewhere():
            return False
        with run.watchdog.waiting(position.epoch, position.step):
            return run.collator._settled(seconds)

    def stop(self, *, move_back: bool = True) -> None:
        """Wait for what is in flight, and drop it. The loader then stands at the position."""
        run, position = self.run, self.stand.position
        if run is None or position is None or self.is_elsewhere():
            return
        self.settled(None)
        self.run = None
        if move_back:
            self._move_back(run, position)
        run.end_lost.detach()
        try:
            run.watchdog.stop()
            run.collator.shutdown()
        finally:
            self._loader.end()

    def close(self) -> None:
        """Wait a bounded time for what is in flight, and abandon it if it is late."""
        run, position = self.run, self.stand.position
        if run is None or position is None or self.leave():
            return
        self._loader.is_closed = True  # before: then the thread leaves all as it is
        self.run = None
        self._move_back(run, position)
        if not is_collecting():
            run.watchdog.report_abandoned(position.epoch, position.step)
        run.collator._abandon()
        run.end_lost()
        run.watchdog.stop()

    def _move_back(self, run: Run, position: LoaderPosition) -> None:
        if run.is_over(position):
            self._loader.end_epoch(position.epoch)
        else:
            self._loader.move_to(position)
        self._stand_at(None, self.stand.skipped)

    @contextmanager
    def moving(self, skipped: SkippedExamples | None = None) -> Iterator[None]:
        """Hold the position while the loader is moved; it stays if that fails."""
        before = self.stand
        position = self._loader.position() if before.position is None else before.position
        self._stand_at(self._loader.pinned(position), before.skipped)
        try:
            yield
        except BaseException:
            self.stand = before
            raise
        self._stand_at(None, before.skipped if skipped is None else skipped)

    def _stand_at(self, position: LoaderPosition | None, skipped: SkippedExamples) -> None:
        self.stand = Stand(position, skipped, object())


def _end_lost_workers(loader: ResumableLoader, pid: int) -> None:
    """End the workers of a run that nobody has any more. The collector may call it."""
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
) -> tuple[Collated, Any, _Times]:
    """Build the next batch, that of ``step``; return it with the mark after it, or END."""
    watchdog.collating = threading.get_ident()
    began = time.perf_counter()
    batch = next(batches, END)
    ended = copied = time.perf_counter()
    collated = batch if isinstance(batch, Collated) else Collated(batch)
    if batch is END or loader.is_closed:  # closed: the thread was abandoned, and touches nothing
        return collated, None, (began, ended, copied)
    mark = loader.mark()
    batch = _named(collated, epoch, step, keep=not loader.has_sampler)
    if to_device is not None:
        batch = to_device.send(batch)
        copied = time.perf_counter()
    return collated._replace(batch=batch), mark, (began, ended, copied)


def _named(collated: Collated, epoch: int, step: int, *, keep: bool) -> Any:
    """Return a Batch with its epoch, step and skipped examples in its metadata; others as is."""
    batch, outcomes = collated
    if not isinstance(batch, Batch):
        return batch
    named = copy.copy(batch)  # a collate function may keep its own
    names: dict[str, Any] = {"epoch": epoch, "step": step}
    if skipped := [of.example for of in outcomes if of]:
        names["skipped"] = skipped
    named.metadata = {**batch.metadata, **names, **(batch.metadata if keep else {})}
    return named
