"""The order of one dataset's examples, epoch by epoch: a function of (seed, epoch) and place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.orders.checks import (
    NEW_RUN,
    Indices,
    checked_order,
)
from torch_collate_kit.loading.orders.permutations import (
    ArrayOrder,
    EpochOrder,
    epoch_order,
    seeded_generator,
)
from torch_collate_kit.loading.orders.states import Growth

UserOrder: TypeAlias = Callable[[int, np.random.Generator], npt.ArrayLike]


class Order(ABC):
    """The examples of all epochs in order; immutable but for what it keeps to be fast.

    Places count from the start of an epoch: below 0 are the last ones of epochs before it, and
    those from its size on are the first ones of the next.
    """

    _offsets: Indices | None
    """int64 [examples + 1], where the pieces of each begin, if what is ordered are pieces."""

    @property
    @abstractmethod
    def num_examples(self) -> int:
        """The length of the dataset that is ordered."""

    @property
    @abstractmethod
    def is_permutation(self) -> bool:
        """Whether an epoch has each of the first ``size`` examples once."""

    @abstractmethod
    def apart(self) -> Order:
        """Return a copy, or itself, that another thread may read."""

    @abstractmethod
    def size(self, epoch: int) -> int:
        """Return the number of examples of an epoch."""

    @abstractmethod
    def _epoch(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch."""

    def before(self, epoch: int) -> int:
        """Return the number of examples of all epochs before one."""
        return sum(map(self.size, range(epoch)))

    def take(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the examples at places ``start`` to ``stop`` - 1: int64."""
        while start < 0 < epoch:
            epoch -= 1
            start, stop = start + self.size(epoch), stop + self.size(epoch)
        parts, start = [np.zeros(0, dtype=np.int64)], max(start, 0)
        while start < stop and (size := self.size(epoch)):  # none: a mixture has ended
            if start < size:
                parts.append(self._epoch(epoch).take(start, min(stop, size)))
            epoch, start, stop = epoch + 1, max(start - size, 0), stop - size
        return parts[1] if len(parts) == 2 else np.concatenate(parts)

    def places(self, epoch: int, example: int) -> list[int]:
        """Return the places of an example in an epoch, ascending."""
        order, pieces = self._epoch(epoch), range(example, example + 1)
        if self._offsets is not None:
            pieces = range(*self._offsets[example : example + 2].tolist())
        return sorted(place for piece in pieces for place in order.places(piece))

    @abstractmethod
    def fix(self, epoch: int) -> None:
        """Read what the order of an epoch depends on. Raises ValueError if it has no example."""

    @abstractmethod
    def reshuffled(self, epoch: int, step: int, place: int) -> Order:
        """Return the order with the rest of an epoch, from a place on, in a new order."""

    @abstractmethod
    def until(self, epoch: int, step: int) -> Order:
        """Return the order without the reshuffles after a position."""

    @abstractmethod
    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """Return what a state of this position says of the order."""

    @abstractmethod
    def num_known(self, state: Mapping[str, Any], *, allow_appended: bool) -> int:
        """Return the number of examples of a state's run. Raises StateError if it does not fit."""

    @abstractmethod
    def loaded(self, state: Mapping[str, Any], epoch: int, step: int) -> Order:
        """Return the order of a state that fits."""


class ShuffledOrder(Order):
    """One dataset, shuffled in each epoch, in sequence, or in the user's order.

    ``reshuffles`` are (epoch, step, place): from this place on the epoch is in a new order. With
    ``offsets``, int64 [examples + 1], what is ordered are the pieces ``offsets[i]:offsets[i + 1]``
    of example i.
    """

    def __init__(
        self,
        growth: Growth,
        *,
        seed: int,
        shuffle: bool | str,
        user: UserOrder | None = None,
        offsets: Indices | None = None,
        reshuffles: tuple[tuple[int, int, int], ...] = (),
    ) -> None:
        self.growth, self.reshuffles = growth, reshuffles
        self._seed, self._shuffle, self._user, self._offsets = seed, shuffle, user, offsets
        self._sizes: dict[int, int] = {}  # of the user's epochs
        self._epochs: dict[int, EpochOrder] = {}  # the two that were read last

    def _changed(self, **changes: Any) -> ShuffledOrder:
        """Return a copy with another ``growth`` or other ``reshuffles``."""
        given: dict[str, Any] = {"growth": self.growth, "reshuffles": self.reshuffles}
        return ShuffledOrder(
            **{**given, **changes},
            seed=self._seed,
            shuffle=self._shuffle,
            user=self._user,
            offsets=self._offsets,
        )

    @property
    def num_examples(self) -> int:
        """The length of the dataset that is ordered."""
        return self.growth.last

    @property
    def is_permutation(self) -> bool:
        """Whether an epoch has each of the first ``size`` examples once."""
        return self._user is None

    def apart(self) -> ShuffledOrder:
        """Return itself, which any number of threads may read."""
        return self

    def reshuffled(self, epoch: int, step: int, place: int) -> ShuffledOrder:
        """Return the order with the rest of an epoch, from a place on, in a new order."""
        made = self.until(epoch, step).reshuffles
        return self._changed(reshuffles=(*made, (epoch, step, place)))

    def until(self, epoch: int, step: int) -> ShuffledOrder:
        """Return the order without the reshuffles after a position."""
        kept = tuple(at for at in self.reshuffles if at[:2] <= (epoch, step))
        return self if kept == self.reshuffles else self._changed(reshuffles=kept)

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the number of examples by epoch, and the reshuffles until a position."""
        made = [list(at) for at in self.until(epoch, step).reshuffles]
        return {"num_examples": self.growth.as_state(), "reshuffles": made}

    def num_known(self, state: Mapping[str, Any], *, allow_appended: bool) -> int:
        """Return the number of examples of a state's run. Raises StateError if it does not fit."""
        was, now = Growth.of_state(state["num_examples"]).last, self.growth.last
        if was > now or (was < now and not allow_appended):
            hint = "examples were taken away; " + NEW_RUN
            if was < now:
                hint = (
                    "if they were added at the end, build the sampler with allow_appended=True: "
                    "the running epoch keeps its order, and the next one has them"
                )
            raise StateError(f"state is of {was} examples, the data has {now}; {hint}")
        if was < now and self._user is not None:
            raise StateError(
                f"state is of {was} examples, the data has {now}; allow_appended=True cannot keep "
                "the running epoch's order, which order= decides: finish the epoch with the data "
                "of the saved run"
            )
        return was

    def loaded(self, state: Mapping[str, Any], epoch: int, step: int) -> ShuffledOrder:
        """Return the order of a state that fits."""
        made = tuple(tuple(record) for record in state["reshuffles"])
        growth = Growth.of_state(state["num_examples"])  # the running epoch keeps its examples
        grown = growth.to(self.growth.last, from_epoch=epoch + (step > 0))
        return self._changed(growth=grown, reshuffles=made)

    def fix(self, epoch: int) -> None:
        """Read the order of an epoch, which a user's function decides, if it is not known yet."""
        self._epoch(epoch)

    def size(self, epoch: int) -> int:
        """Return the number of examples of an epoch."""
        if self._user is None:
            return self._counted(self.growth.at(epoch))
        if epoch not in self._sizes:
            self._sizes[epoch] = len(self._users(epoch))
        return self._sizes[epoch]

    def before(self, epoch: int) -> int:
        """Return the number of examples of all epochs before one."""
        if self._user is None and self._offsets is None:
            return self.growth.before(epoch)
        return super().before(epoch)

    def _counted(self, num_examples: int) -> int:
        return num_examples if self._offsets is None else int(self._offsets[num_examples])

    def _users(self, epoch: int) -> Indices:
        """Return an epoch in the user's order, checked."""
        assert self._user is not None
        found = self._user(epoch, seeded_generator(self._seed, epoch))
        examples = checked_order(found, epoch, self.growth.at(epoch))
        if self._offsets is None:
            return examples
        counts = np.diff(self._offsets)[examples]
        first = np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(self._offsets[examples], counts) + np.arange(len(first)) - first

    def _epoch(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch after its reshuffles."""
        kept = self._epochs  # one read: another thread may be at another epoch
        if epoch in kept:
            return kept[epoch]
        done = [place for of, _, place in self.reshuffles if of == epoch]
        words = self._seed, epoch
        if self._user is not None:
            order: EpochOrder = ArrayOrder(self._users(epoch), words, reshuffled_after=done)
        else:
            order = epoch_order(self.size(epoch), self._shuffle, words, reshuffled_after=done)
        self._epochs = {**dict(list(kept.items())[-1:]), epoch: order}
        return order
