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
from torch_collate_kit.loading.prefetch.resumable_loaders import ResumableLoader
from torch_collate_kit.loading.prefetch.skipped_examples import SkippedExamples
from torch_collate_kit.loading.prefetch.skipping import Collated
from torch_collate_kit.loading.prefetch.timeline import BuildTimes
from torch_collate_kit.loading.prefetch.watchdog import Watchdog

__all__ = ["END", "ReadAhead"]

END: Any = object()


class _Built(NamedTuple):
    """A batch on its way to its device, or END, and what there is to know of it."""

    batch: Any
    mark: Any  # of the position after it
    times: BuildTimes
    collated: Collated | None = None  # where examples that fail are left out


class ReadAhead:
    """One reading of an epoch: how far it is built, and how far the consumer has received it."""

    def __init__(
        self,
        loader: ResumableLoader,
        to_device: DeviceCopy | None,
        *,
        prefetch: bool,
        warn_after: float | None,
        skipped: SkippedExamples,
    ) -> None:
        # workers are forked here: in the consumer's thread, while no other one runs
        self.epoch, self.step, self.num_steps, self._batches = loader.begin()
        self.mark = loader.mark()
        self._loader, self._to_device, self._prefetch = loader, to_device, prefetch
        self._skipped = skipped
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
            built: _Built = self._collator.get(self.step)
        finally:
            self._watchdog.wait_ends()
        batch = built.batch
        if batch is END or self.is_over:
            if self.num_steps is None or (batch is END and self.is_over):
                return END, built.times
            raise StateError(
                f"epoch {self.epoch} has {self.num_steps} steps, but the loader yields "
                f"{'fewer' if batch is END else 'more'}; len(batch_sampler) must be what its "
                "iter() yields"
            )
        if built.collated is not None:
            self._skipped.add(self.epoch, self.step, built.collated)
        following = self.step + 1
        if self._prefetch and following != self.num_steps:
            self._collator.submit(following)
        if self._to_device is not None:
            batch = self._to_device.receive(batch)
        self.step, self.mark = following, built.mark
        return batch, built.times

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
) -> _Built:
    """The next batch, which comes from the loader's iterator."""
    watchdog.collating = threading.get_ident()
    began = time.perf_counter()
    batch = next(batches, END)
    ended = time.perf_counter()
    mark = loader.mark()
    if batch is END:
        return _Built(END, mark, BuildTimes(began, ended, ended))
    collated = batch if isinstance(batch, Collated) else None
    if collated is not None:
        batch = collated.batch
        collated = collated._replace(batch=None)
    batch = _named(batch, epoch, step, collated, keep=loader.batches_may_be_named)
    if to_device is None:
        return _Built(batch, mark, BuildTimes(began, ended, ended), collated)
    sent = to_device.send(batch)
    return _Built(sent, mark, BuildTimes(began, ended, time.perf_counter()), collated)


def _named(batch: Any, epoch: int, step: int, collated: Collated | None, *, keep: bool) -> Any:
    """A Batch with its epoch and step in its metadata, and what it is without; others as is."""
    if not isinstance(batch, Batch):
        return batch
    named = copy.copy(batch)  # a collate function may keep its own
    names: dict[str, Any] = {"epoch": epoch, "step": step}
    if collated is not None and collated.failed:
        names["skipped"] = [failed.example for failed in collated.failed]
    named.metadata = {**batch.metadata, **names, **(batch.metadata if keep else {})}
    return named
