"""One reading of an epoch, a batch ahead of the consumer where that is wanted."""

from __future__ import annotations

import copy
import os
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.prefetch.async_collator import AsyncBatchCollator
from torch_collate_kit.loading.prefetch.device_copy import DeviceCopy
from torch_collate_kit.loading.prefetch.positioned import LoaderPosition
from torch_collate_kit.loading.prefetch.resumable_loaders import ResumableLoader
from torch_collate_kit.loading.prefetch.skipped_examples import Collated, SkippedExamples
from torch_collate_kit.loading.prefetch.step_times import BuildTimes
from torch_collate_kit.loading.prefetch.watchdog import Watchdog
from torch_collate_kit.loading.prefetch.workers import is_collecting

__all__ = ["END", "ReadAhead", "Taken"]

END: Any = object()


class _Built(NamedTuple):
    collated: Collated  # its batch on its way to its device, or END
    mark: Any  # of the position after it
    times: BuildTimes


class Taken(NamedTuple):
    """A batch, or END, and the position of the consumer once it has received it."""

    batch: Any
    position: LoaderPosition
    skipped: SkippedExamples
    times: BuildTimes


class ReadAhead:
    """One reading of an epoch, from the loader's position. Made in the consumer's thread.

    Its AsyncBatchCollator holds the batch after those that were taken, or none.
    """

    def __init__(
        self,
        loader: ResumableLoader,
        to_device: DeviceCopy | None,
        prefetch: bool,
        warn_after: float | None,
        epoch: int,
    ) -> None:
        # workers are forked here: in the consumer's thread, while no other one runs
        self.num_steps, batches = loader.begin()
        self._loader, self._to_device, self._prefetch = loader, to_device, prefetch
        self._has_ended = False
        self._watchdog = Watchdog(warn_after)
        # not a method: the thread would keep this object alive
        build = partial(_build, loader, batches, to_device, epoch, self._watchdog)
        self._collator = AsyncBatchCollator(build)
        self._end_lost = weakref.finalize(self, _end_lost_workers, loader, os.getpid())
        self._end_lost.atexit = False

    def is_over(self, position: LoaderPosition) -> bool:
        """Return whether a consumer at this position has received the whole epoch."""
        has_all = self.num_steps is not None and position.step >= self.num_steps
        return has_all or self._has_ended

    def goes_on_at(self, position: LoaderPosition) -> bool:
        """Return whether the next batch is the one here: not if a ``take`` was interrupted."""
        return self._collator._holds(position.step)

    def take(self, position: LoaderPosition, skipped: SkippedExamples) -> Taken:
        """Return the batch after a position, or END, and begin to build the one after it."""
        epoch, step, _ = position
        self._loader.check(epoch)
        with self._watchdog.waiting(epoch, step):
            built: _Built = self._collator.get(step)
        batch = built.collated.batch
        if self.num_steps is not None and (batch is END) != (step >= self.num_steps):
            raise StateError(
                f"epoch {epoch} has {self.num_steps} steps, but the loader yields "
                f"{'fewer' if batch is END else 'more'}; len(batch_sampler) must be what its "
                "iter() yields"
            )
        if batch is END:
            self._has_ended = True
            return Taken(END, position, skipped, built.times)
        skipped = skipped.with_batch(epoch, step, built.collated)
        following = LoaderPosition(epoch, step + 1, built.mark)
        if self._prefetch and following.step != self.num_steps:
            self._collator.submit(following.step)
        if self._to_device is not None:
            batch = self._to_device.receive(batch)
        return Taken(batch, following, skipped, built.times)

    def settled(self, position: LoaderPosition, seconds: float | None) -> bool:
        """Wait at most so long for what is in flight. Return whether nothing is."""
        with self._watchdog.waiting(position.epoch, position.step):
            return self._collator._settled(seconds)

    def stop(self) -> None:
        """Drop the batch built ahead, and end the threads and workers."""
        self._end_lost.detach()
        try:
            self._watchdog.stop()
            self._collator.shutdown()
        finally:
            self._loader.end()

    def abandon(self, position: LoaderPosition) -> None:
        """Abandon a thread that builds a batch, and kill the workers. Nothing is waited for."""
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
) -> _Built:
    """Build the next batch, that of ``step``."""
    watchdog.collating = threading.get_ident()
    began = time.perf_counter()
    batch = next(batches, END)
    ended = copied = time.perf_counter()
    collated = batch if isinstance(batch, Collated) else Collated(batch)
    if batch is END or loader.is_closed:  # closed: the thread was abandoned, and touches nothing
        return _Built(collated, None, BuildTimes(began, ended, copied))
    mark = loader.mark()
    batch = _named(collated, epoch, step, keep=not loader.has_sampler)
    if to_device is not None:
        batch = to_device.send(batch)
        copied = time.perf_counter()
    return _Built(collated._replace(batch=batch), mark, BuildTimes(began, ended, copied))


def _named(collated: Collated, epoch: int, step: int, *, keep: bool) -> Any:
    """Return a Batch with its epoch, step and skipped examples in its metadata; others as is."""
    batch = collated.batch
    if not isinstance(batch, Batch):
        return batch
    named = copy.copy(batch)  # a collate function may keep its own
    names: dict[str, Any] = {"epoch": epoch, "step": step}
    if collated.failed:
        names["skipped"] = [failed.example for failed in collated.failed]
    named.metadata = {**batch.metadata, **names, **(batch.metadata if keep else {})}
    return named
