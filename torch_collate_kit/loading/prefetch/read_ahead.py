"""One epoch read one batch ahead of its consumer: how far it is built, and how far received."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.prefetch.async_collator import AsyncBatchCollator
from torch_collate_kit.loading.prefetch.device_copy import DeviceCopy
from torch_collate_kit.loading.prefetch.resumable_loaders import ResumableLoader
from torch_collate_kit.loading.prefetch.timeline import BuildTimes
from torch_collate_kit.loading.prefetch.watchdog import Watchdog

__all__ = ["END", "ReadAhead"]

END: Any = object()


class ReadAhead:
    """One reading of an epoch: how far it is built, and how far the consumer has received it."""

    def __init__(
        self,
        loader: ResumableLoader,
        to_device: DeviceCopy | None,
        *,
        prefetch: bool,
        warn_after: float | None,
    ) -> None:
        # workers are forked here: in the consumer's thread, while no other one runs
        self.epoch, self.step, self.num_steps, self._batches = loader.begin()
        self.mark = loader.mark()
        self._loader, self._to_device, self._prefetch = loader, to_device, prefetch
        self._watchdog = Watchdog(warn_after)
        build = partial(_build, loader, self._batches, to_device, self.epoch, self._watchdog)
        self._collator = AsyncBatchCollator(build)

    @property
    def is_over(self) -> bool:
        return self.num_steps is not None and self.step >= self.num_steps

    def take(self) -> tuple[Any, BuildTimes]:
        """The next batch, or END, and its times; the one after it is then on its way."""
        self._loader.check(self.epoch)
        self._watchdog.wait_begins(self.epoch, self.step)
        try:
            batch, mark, built = self._collator.get(self.step)
        finally:
            self._watchdog.wait_ends()
        if batch is END or self.is_over:
            if self.num_steps is None or (batch is END and self.is_over):
                return END, built
            raise StateError(
                f"epoch {self.epoch} has {self.num_steps} steps, but the loader yields "
                f"{'fewer' if batch is END else 'more'}; len(batch_sampler) must be what its "
                "iter() yields"
            )
        following = self.step + 1
        if self._prefetch and following != self.num_steps:
            self._collator.submit(following)
        if self._to_device is not None:
            batch = self._to_device.receive(batch)
        self.step, self.mark = following, mark
        return batch, built

    def stop(self) -> None:
        try:
            self._watchdog.stop()
            self._collator.shutdown()
        finally:
            self._loader.end(self._batches)


def _build(
    loader: ResumableLoader,
    batches: Iterator[Any],
    to_device: DeviceCopy | None,
    epoch: int,
    watchdog: Watchdog,
    step: int,
) -> tuple[Any, Any, BuildTimes]:
    """The next batch, on its way to its device, the mark of the position after it, and times."""
    watchdog.collating = threading.get_ident()
    began = time.perf_counter()
    batch = next(batches, END)
    collated = time.perf_counter()
    mark = loader.mark()
    if batch is not END:
        batch = _named(batch, epoch, step, keep=loader.batches_may_be_named)
    if batch is END or to_device is None:
        return batch, mark, BuildTimes(began, collated, collated)
    sent = to_device.send(batch)
    return sent, mark, BuildTimes(began, collated, time.perf_counter())


def _named(batch: Any, epoch: int, step: int, *, keep: bool) -> Any:
    """A Batch with its epoch and step in the metadata; anything else as it is."""
    if not isinstance(batch, Batch):
        return batch
    named = copy.copy(batch)  # a collate function may keep its own
    names = {"epoch": epoch, "step": step}
    named.metadata = {**batch.metadata, **names, **(batch.metadata if keep else {})}
    return named
