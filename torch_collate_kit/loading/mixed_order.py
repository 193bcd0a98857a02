"""The order of a mixture: which example of which source comes next.

An example is due when the share of its source reaches its middle; all are sorted by that number
(virtual time, as in fair queueing: Demers, Keshav & Shenker 1989). So each source is always within
half of its longest example of its share. An epoch is one array, 8 bytes per example.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sized
from fractions import Fraction
from functools import partial
from itertools import chain
from typing import Any, NoReturn, TypeAlias

import numpy as np

from torch_collate_kit._checks import checked_bool
from torch_collate_kit.loading.checks import (
    MAX_COUNT,
    Indices,
    Shuffle,
    checked_length,
    checked_word,
)
from torch_collate_kit.loading.mixture import Mixture
from torch_collate_kit.loading.orders import (
    ArrayOrder,
    EpochOrder,
    Order,
    Recent,
    ShuffledOrder,
    UserOrder,
    epoch_order,
)

AnyOrder: TypeAlias = "ShuffledOrder | MixedOrder"
_NONE = np.zeros(0, dtype=np.int64)
_MOST_ENTRIES = 2**28  # of an epoch: 2 GB


class MixedOrder(Order):
    """The order of a mixture: an ``Order``.

    With ``offsets``, int64 [examples + 1], what is ordered are the pieces ``offsets[i]:offsets[i +
    1]`` of example i, and ``lengths`` are theirs. ``taken`` of an epoch are the examples of each
    source before it.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        seed: int,
        shuffle: Shuffle,
        lengths: Indices | None = None,
        offsets: Indices | None = None,
    ) -> None:
        super().__init__(len(mixture), seed, shuffle)
        self.mixture, self._offsets = mixture, offsets
        self._bounds = mixture.offsets if offsets is None else offsets[mixture.offsets]
        self._sizes = np.diff(self._bounds).tolist()
        if mixture.by == "tokens" and lengths is None:
            lengths = mixture.num_tokens
        self._lengths = lengths if mixture.by == "tokens" else None
        self._limits = [
            MAX_COUNT if passes is None else int(passes * size)
            for size, passes in zip(self._sizes, mixture.max_passes, strict=True)
        ]
        self.taken: dict[int, list[int]] = {0: [0] * len(self._sizes)}
        self._orders = Recent[int, Indices](2)

    def size(self, epoch: int) -> int:
        """Return the number of examples of an epoch: 0 once all have been read max_passes times."""
        return len(self._order(epoch))

    def before(self, epoch: int) -> int:
        """Return the number of examples of all epochs before one."""
        return sum(self._taken(epoch))

    def _epoch(self, epoch: int) -> EpochOrder:
        return ArrayOrder(self._order(epoch), ())

    def remaining(self, epoch: int, place: int) -> dict[int, int]:
        """Return how many examples of each source with ``max_passes`` are left after a place."""
        counts = zip(self._limits, self._counted(epoch, self._order(epoch)[:place]), strict=True)
        return {i: limit - n for i, (limit, n) in enumerate(counts) if limit < MAX_COUNT}

    def check_epoch(self, epoch: int) -> None:
        """Raise ValueError if no example is left for an epoch."""
        if not self.size(epoch):
            raise ValueError(
                f"epoch {epoch} of the mixture has no example left: all sources have been read "
                "max_passes times"
            )

    def reshuffled(self, *position: int) -> NoReturn:
        """Raise ValueError: the order follows from the weights."""
        raise ValueError("a Mixture cannot be reshuffled: its order follows from its weights")

    def without_later(self, epoch: int, step: int) -> MixedOrder:
        """Return the order as it is, since it has no reshuffles."""
        return self

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the examples taken of each source before an epoch."""
        return {"taken": list(self._taken(epoch))}

    def loaded(self, state: Mapping[str, Any]) -> MixedOrder:
        """Return the order with an epoch as a state has it."""
        other = copy.copy(self)
        other.taken = {0: self.taken[0], state["epoch"]: list(state["taken"])}
        other._orders = Recent(2)
        return other

    def _taken(self, epoch: int) -> list[int]:
        if epoch not in self.taken:
            first = max(known for known in self.taken if known <= epoch)
            for at in range(first, epoch):
                self.taken[at + 1] = self._counted(at, self._order(at))
        return self.taken[epoch]

    def _counted(self, epoch: int, examples: Indices) -> list[int]:
        """Return the examples taken of each source before an epoch and with these."""
        sources = np.searchsorted(self._bounds, examples, side="right") - 1
        counts = self._taken(epoch) + np.bincount(sources, minlength=len(self._sizes))
        found: list[int] = counts.tolist()
        return found

    def _order(self, epoch: int) -> Indices:
        return self._orders.get(epoch, partial(self._made, epoch))

    def _made(self, epoch: int) -> Indices:
        order, stages = _NONE, self.mixture.stages
        for number, (_, weights) in enumerate(stages):
            following = stages[number + 1][0] if number + 1 < len(stages) else None
            done = self._num_units(order)
            most = None if following is None else following - done
            part = self._stage(epoch, weights, self._counted(epoch, order), most)
            if most is None:
                order = np.concatenate([order, part])
                break
            lengths = np.ones(len(part), np.int64) if self._lengths is None else self._lengths[part]
            place = int(np.searchsorted(np.cumsum(lengths) - lengths, most))
            order = np.concatenate([order, part[:place]])
            if place == len(part):  # the epoch ends before the next stage
                break
        return order

    def _num_units(self, examples: Indices) -> int:
        return len(examples) if self._lengths is None else int(self._lengths[examples].sum())

    def _targets(self, epoch: int, exact: list[Fraction], taken: list[int]) -> dict[int, int]:
        """Return the examples of each source in the run by which a pass of the epoch ends."""
        is_one, targets = self.mixture.stop == "first_exhausted", {}
        each = list(zip(self._sizes, self._limits, exact, taken, strict=True))
        for source, (size, limit, weight, number) in enumerate(each):
            target = (epoch + 1) * size
            if target > limit:
                target = MAX_COUNT if is_one else limit
            if number >= target and is_one:
                return {}
            if weight and number < target < MAX_COUNT:
                targets[source] = target
        if targets or taken != self._taken(epoch):
            return targets
        for source, (size, limit, weight, number) in enumerate(each):
            if weight and number < limit:  # it was read oftener than epochs count: one more pass
                targets[source] = min((number // size + 1) * size, limit)
        return targets

    def _stage(self, epoch: int, exact: list[Fraction], taken: list[int], most: Any) -> Indices:
        """Return the examples of a stage up to the end of the epoch, or at least ``most`` units."""
        scale = 2 * math.lcm(*(weight.denominator for weight in exact))  # equal times stay equal
        weights = [float(weight * scale) for weight in exact]
        targets = self._targets(epoch, exact, taken)
        if not targets:
            return _NONE
        pick = min if self.mixture.stop == "first_exhausted" else max
        end = pick(2 * self._units(i, taken[i], to) / weights[i] for i, to in targets.items())
        time = end
        if most is not None:
            longest = 1 if self._lengths is None else int(self._lengths.max())
            time = min(end, 2 * (max(most, 0) + longest * (len(weights) + 1)) / sum(weights))
        while True:
            self._check_size(exact, weights, taken, time)
            parts = [self._due(i, taken[i], w, time) for i, w in enumerate(weights) if w]
            examples: Indices = np.concatenate([examples for examples, _ in parts])
            if time >= end or self._num_units(examples) >= (most or 0) + longest:
                order = np.argsort(np.concatenate([times for _, times in parts]), kind="stable")
                return examples[order]
            time = min(end, 2 * time)  # sources that end by max_passes leave less than their share

    def _check_size(
        self, exact: list[Fraction], weights: list[float], taken: list[int], time: float
    ) -> None:
        """Check that the examples due by a time can be held in memory."""
        number = 0.0
        for i, (weight, first, stop) in enumerate(
            zip(weights, self._bounds, self._bounds[1:], strict=False)
        ):
            mean = 1.0 if self._lengths is None else float(self._lengths[first:stop].mean())
            number += min(time * weight / 2 / mean, self._limits[i] - taken[i])
        if number > _MOST_ENTRIES:
            raise ValueError(
                f"an epoch of the mixture has about {number:.3g} entries with weights "
                f"{list(map(str, exact))}, and an epoch of more than {_MOST_ENTRIES:,} is not held "
                'in memory; raise the smallest weight, or pass stop="first_exhausted" or '
                "max_passes="
            )

    def _units(self, source: int, start: int, stop: int) -> int:
        """Return the examples, or the tokens, from one example of a source to another."""
        if self._lengths is None:
            return stop - start
        size = self._sizes[source]
        begun = min(stop, start + -start % size)
        whole = (stop - begun) // size  # passes that need not be made
        ends = [*self._passes(source, start, begun)]
        ends += self._passes(source, begun + whole * size, stop)
        return whole * self._per_pass(source) + sum(map(self._num_units, ends))

    def _per_pass(self, source: int) -> int:
        """Return the examples, or the tokens, of a source."""
        if self._lengths is None:
            return int(self._sizes[source])
        return int(self._lengths[self._bounds[source] : self._bounds[source + 1]].sum())

    def _due(self, source: int, start: int, weight: float, end: float) -> tuple[Indices, Any]:
        """Return the next examples of a source that are due by a virtual time, and when."""
        found, times, before = [_NONE], [np.zeros(0)], 0
        size, stop = self._sizes[source], self._limits[source]
        surely = max(0, int(end * weight / 2 / self._per_pass(source)) - 1)  # due, joined at once
        middle = min(start + surely * size, stop)
        joined = np.concatenate([_NONE, *self._passes(source, start, middle)])
        for examples in chain([joined], self._passes(source, middle, stop)):
            lengths: Any = 1 if self._lengths is None else self._lengths[examples]
            ends = before + np.cumsum(np.broadcast_to(lengths, len(examples)))
            due = (2 * ends - lengths) / weight
            number = int(np.searchsorted(due, end, side="right"))
            before = int(np.max(ends, initial=before))
            found.append(examples[:number])
            times.append(due[:number])
            if number < len(due):
                break
        return np.concatenate(found), np.concatenate(times)

    def _passes(self, source: int, start: int, stop: int) -> Iterator[Indices]:
        """Yield the examples ``start`` to ``stop`` - 1 of a source, pass by pass."""
        size, first = self._sizes[source], int(self._bounds[source])
        while start < stop:
            turn, at = divmod(start, size)
            order = epoch_order(size, self._shuffle, (self._seed, source, turn))
            part = order.take(at, min(size, at + stop - start))
            yield first + part
            start += len(part)


def order_of(
    examples: int | Sized | Mixture,
    *,
    seed: int,
    shuffle: Shuffle,
    user: UserOrder | None,
    lengths: Indices | None = None,
    offsets: Indices | None = None,
) -> AnyOrder:
    """Return the order of a dataset or a Mixture, its arguments checked."""
    seed = checked_word("seed", seed)
    if not isinstance(shuffle, str):
        checked_bool("shuffle", shuffle)
    elif shuffle != "keyed":
        raise ValueError(f"shuffle must be True, False or 'keyed', got {shuffle!r}")
    if user is not None and not callable(user):
        raise TypeError(f"order must be a function of (epoch, rng), got {user!r}")
    if not isinstance(examples, Mixture):
        number = checked_length(examples)
        return ShuffledOrder(number, seed=seed, shuffle=shuffle, user=user, offsets=offsets)
    if user is not None:
        raise ValueError("a Mixture has an order of its own; leave out order=")
    return MixedOrder(examples, seed=seed, shuffle=shuffle, lengths=lengths, offsets=offsets)
