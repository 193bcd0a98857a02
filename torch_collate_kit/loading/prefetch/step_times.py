"""When each batch was collated, copied, waited for and trained on."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

__all__ = ["BuildTimes", "StepTimes", "Timeline"]

_MOST_STEPS = 1000


class BuildTimes(NamedTuple):
    """The times at which a batch was built, by ``time.perf_counter()``."""

    began: float
    collated: float
    copied: float


class StepTimes(NamedTuple):
    """The times of one batch, in seconds of ``time.perf_counter()``.

    A batch that was built ahead began before it was asked for; otherwise the consumer waited for
    all of it.

    >>> step = StepTimes(0, 3, 1.0, 1.5, 1.6, 1.4, 1.6, 2.0)
    >>> step.was_ahead, round(step.build_seconds, 1), round(step.wait_seconds, 1)
    (True, 0.6, 0.2)
    """

    epoch: int
    step: int
    collate_began: float
    """Time at which the DataLoader was asked for it: collation, or waiting for a worker."""
    collate_ended: float
    copy_ended: float
    """Time at which it had been sent to the device; without one, at which it was collated. On CUDA
    the copy itself may end later, without anybody waiting for it here."""
    wait_began: float
    """Time at which the consumer asked for it."""
    wait_ended: float
    train_ended: float | None
    """Time at which the consumer asked for the next one, or left its loop; None until then."""

    @property
    def build_seconds(self) -> float:
        """Seconds of collation and copy."""
        return self.copy_ended - self.collate_began

    @property
    def wait_seconds(self) -> float:
        """Seconds that the consumer waited for it."""
        return self.wait_ended - self.wait_began

    @property
    def was_ahead(self) -> bool:
        """Whether building began before the consumer asked for it."""
        return self.collate_began < self.wait_began


class Timeline:
    """The times of the last steps. Written by the consumer's thread, read by any.

    A step is a list until somebody asks: making a StepTimes twice would cost more than all else.
    """

    def __init__(self) -> None:
        self._steps: deque[list[Any]] = deque(maxlen=_MOST_STEPS)
        self._last: list[Any] | None = None  # that is being trained on

    def received(
        self, epoch: int, step: int, built: BuildTimes, wait_began: float, wait_ended: float
    ) -> None:
        """Record that the consumer received the batch of ``step``."""
        self._last = [epoch, step, built, wait_began, wait_ended, None]
        self._steps.append(self._last)

    def trained(self) -> None:
        """Record that the consumer is done with the batch received last."""
        if self._last is not None:
            self._last[-1] = time.perf_counter()
            self._last = None

    def steps(self) -> list[StepTimes]:
        """Return the steps, oldest first. No append interrupts the copy of a deque."""
        return [
            StepTimes._make((epoch, step, *built, *waited))
            for epoch, step, built, *waited in self._steps.copy()
        ]
