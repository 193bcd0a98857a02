"""Several datasets that are read in turns by the P-fair schedule, each in orders of its own.

A unit is an example or a token. A source that the next example would put a whole example over its
share has to wait. Of the others, that one is next whose share reaches the end of its next example
first. Weights are integers and so is all that is compared.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from torch_collate_kit.loading.sampler.checks import Indices
from torch_collate_kit.loading.sampler.orders import EpochOrder, epoch_order

__all__ = ["Mixture", "Place"]

_MAX_INT64 = 2**63 - 1


class Place(NamedTuple):
    """Position in a mixture."""

    num_taken: int  # examples of all sources
    taken: tuple[int, ...]  # examples of each source
    used: tuple[int, ...]  # units of these
    following: tuple[int, ...]  # units of its next example


class Mixture:
    """Sources with weights; a unit is an example, or a token when ``lengths`` are given."""

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[Fraction] | None,
        lengths: Sequence[Indices],
        *,
        seed: int,
        shuffle: bool | str,
    ) -> None:
        self.sizes, self.lengths = list(sizes), lengths
        self.num_units = [int(n.sum()) for n in lengths] if lengths else list(sizes)
        weights = list(map(Fraction, self.num_units)) if weights is None else weights
        total = sum(weights)
        self.shares = [weight / total for weight in weights]
        self._total_weight = math.lcm(*(share.denominator for share in self.shares))
        self.weights = [int(share * self._total_weight) for share in self.shares]
        self._longest = max(int(n.max()) for n in lengths) if lengths else 1
        self._seed, self._shuffle = seed, shuffle
        self._offsets = np.cumsum([0, *self.sizes]).tolist()
        self._orders: dict[int, tuple[int, EpochOrder]] = {}

    def _order(self, source: int, turn: int) -> EpochOrder:
        """Return the order in which a source is read for the ``turn``-th time."""
        kept = self._orders.get(source)
        if kept is None or kept[0] != turn:
            order = epoch_order(self.sizes[source], self._shuffle, (self._seed, source, turn))
            kept = self._orders[source] = turn, order
        return kept[1]

    def _read(self, source: int, first: int, stop: int) -> Indices:
        """Return the indices within a source of its examples ``first`` to ``stop``."""
        parts = []
        while first < stop:
            turn, at = divmod(first, self.sizes[source])
            parts.append(self._order(source, turn).take(at, at + stop - first))
            first += len(parts[-1])
        return np.concatenate(parts)

    def numbers(self, example: int, first: Place, stop: Place) -> tuple[int, list[int]]:
        """Return the source of an index, and as which of its examples it is taken."""
        source = next(i for i, end in enumerate(self._offsets[1:]) if example < end)
        size, within = self.sizes[source], example - self._offsets[source]
        begin, end = first.taken[source], stop.taken[source]
        turns = range(begin // size, -(-end // size))
        found = [turn * size + self._order(source, turn).places(within)[0] for turn in turns]
        return source, [number for number in found if begin <= number < end]

    def take(self, place: Place, count: int) -> tuple[Indices, Place]:
        """Return the indices of the next ``count`` examples, and the place after them."""
        sources, after = self.picks(place, count)
        bounds = zip(place.taken, after.taken, strict=True)
        read = [
            self._offsets[source] + self._read(source, first, stop)
            for source, (first, stop) in enumerate(bounds)
            if first < stop
        ]
        indices = np.zeros(count, dtype=np.int64)
        indices[np.argsort(sources, kind="stable")] = np.concatenate(read)
        return indices, after

    def picks(self, place: Place, count: int) -> tuple[list[int], Place]:
        """Return the sources of the next ``count`` examples, and the place after them."""
        taken, used, following = map(list, place[1:])
        weights, shares, done, picked = self.weights, self._total_weight, sum(used), []
        for _ in range(count):
            best, best_due, best_weight = -1, 0, 1
            for source, weight in enumerate(weights):
                size, due = following[source], used[source] + following[source]
                if used[source] * shares < weight * (done + size) and (
                    best < 0 or due * best_weight < best_due * weight
                ):
                    best, best_due, best_weight = source, due, weight
            picked.append(best)
            taken[best] += 1
            done += best_due - used[best]
            used[best] = best_due
            if self.lengths:
                following[best] = self._units(best, taken[best])
        after = Place(place.num_taken + count, tuple(taken), tuple(used), tuple(following))
        return picked, after

    def after(self, place: Place, num_taken: int) -> Place:
        """Return the place after so many examples: by tokens pick by pick, by examples at once.

        By examples the rule is "earliest deadline first" on one processor at full load: the j-th
        example of a source may be taken after ``j * shares / weight`` others, and its share reaches
        its end at ``(j + 1) * shares / weight``. What is due is always taken by then. So at most
        one more of every source is: by its deadline each gets the first place, from its start on,
        that is left by what is due. It costs about 20 ns per example since the earliest of these
        starts.
        """
        if self.lengths:
            return self.picks(place, num_taken - place.num_taken)[1]
        weights, shares = self.weights, self._total_weight
        taken = [num_taken * weight // shares for weight in weights]
        starts = {
            source: taken[source] * shares // weights[source]
            for source in range(len(weights))
            if taken[source] * shares < num_taken * weights[source]
            and place.taken[source] <= taken[source]
        }
        first = max(place.num_taken, min(starts.values(), default=num_taken))
        free = self._left_over(taken, place, range(first, num_taken)) if starts else []
        for source in sorted(starts, key=lambda of: Fraction(taken[of] + 1, weights[of])):
            at = bisect_left(free, starts[source])
            if at < len(free):
                del free[at]
                taken[source] += 1
        found = tuple(map(max, taken, place.taken))
        return Place(num_taken, found, found, place.following)

    def _left_over(self, due: Sequence[int], place: Place, where: range) -> list[int]:
        """Return the places of ``where`` that the first ``due`` examples leave free."""
        weights, shares = self.weights, self._total_weight
        begun = [min(-(-where.start * w // shares), n) for w, n in zip(weights, due, strict=True)]
        if where.start > place.num_taken:  # nothing else was taken before
            num_waiting = sum(begun) - where.start
        else:
            num_waiting = sum(begun) - sum(map(min, place.taken, due))
        arrivals = np.zeros(len(where), dtype=np.int64)
        for weight, start, stop in zip(weights, begun, due, strict=True):
            if start == stop:
                continue
            after = start * shares - where.start * weight  # in 1 / weight of a place
            fits = after + (stop - start) * shares <= _MAX_INT64
            numbers = np.arange(stop - start).astype(np.int64 if fits else object)
            starts = (numbers * shares + after) // weight
            arrivals[starts.astype(np.int64)] += 1  # they are at least a place apart
        num_left = np.arange(1, len(where) + 1) - num_waiting - arrivals.cumsum()
        is_left = np.diff(np.maximum.accumulate(num_left).clip(0), prepend=0) > 0
        left: list[int] = (where.start + np.flatnonzero(is_left)).tolist()
        return left

    def place(self, taken: Sequence[int]) -> Place:
        """Return the place after so many examples of each source."""
        used, following = list(taken), [1] * len(taken)
        for source, number in enumerate(taken if self.lengths else []):
            turn, at = divmod(number, self.sizes[source])
            begun = self._lengths(source, turn, at).sum()
            used[source] = turn * self.num_units[source] + int(begun)
            following[source] = self._units(source, number)
        return Place(sum(taken), tuple(taken), tuple(used), tuple(following))

    def is_fair(self, place: Place) -> bool:
        """Return whether every source is within one longest example of its share."""
        done, shares = sum(place.used), self.shares
        over = [units - done * share for units, share in zip(place.used, shares, strict=True)]
        return all(abs(units) <= self._longest for units in over)

    def _lengths(self, source: int, turn: int, count: int) -> Indices:
        """Return the lengths of the first ``count`` examples of a turn."""
        return self.lengths[source][self._order(source, turn).take(0, count)]

    def _units(self, source: int, number: int) -> int:
        """Return the tokens of the ``number``-th example taken from a source."""
        turn, at = divmod(number, self.sizes[source])
        return int(self.lengths[source][self._order(source, turn).take(at, at + 1)[0]])

    def num_examples(self, *, last: bool) -> Fraction:
        """Return the examples until the first (or last) source has been read once, on average."""
        sources = list(zip(self.sizes, self.num_units, self.shares, strict=True))
        turns = [units / share for _, units, share in sources]  # in units of all sources
        per_unit = sum((size * share / units for size, units, share in sources), Fraction())
        return (max(turns) if last else min(turns)) * per_unit
