"""Several datasets that are read in turns, each in orders of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from torch_collate_kit._checks import checked_lengths
from torch_collate_kit.loading.sampler.arguments import Indices, checked_length
from torch_collate_kit.loading.sampler.fair_schedule import Place, jump, picks
from torch_collate_kit.loading.sampler.orders import EpochOrder, epoch_order

__all__ = ["Mixture", "checked_sources"]


class Mixture:
    """Sources with weights; a unit is an example, or a token when ``lengths`` are given."""

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[Any] | None,
        lengths: Sequence[Indices] | None,
        *,
        seed: int,
        shuffle: bool | str,
    ) -> None:
        self.sizes, self.lengths = list(sizes), lengths
        self.num_units = [int(n.sum()) for n in lengths] if lengths else list(sizes)
        self.shares = _checked_shares(weights, self.num_units)
        scale = math.lcm(*(share.denominator for share in self.shares))
        self.weights = [int(share * scale) for share in self.shares]
        self._longest = max(int(n.max()) for n in lengths) if lengths else 1
        self._seed, self._shuffle = seed, shuffle
        self._offsets = np.cumsum([0, *self.sizes]).tolist()
        self._orders: dict[int, tuple[int, EpochOrder]] = {}

    def _order(self, source: int, turn: int) -> EpochOrder:
        """The order in which a source is read for the ``turn``-th time."""
        kept = self._orders.get(source)
        if kept is None or kept[0] != turn:
            order = epoch_order(self.sizes[source], self._shuffle, (self._seed, source, turn))
            kept = self._orders[source] = turn, order
        return kept[1]

    def _read(self, source: int, first: int, stop: int) -> Indices:
        """The indices within a source of the examples taken from it as the ``first``-th and on."""
        parts = []
        while first < stop:
            turn, at = divmod(first, self.sizes[source])
            parts.append(self._order(source, turn).take(at, at + stop - first))
            first += len(parts[-1])
        return np.concatenate(parts)

    def numbers(self, example: int, first: Place, stop: Place) -> tuple[int, list[int]]:
        """The source of an index over all sources, and as which of its examples it is taken."""
        source = next(i for i, end in enumerate(self._offsets[1:]) if example < end)
        size, within = self.sizes[source], example - self._offsets[source]
        begin, end = first.taken[source], stop.taken[source]
        turns = range(begin // size, -(-end // size))
        found = [turn * size + self._order(source, turn).places(within)[0] for turn in turns]
        return source, [number for number in found if begin <= number < end]

    def take(self, place: Place, count: int) -> tuple[Indices, Place]:
        """The next ``count`` examples, as indices over all sources, and the place after them."""
        sources, after = self._picks(place, count)
        bounds = zip(place.taken, after.taken, strict=True)
        read = [
            self._offsets[source] + self._read(source, first, stop)
            for source, (first, stop) in enumerate(bounds)
            if first < stop
        ]
        indices = np.zeros(count, dtype=np.int64)
        indices[np.argsort(sources, kind="stable")] = np.concatenate(read)
        return indices, after

    def after(self, place: Place, num_taken: int) -> Place:
        """The place after so many examples: at once, or by tokens pick by pick."""
        if self.lengths:
            return self._picks(place, num_taken - place.num_taken)[1]
        return jump(self.weights, place, num_taken)

    def _picks(self, place: Place, count: int) -> tuple[list[int], Place]:
        return picks(self.weights, place, count, self._units if self.lengths else None)

    def place(self, taken: Sequence[int]) -> Place:
        """The place after so many examples of each source."""
        used, following = list(taken), [1] * len(taken)
        for source, number in enumerate(taken if self.lengths else []):
            turn, at = divmod(number, self.sizes[source])
            begun = self._lengths(source, turn, at).sum()
            used[source] = turn * self.num_units[source] + int(begun)
            following[source] = self._units(source, number)
        return Place(sum(taken), tuple(taken), tuple(used), tuple(following))

    def ahead(self, place: Place) -> list[int]:
        """The units of all sources, and by how many of them each one is ahead of its share."""
        done, shares = sum(place.used), sum(self.weights)
        used = zip(place.used, self.weights, strict=True)
        return [done, *(units - done * weight // shares for units, weight in used)]

    def taken(self, ahead: Sequence[int]) -> list[int]:
        """The examples of each source at the place of which this is ``ahead``."""
        done, shares = ahead[0], sum(self.weights)
        units = zip(ahead[1:], self.weights, strict=True)
        found = [max(0, done * weight // shares + more) for more, weight in units]
        for source, used in enumerate(found if self.lengths else []):
            turn, rest = divmod(used, self.num_units[source])
            ends = self._lengths(source, turn, self.sizes[source]).cumsum()
            at = int(np.searchsorted(ends, rest, side="right"))
            found[source] = turn * self.sizes[source] + at
        return found

    def is_fair(self, place: Place) -> bool:
        """Whether every source is within one longest example of its share."""
        done, shares = sum(place.used), self.shares
        ahead = [units - done * share for units, share in zip(place.used, shares, strict=True)]
        return all(abs(units) <= self._longest for units in ahead)

    def _lengths(self, source: int, turn: int, count: int) -> Indices:
        """Of the first ``count`` examples of a turn."""
        assert self.lengths is not None
        return self.lengths[source][self._order(source, turn).take(0, count)]

    def _units(self, source: int, number: int) -> int:
        """Tokens of the ``number``-th example taken from a source."""
        assert self.lengths is not None
        turn, at = divmod(number, self.sizes[source])
        return int(self.lengths[source][self._order(source, turn).take(at, at + 1)[0]])

    def num_examples(self, *, last: bool) -> Fraction:
        """Examples until the first (or the last) source has been read once, on average."""
        shares = sum(self.weights)
        turns = [Fraction(u, w) for u, w in zip(self.num_units, self.weights, strict=True)]
        turn = max(turns) if last else min(turns)  # in units of all sources: times shares
        sources = zip(self.sizes, self.num_units, self.weights, strict=True)
        per_unit = sum((Fraction(n * w, u * shares) for n, u, w in sources), Fraction())
        return turn * shares * per_unit


def _checked_shares(weights: Sequence[Any] | None, default: Sequence[int]) -> list[Fraction]:
    """The weights as fractions that add up to 1; a float means the decimal it is written as."""
    if weights is None:
        weights = default
    if isinstance(weights, (str, bytes)) or not hasattr(weights, "__len__"):
        raise TypeError(
            f"weights must be a sequence with a number for each source, got {weights!r}"
        )
    if len(weights) != len(default):
        raise ValueError(
            f"weights must have one number for each of the {len(default)} sources, "
            f"got {len(weights)}"
        )
    exact = []
    for source, weight in enumerate(weights):
        try:
            exact.append(Fraction(str(weight)))
        except (ValueError, ZeroDivisionError):
            exact.append(Fraction(0))
        if isinstance(weight, (bool, str)) or exact[-1] <= 0:
            raise ValueError(
                f"weights[{source}] must be a finite number above 0, got {weight!r}; "
                "leave a source out that is not to be used"
            )
    total = sum(exact)
    return [weight / total for weight in exact]


def checked_sources(
    sources: Sequence[Any], lengths: Sequence[Any] | None, by: str
) -> tuple[list[int], list[Indices] | None]:
    """Examples of each source, and, by tokens, each example's length."""
    if isinstance(sources, (str, bytes)) or not hasattr(sources, "__len__") or not len(sources):
        raise ValueError(
            f"sources must be a sequence of at least one dataset or number of examples, "
            f"got {sources!r}"
        )
    sizes = [checked_length(source, f"sources[{i}]") for i, source in enumerate(sources)]
    if by == "examples":
        if lengths is not None:
            raise ValueError("lengths are used by='tokens' only, got lengths with by='examples'")
        return sizes, None
    if lengths is None:
        lengths = [getattr(source, "lengths", None) for source in sources]
    if len(lengths) != len(sizes):
        raise ValueError(
            f"lengths must have one entry for each of the {len(sizes)} sources, got {len(lengths)}"
        )
    arrays = []
    for source, (size, given) in enumerate(zip(sizes, lengths, strict=True)):
        if given is None:
            raise ValueError(
                f"by='tokens' needs the length of every example, and sources[{source}] has no "
                "lengths; pass lengths=[...], one sequence of ints for each source"
            )
        try:
            array = checked_lengths(given)
        except (TypeError, ValueError) as error:
            raise type(error)(f"lengths[{source}]: {error}") from error
        if len(array) != size:
            raise ValueError(
                f"lengths[{source}] must have one int for each of the {size} examples of "
                f"sources[{source}], got {len(array)}"
            )
        arrays.append(array)
    return sizes, arrays
