"""Where a step ends: the steps of an order, by examples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch_collate_kit.loading.orders.checks import Indices
from torch_collate_kit.loading.orders.order import Order
from torch_collate_kit.packing import PackingPlan


class Step(NamedTuple):
    """The examples of one step over all ranks, and their rows if these are planned already."""

    examples: Indices
    plan: PackingPlan | None = None


class Windows(NamedTuple):
    """How many rows a step has, and how they are planned."""

    batch_rows: int
    window: int
    """Steps that are planned together."""
    group: int
    """Rows that cost alike, for ranks to compute at the same time."""


class Budget(ABC):
    """The steps of the epochs of an order."""

    batch_rows: int  # where steps count rows

    def __init__(self, order: Order, tail: str) -> None:
        self.order, self.tail = order, tail

    @abstractmethod
    def num_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch."""

    @abstractmethod
    def step(self, epoch: int, step: int) -> Step:
        """Return a step that the epoch has."""

    @abstractmethod
    def steps_of(self, epoch: int, example: int) -> list[int]:
        """Return the steps of an epoch that have an example, ascending."""

    @abstractmethod
    def place(self, epoch: int, step: int) -> int:
        """Return the place of the order from which on a reshuffle before a step may change it."""

    def is_counted(self, epoch: int) -> bool:
        """Return whether ``length`` is exact."""
        return True

    def length(self, epoch: int) -> int:
        """Return the number of steps, or an estimate until a very long epoch is counted."""
        return self.num_steps(epoch)

    def has_step(self, epoch: int, step: int) -> bool:
        """Return whether an epoch has a step of this number."""
        return step < self.num_steps(epoch)

    def check(self, epoch: int, step: int) -> None:
        """Raise ValueError if an epoch cannot be read from a step on; its length is 0 or more."""
        if not self.has_step(epoch, step) and self.tail == "drop":
            has, most = self._less_than_a_step(epoch)
            raise ValueError(
                f"epoch {epoch} {has} {most}, and tail='drop' leaves no step; lower "
                f"{most.partition('=')[0]}, or use tail='keep' or 'wrap'"
            )

    def _less_than_a_step(self, epoch: int) -> tuple[str, str]:
        """Return what an epoch without a step has, and the option that asks for more."""
        return "fills fewer than", f"batch_rows={self.batch_rows} rows"

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """Return what a state of this position holds besides it."""
        return {}

    def load(self, state: Mapping[str, Any], epoch: int, step: int) -> None:
        """Restore what ``state`` returned into a new budget."""
        return


class ByExamples(Budget):
    """Steps of ``batch_size`` examples; a kept tail has at least ``least``, or an epoch is refused.

    ``tail`` is that of ``PrefetchingSampler``.
    """

    def __init__(self, order: Order, tail: str, batch_size: int, least: int) -> None:
        super().__init__(order, tail)
        self._size, self._least = batch_size, least

    def num_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch."""
        size = self._size
        if self.tail == "wrap":
            return self.order.before(epoch + 1) // size - self.order.before(epoch) // size
        full, rest = divmod(self.order.size(epoch), size)
        if self.tail == "drop":
            return full
        return full + (rest > 0)

    def check(self, epoch: int, step: int) -> None:
        """Raise ValueError also for a kept tail of fewer than ``least``."""
        super().check(epoch, step)
        rest = self.order.size(epoch) % self._size
        if self.tail == "keep" and 0 < rest < self._least:
            raise ValueError(
                f"epoch {epoch} ends with a batch of {rest} examples, fewer than "
                f"dp_size={self._least}: a rank would have none; use tail='drop' or "
                "'wrap', or another batch_size"
            )

    def _less_than_a_step(self, epoch: int) -> tuple[str, str]:
        return f"has {self.order.size(epoch)} examples, fewer than", f"batch_size={self._size}"

    def step(self, epoch: int, step: int) -> Step:
        """Return a step that the epoch has."""
        start = step * self._size - self._carried(epoch)
        stop = start + self._size
        if self.tail == "keep":
            stop = min(stop, self.order.size(epoch))
        return Step(self.order.take(epoch, start, stop))

    def steps_of(self, epoch: int, example: int) -> list[int]:
        """Return the steps of an epoch that have an example, ascending."""
        carried, num_steps = self._carried(epoch), self.num_steps(epoch)
        found = {(p + carried) // self._size for p in self.order.places(epoch, example)}
        if carried and (self.order.take(epoch, -carried, 0) == example).any():
            found.add(0)
        return sorted(step for step in found if step < num_steps)

    def place(self, epoch: int, step: int) -> int:
        """Return the place of the order from which on a reshuffle may change it."""
        return max(step * self._size - self._carried(epoch), 0)

    def _carried(self, epoch: int) -> int:
        """Return the number of examples of earlier epochs in the first batch of an epoch."""
        return self.order.before(epoch) % self._size if self.tail == "wrap" else 0
