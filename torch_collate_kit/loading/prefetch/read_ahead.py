"""One epoch read one batch ahead of its consumer: how far it is built, and how far received."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.prefetch.async_collator import AsyncBatchCollator
from torch_collate_kit.loading.prefetch.device_copy import DeviceCopy
from torch_collate_kit.loading.prefetch.positioned import LoaderPosition
from torch_collate_kit.loading.prefetch.resumable_loaders import ResumableLoader
from torch_collate_kit.loading.prefetch.skipped_examples import Collated, LeftOut, SkippedExamples
from torch_collate_kit.loading.prefetch.timeline import BuildTimes
from torch_collate_kit.loading.prefetch.watchdog import Watchdog

__all__ = ["END", "ReadAhead"]

END: Any = object()


class _Built(NamedTuple):
    """A batch on its way to its device, or END, and what there is to know of it."""

    batch: Any
    mark: Any  # of the position after it
    times: BuildTimes
    left_out: LeftOut | None = None  # where examples that fail are left out


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
        batch = built.batch
        if self.num_steps is not None and (batch is END) != (step >= self.num_steps):
            raise StateError(
                f"epoch {epoch} has {self.num_steps} steps, but the loader yields "
                f"{'fewer' if batch is END else 'more'}; len(batch_sampler) must be what its "
                "iter() yields"
            )
        if batch is END:
            self._has_ended = True
            return END, built.times
        if built.left_out is not None:
            self._skipped.add(epoch, step, built.left_out)
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
    collated = copied = time.perf_counter()
    if batch is END:
        return _Built(END, None, BuildTimes(began, collated, copied))
    mark = loader.mark()
    batch, left_out = batch if isinstance(batch, Collated) else (batch, None)
    batch = _named(batch, epoch, step, left_out, keep=not loader.has_sampler)
    if to_device is not None:
        batch = to_device.send(batch)
        copied = time.perf_counter()
    return _Built(batch, mark, BuildTimes(began, collated, copied), left_out)


def _named(batch: Any, epoch: int, step: int, left_out: LeftOut | None, *, keep: bool) -> Any:
    """A Batch with its epoch and step in its metadata, and what it is without; others as is."""
    if not isinstance(batch, Batch):
        return batch
    named = copy.copy(batch)  # a collate function may keep its own
    names: dict[str, Any] = {"epoch": epoch, "step": step}
    if left_out is not None and left_out.failed:
        names["skipped"] = [failed.example for failed in left_out.failed]
    named.metadata = {**batch.metadata, **names, **(batch.metadata if keep else {})}
    return named
