"""The order of one dataset's examples: shuffled by (seed, epoch), cut into batches, reshuffled.

An order is a pure function of (seed, epoch), so that only a position has to be stored. It is held
as one int64 array.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sized
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import checked_bool
from torch_collate_kit._reprs import Shown
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.sampler.arguments import (
    Indices,
    checked_length,
    checked_order,
    checked_tail,
    order_of,
    rank_slice,
    seeded_generator,
)
from torch_collate_kit.loading.sampler.resumable import EpochSampler, Plan, state_int

__all__ = ["Order", "OrderedSampler", "PrefetchingSampler"]

Order: TypeAlias = Callable[[int, np.random.Generator], npt.ArrayLike]


class OrderedSampler(EpochSampler):
    """Epochs of global batches of one dataset; ``_pick`` says what a rank yields for each."""

    def __init__(
        self,
        data: int | Sized,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        tail: str = "keep",
        order: Order | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(batch_size, seed=seed, shuffle=shuffle, rank=rank, world_size=world_size)
        self._length = checked_length(data)
        self._tail = checked_tail(tail, checked_bool("drop_last", drop_last))
        if order is not None and not callable(order):
            raise TypeError(f"order must be a function of (epoch, rng), got {order!r}")
        self._user_order = order
        self._user_latest: tuple[int, Indices] | None = None
        self._user_lengths: dict[int, int] = {}
        self._reshuffles: list[tuple[int, int]] = []
        self._num_steps(0)

    @abstractmethod
    def _pick(self, batch: Indices) -> Any:
        """What this rank yields for a global batch of indices."""

    def _settings(self) -> dict[str, Any]:
        settings = super()._settings()
        if self._tail != "keep":
            settings["tail"] = self._tail
        if self._user_order is not None:
            settings["order"] = Shown(self._user_order)
        return settings

    @property
    def num_examples(self) -> int:
        """The length of the dataset that the indices are of."""
        return self._length

    def reshuffle(self) -> None:
        """Puts the rest of the epoch, from the next ``iter()``'s position on, in a new order.

        It is a function of (seed, epoch, number of reshuffles of the epoch), and recorded in the
        state. Examples carried over by ``tail="wrap"`` stay first. An iterator made before still
        yields the old order. In the middle of an epoch, call
        ``set_epoch(epoch, step=batches_consumed)`` first. A jump to before a reshuffle undoes it.

        >>> from torch_collate_kit.loading.sampler import PrefetchingSampler
        >>> sampler = PrefetchingSampler(6, batch_size=2, shuffle=False)
        >>> sampler.set_epoch(0, step=1)
        >>> sampler.reshuffle()
        >>> sampler.state_dict()["reshuffles"], sorted(sum(sampler, []))
        ([[0, 1]], [2, 3, 4, 5])
        """
        epoch, step = self._position()
        self._jump(epoch, step)
        self._reshuffles.append((epoch, step))

    def _num_examples(self, epoch: int) -> int:
        if self._user_order is None:
            return self._length
        if epoch not in self._user_lengths:
            self._user_lengths[epoch] = len(self._order(epoch))
        return self._user_lengths[epoch]

    def _start(self, epoch: int) -> int:
        """Where an epoch starts in the endless stream of epochs."""
        if self._user_order is None:
            return epoch * self._length
        return sum(map(self._num_examples, range(epoch)))

    def _num_steps(self, epoch: int) -> int:
        size = self._num_global
        if self._tail == "wrap":
            return self._start(epoch + 1) // size - self._start(epoch) // size
        full, rest = divmod(self._num_examples(epoch), size)
        if self._tail == "drop":
            if not full:
                raise ValueError(
                    f"epoch {epoch} has {rest} examples, fewer than batch_size={size}, and "
                    "tail='drop' leaves no step; lower batch_size, or use tail='keep' or 'wrap'"
                )
            return full
        if 0 < rest < self._least_examples:
            raise ValueError(
                f"epoch {epoch} ends with a batch of {rest} examples, fewer than "
                f"world_size={self._least_examples}: a rank would have none; use tail='drop' or "
                "'wrap', or another batch_size"
            )
        return full + (rest > 0)

    def _num_carried(self, epoch: int) -> int:
        """Examples of earlier epochs in the first batch of an epoch."""
        return self._start(epoch) % self._num_global if self._tail == "wrap" else 0

    def _carried_from(self, epoch: int) -> int:
        """The first epoch that has examples in the batches of ``epoch``."""
        carried = self._num_carried(epoch)
        while carried > 0:
            epoch -= 1
            carried -= self._num_examples(epoch)
        return epoch

    def _order(self, epoch: int) -> Indices:
        """The indices of an epoch before any reshuffle: int64."""
        if self._user_order is None:
            return order_of(self._length, self._shuffle, self._seed, epoch)
        if self._user_latest is None or self._user_latest[0] != epoch:
            found = self._user_order(epoch, seeded_generator(self._seed, epoch))
            self._user_latest = epoch, checked_order(found, epoch, self._length)
        return self._user_latest[1]

    def _reshuffled(self, epoch: int) -> Indices:
        """The indices of an epoch as its reshuffles left them."""
        order, carried = self._order(epoch), self._num_carried(epoch)
        steps = [step for e, step in self._reshuffles if e == epoch]
        for count, step in enumerate(steps, start=1):  # from 1: a SeedSequence drops trailing zeros
            rng = seeded_generator(self._seed, epoch, count)
            done = max(step * self._num_global - carried, 0)
            order = np.concatenate([order[:done], rng.permutation(order[done:])])
        return order

    def _plan(self, epoch: int, step: int) -> Plan:
        steps = range(step, self._num_steps(epoch))
        before, missing = epoch, self._num_carried(epoch)
        carried: list[Indices] = []
        while missing:
            before -= 1
            part = self._reshuffled(before)[
                -missing:
            ].copy()  # not a view, which would keep the rest
            carried.insert(0, part)
            missing -= len(part)
        stream = self._reshuffled(epoch)
        stream = np.concatenate([*carried, stream]) if carried else stream
        return partial(self._batches, stream, steps)

    def _batches(self, stream: Indices, steps: range) -> Iterator[Any]:
        for step in steps:
            yield self._pick(stream[step * self._num_global : (step + 1) * self._num_global])

    def _jump(self, epoch: int, step: int) -> None:
        super()._jump(epoch, step)
        self._reshuffles = self._reshuffles_for(epoch, step)

    def _reshuffles_for(self, epoch: int, step: int) -> list[tuple[int, int]]:
        """The reshuffles before a position that still shape what follows it."""
        first = self._carried_from(epoch)
        return [at for at in self._reshuffles if first <= at[0] and at <= (epoch, step)]

    def _fits(self) -> dict[str, Any]:
        own = {"length": self._length, "tail": self._tail}
        return {**own, "custom_order": self._user_order is not None, **super()._fits()}

    def _extra(self, epoch: int, step: int) -> dict[str, Any]:
        return {"reshuffles": [list(at) for at in self._reshuffles_for(epoch, step)]}

    def _load_extra(self, state: Mapping[str, Any], epoch: int, step: int) -> None:
        records, first = state["reshuffles"], self._carried_from(epoch)
        pairs = isinstance(records, list) and all(isinstance(at, (list, tuple)) for at in records)
        if not pairs or any(len(at) != 2 for at in records):
            raise StateError(
                f"state has reshuffles={records!r}, not a list of [epoch, step]; "
                "pass what state_dict() gave"
            )
        names = "a reshuffle's epoch", "a reshuffle's step"
        places = [(state_int(names[0], e), state_int(names[1], s)) for e, s in records]
        inside = all((first, 0) <= at <= (epoch, step) for at in places)
        if not inside or places != sorted(places) or any(s > self._num_steps(e) for e, s in places):
            raise StateError(
                f"state has reshuffles at {records!r}, which cannot all lie, in order, between "
                f"epoch {first} and its position, epoch {epoch} step {step}; "
                "pass what state_dict() gave"
            )
        self._reshuffles = places


class PrefetchingSampler(OrderedSampler):
    """Batches of one dataset's indices: shuffled by (seed, epoch), sharded, resumable.

    Args:
        data: the number of examples, or anything with ``len()``, which is read once.
        batch_size: examples of a step over all ranks. Rank r gets the r-th contiguous part.
        shuffle, seed: an epoch is in an order that is a function of (seed, epoch), or in sequence.
        tail: the examples after the last full batch make a short batch ("keep"), are left out
            ("drop"), or begin the next epoch's first batch ("wrap").
        drop_last: True is ``tail="drop"``.
        order: ``order(epoch, rng)`` returns the indices of an epoch, which may repeat or be left
            out. It must be a pure function; ``rng`` is seeded by (seed, epoch).
        rank, world_size: which part of each batch is yielded, as a list of Python ints.

    The ``state_dict`` is small JSON and the same on all ranks. More in docs/loading.md.

    Raises:
        TypeError, ValueError: an argument is wrong, an epoch has no step to drop to, or a kept tail
            has fewer examples than there are ranks.

    >>> sampler = PrefetchingSampler(5, batch_size=2, shuffle=False, tail="wrap")
    >>> [list(sampler), list(sampler)]
    [[[0, 1], [2, 3]], [[4, 0], [1, 2], [3, 4]]]
    """

    def __repr__(self) -> str:
        return self._shown(str(self._length), **self._rank_settings())

    def _pick(self, batch: Indices) -> list[int]:
        mine: list[int] = batch[rank_slice(len(batch), self._rank, self._world_size)].tolist()
        return mine

    def _fits(self) -> dict[str, Any]:
        return {**super()._fits(), "world_size": self._world_size}
