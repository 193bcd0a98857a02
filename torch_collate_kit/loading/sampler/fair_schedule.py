"""The rule that decides which source the next example comes from, and what it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from torch_collate_kit._checks import checked_lengths
from torch_collate_kit.loading.sampler.arguments import Indices, checked_length
from torch_collate_kit.loading.sampler.orders import EpochOrder, epoch_order


class Mark(NamedTuple):
    """How far a mixture has come: the examples and the units taken from each source."""

    taken: tuple[int, ...]
    used: tuple[int, ...]


class Mixture:
    """Sources with weights; a unit is an example, or a token when ``lengths`` are given.

    Exact: the weights are integers here, and so is all that is compared.
    """

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
        self.longest = max(int(n.max()) for n in lengths) if lengths else 1
        self._seed, self._shuffle = seed, shuffle
        self._offsets = [sum(self.sizes[:source]) for source in range(len(self.sizes))]
        self._orders: dict[int, tuple[int, EpochOrder]] = {}

    def order(self, source: int, turn: int) -> EpochOrder:
        """The order in which a source is read for the ``turn``-th time."""
        kept = self._orders.get(source)
        if kept is None or kept[0] != turn:
            order = epoch_order(self.sizes[source], self._shuffle, (self._seed, source, turn))
            kept = self._orders[source] = turn, order
        return kept[1]

    def index(self, source: int, number: int) -> int:
        """The index, over all sources, of the ``number``-th example taken from a source."""
        turn, at = divmod(number, self.sizes[source])
        return self._offsets[source] + int(self.order(source, turn).take(at, at + 1)[0])

    def source_of(self, example: int) -> tuple[int, int]:
        """The source that an index over all sources is of, and the index there."""
        if example >= sum(self.sizes):
            raise ValueError(
                f"example {example} does not exist: the {sum(self.sizes)} examples of all sources "
                f"have indices 0 to {sum(self.sizes) - 1}"
            )
        source = next(i for i, at in reversed(list(enumerate(self._offsets))) if at <= example)
        return source, example - self._offsets[source]

    def has(self, source: int, example: int, first: int, last: int) -> bool:
        """Whether its ``first``-th to ``last``-th example, inclusive, are once this one."""
        size = self.sizes[source]
        turns = range(first // size, last // size + 1)
        places = (turn * size + self.order(source, turn).places(example)[0] for turn in turns)
        return any(first <= place <= last for place in places)

    def units(self, source: int, number: int) -> int:
        """Units of the ``number``-th example taken from a source."""
        if self.lengths is None:
            return 1
        turn, at = divmod(number, self.sizes[source])
        return int(self.lengths[source][self.order(source, turn).take(at, at + 1)[0]])

    def used(self, taken: Sequence[int]) -> tuple[int, ...]:
        """Units in the first ``taken`` examples of each source."""
        if self.lengths is None:
            return tuple(taken)
        total = []
        for source, number in enumerate(taken):
            turn, at = divmod(number, self.sizes[source])
            begun = self.lengths[source][self.order(source, turn).take(0, at)]
            total.append(turn * self.num_units[source] + int(begun.sum()))
        return tuple(total)

    def is_fair(self, used: Sequence[int]) -> bool:
        """Whether every source is within one longest example of its share."""
        shares, done = sum(self.weights), sum(used)
        return all(
            abs(units * shares - weight * done) <= self.longest * shares
            for units, weight in zip(used, self.weights, strict=True)
        )

    def num_examples(self, *, last: bool) -> Fraction:
        """Examples until the first (or the last) source has been read once, on average."""
        shares = sum(self.weights)
        turns = [Fraction(u, w) for u, w in zip(self.num_units, self.weights, strict=True)]
        turn = max(turns) if last else min(turns)  # in units of all sources: times shares
        sources = zip(self.sizes, self.num_units, self.weights, strict=True)
        per_unit = sum((Fraction(n * w, u * shares) for n, u, w in sources), Fraction())
        return turn * shares * per_unit


class Cursor:
    """A place in the stream of a mixture that moves on, one example at a time."""

    def __init__(self, mixture: Mixture, mark: Mark) -> None:
        self._mixture = mixture
        self._taken, self._used = list(mark.taken), list(mark.used)
        self._done, self._shares = sum(mark.used), sum(mixture.weights)
        sources = range(len(mixture.weights))
        self._next = [mixture.units(source, self._taken[source]) for source in sources]

    def mark(self) -> Mark:
        return Mark(tuple(self._taken), tuple(self._used))

    def picks(self, count: int) -> list[tuple[int, int]]:
        """Takes ``count`` examples: the source of each, and how many were taken from it before.

        A source that the next example would put ahead by a whole example has to wait. Of the
        others, that one is next whose share reaches the end of its next example first.
        """
        weights, shares, done = self._mixture.weights, self._shares, self._done
        taken, used, following = self._taken, self._used, self._next
        by_tokens, picked = self._mixture.lengths is not None, []
        for _ in range(count):
            best, best_due, best_weight = -1, 0, 1
            for source, weight in enumerate(weights):
                units, due = following[source], used[source] + following[source]
                if used[source] * shares < weight * (done + units) and (
                    best < 0 or due * best_weight < best_due * weight
                ):
                    best, best_due, best_weight = source, due, weight
            picked.append((best, taken[best]))
            taken[best] += 1
            done += best_due - used[best]
            used[best] = best_due
            if by_tokens:
                following[best] = self._mixture.units(best, taken[best])
        self._done = done
        return picked


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
    return [weight / sum(exact) for weight in exact]


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
