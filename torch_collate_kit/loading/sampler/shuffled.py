"""The order of one dataset's examples: shuffled by (seed, epoch), cut into batches, reshuffled.

An order is a pure function of (seed, epoch), so that only a position has to be stored. It is held
as one int64 array, or computed where it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import checked_bool, checked_choice
from torch_collate_kit._reprs import KindAndSize
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.sampler.checks import (
    Indices,
    are_pairs,
    checked_length,
    checked_order,
    damaged_state,
    state_int,
)
from torch_collate_kit.loading.sampler.epochs import NEW_RUN, EpochSampler, Plan
from torch_collate_kit.loading.sampler.orders import (
    ArrayOrder,
    EpochOrder,
    epoch_order,
    seeded_generator,
)
from torch_collate_kit.loading.sampler.states import Growth

__all__ = ["Order", "OrderedSampler", "PrefetchingSampler"]

Order: TypeAlias = Callable[[int, np.random.Generator], npt.ArrayLike]


class OrderedSampler(EpochSampler):
    """Epochs of global batches of one dataset."""

    def __init__(
        self,
        examples: int | Sized,
        *,
        batch_size: int,
        shuffle: bool | str = True,
        seed: int = 0,
        tail: str = "keep",
        order: Order | None = None,
        dp_rank: int = 0,
        dp_size: int = 1,
        allow_appended: bool = False,
    ) -> None:
        super().__init__(batch_size, seed=seed, shuffle=shuffle, dp_rank=dp_rank, dp_size=dp_size)
        self._growth = Growth([(0, checked_length(examples))])
        self._data_fingerprint = getattr(examples, "fingerprint", None)
        self._fingerprints: dict[int, dict[str, Any]] = {}  # by the number of examples
        self._allow_appended = checked_bool("allow_appended", allow_appended)
        self._tail = tail
        checked_choice("tail", tail, ("keep", "drop", "wrap"))
        if order is not None and not callable(order):
            raise TypeError(f"order must be a function of (epoch, rng), got {order!r}")
        self._user_order = order
        self._user_latest: tuple[int, Indices] | None = None
        self._user_lengths: dict[int, int] = {}
        self._reshuffles: list[tuple[int, int]] = []
        self._latest_order: tuple[Any, EpochOrder] | None = None
        self._num_steps(0)

    def _fingerprint(self, num_examples: int) -> dict[str, Any]:
        """Return what is compared of the first so many examples, as JSON."""
        make = self._data_fingerprint
        return {"fingerprint": make(num_examples) if callable(make) else None}

    def _settings(self) -> dict[str, Any]:
        settings = super()._settings()
        if self._tail != "keep":
            settings["tail"] = self._tail
        if self._user_order is not None:
            settings["order"] = KindAndSize(self._user_order)
        return settings

    @property
    def num_examples(self) -> int:
        """The length of the dataset that the indices are of."""
        return self._growth.last

    def reshuffle(self) -> None:
        """Put the rest of the epoch, from the next ``iter()``'s position on, in a new order.

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
        self._reshuffles = [*self._reshuffles, (epoch, step)]

    def _num_examples(self, epoch: int) -> int:
        if self._user_order is None:
            return self._growth.at(epoch)
        if epoch not in self._user_lengths:
            self._user_lengths[epoch] = len(self._users(epoch))
        return self._user_lengths[epoch]

    def _start(self, epoch: int) -> int:
        """Return the number of examples in all epochs before one."""
        if self._user_order is None:
            return self._growth.before(epoch)
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
                f"dp_size={self._least_examples}: a rank would have none; use tail='drop' or "
                "'wrap', or another batch_size"
            )
        return full + (rest > 0)

    def _num_carried(self, epoch: int) -> int:
        """Return the number of examples of earlier epochs in the first batch of an epoch."""
        return self._start(epoch) % self._num_global if self._tail == "wrap" else 0

    def _users(self, epoch: int) -> Indices:
        """Return the indices of an epoch from the user's function."""
        if self._user_latest is None or self._user_latest[0] != epoch:
            assert self._user_order is not None
            found = self._user_order(epoch, seeded_generator(self._seed, epoch))
            self._user_latest = epoch, checked_order(found, epoch, self._growth.at(epoch))
        return self._user_latest[1]

    def _order(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch after its reshuffles; the latest one is kept."""
        carried, size = self._num_carried(epoch), self._num_examples(epoch)
        steps = [step for e, step in self._reshuffles if e == epoch]
        done = [max(step * self._num_global - carried, 0) for step in steps]
        kept, key = self._latest_order, (epoch, size, done)
        if kept is not None and kept[0] == key:
            return kept[1]
        words = self._seed, epoch
        if self._user_order is not None:
            order: EpochOrder = ArrayOrder(self._users(epoch), words, reshuffled_after=done)
        else:
            order = epoch_order(size, self._shuffle, words, reshuffled_after=done)
        self._latest_order = key, order
        return order

    def _carried(self, epoch: int) -> Indices:
        """Return the examples of earlier epochs in the first batch of an epoch: int64, a copy."""
        missing, parts = self._num_carried(epoch), [np.zeros(0, dtype=np.int64)]
        while missing:
            epoch -= 1
            size = self._num_examples(epoch)
            parts.insert(0, self._order(epoch).take(max(size - missing, 0), size))
            missing -= len(parts[0])
        return np.concatenate(parts)

    def _plan(self, epoch: int, step: int) -> Plan:
        # of two orders the second is kept; after step 0 nobody asks what was carried
        carried = self._carried(epoch) if step == 0 else np.zeros(self._num_carried(epoch), int)
        return partial(self._batch, carried, self._order(epoch))

    def _batch(self, carried: Indices, order: EpochOrder, step: int) -> Indices:
        start = step * self._num_global - len(carried)
        batch = order.take(max(start, 0), start + self._num_global)
        return np.concatenate([carried, batch]) if start < 0 else batch

    def _steps_of(self, example: int, epoch: int) -> list[int]:
        found = {0} if (self._carried(epoch) == example).any() else set()
        before, num_steps = self._num_carried(epoch), self._num_steps(epoch)
        places = self._order(epoch).places(example)
        found |= {(place + before) // self._num_global for place in places}
        return sorted(step for step in found if step < num_steps)

    def _jump(self, epoch: int, step: int) -> None:
        super()._jump(epoch, step)
        self._reshuffles = [at for at in self._reshuffles if at <= (epoch, step)]

    def _fits(self, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
        growth = self._growth if like is None else Growth.of_state(like["num_examples"])
        known = growth.last
        if known not in self._fingerprints:
            self._fingerprints[known] = self._fingerprint(known)
        own = {"tail": self._tail, "custom_order": self._user_order is not None}
        fits = {**own, **super()._fits(like), **self._fingerprints[known]}
        if like is not None and (like["fingerprint"] is None or fits["fingerprint"] is None):
            fits["fingerprint"] = like["fingerprint"]  # one of the two does not know
        return fits

    def _extra(self, epoch: int, step: int) -> dict[str, Any]:
        made = [list(at) for at in self._reshuffles if at <= (epoch, step)]
        return {"num_examples": self._growth.as_state(), "reshuffles": made}

    def _check_fits(self, state: Mapping[str, Any], epoch: int, step: int) -> None:
        growth = Growth.of_state(state["num_examples"])
        was, now = growth.last, self._growth.last
        if was > now or (was < now and not self._allow_appended):
            hint = "examples were taken away; " + NEW_RUN
            if was < now:
                hint = (
                    "if they were added at the end, build the sampler with allow_appended=True: "
                    "the running epoch keeps its order, and the next one has them"
                )
            raise StateError(f"state is of {was} examples, the data has {now}; {hint}")
        if was < now and self._user_order is not None:
            raise StateError(
                f"state is of {was} examples, the data has {now}; allow_appended=True cannot keep "
                "the running epoch's order, which order= decides: finish the epoch with the data "
                "of the saved run"
            )
        super()._check_fits(state, epoch, step)
        self._growth = growth.to(now, from_epoch=epoch + (step > 0))  # the running one keeps its

    def _load_extra(self, state: Mapping[str, Any], epoch: int, step: int) -> None:
        records = state["reshuffles"]
        if not are_pairs(records):
            raise damaged_state(f"reshuffles={records!r}, not a list of [epoch, step]")
        names = "a reshuffle's epoch", "a reshuffle's step"
        places = [(state_int(names[0], e), state_int(names[1], s)) for e, s in records]
        inside = all(at <= (epoch, step) for at in places)
        if not inside or places != sorted(places) or any(s > self._num_steps(e) for e, s in places):
            raise damaged_state(
                f"reshuffles at {records!r}, which cannot all lie, in order, before its position, "
                f"epoch {epoch} step {step}"
            )
        self._reshuffles = places


class PrefetchingSampler(OrderedSampler):
    """Batches of one dataset's indices: shuffled by (seed, epoch), sharded, resumable.

    Args:
        examples: their number, or anything with ``len()``. If it has a ``fingerprint``, as a
            TokenizedDataset has, a state is refused by other data of the same size.
        batch_size: examples of a step over all ranks. Rank r gets the r-th contiguous part.
        shuffle, seed: an epoch is in an order that is a function of (seed, epoch), or in sequence
            (False). "keyed" is a shuffled order in O(1) memory, for very many examples.
        tail: the examples after the last full batch make a short batch ("keep"), are left out
            ("drop"), or begin the next epoch's first batch ("wrap").
        order: ``order(epoch, rng)`` returns the indices of an epoch, which may repeat or be left
            out. It must be a pure function; ``rng`` is seeded by (seed, epoch).
        dp_rank, dp_size: which part of each batch is yielded, as a list of Python ints.
        allow_appended: a state of fewer examples loads, if these are the first ones here. The
            running epoch keeps its order, and the next one has all.

    The ``state_dict`` is small JSON, the same on all ranks, and loads on any number of them. More
    in docs/loading.md.

    Raises:
        TypeError, ValueError: an argument is wrong, an epoch has no step to drop to, or a kept tail
            has fewer examples than there are ranks.

    >>> sampler = PrefetchingSampler(5, batch_size=2, shuffle=False, tail="wrap")
    >>> [list(sampler), list(sampler)]
    [[[0, 1], [2, 3]], [[4, 0], [1, 2], [3, 4]]]
    """

    def __repr__(self) -> str:
        return self._shown(str(self.num_examples))
