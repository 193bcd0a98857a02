"""The rule that decides which source the next example comes from: the P-fair schedule.

A unit is an example or a token. A source that the next example would put ahead by a whole example
has to wait. Of the others, that one is next whose share reaches the end of its next example first.
Weights are integers and so is all that is compared.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

__all__ = ["Place", "jump", "picks"]

_MAX_INT64 = 2**63 - 1


class Place(NamedTuple):
    """How far a mixture has come."""

    num_taken: int  # examples of all sources
    taken: tuple[int, ...]  # examples of each source
    used: tuple[int, ...]  # units of these
    following: tuple[int, ...]  # units of its next example


def picks(
    weights: Sequence[int],
    place: Place,
    count: int,
    units: Callable[[int, int], int] | None,
) -> tuple[list[int], Place]:
    """The sources of the next ``count`` examples, and the place after them.

    ``units(source, number)`` are those of an example of a source; None: every example is one.
    """
    taken, used, following = map(list, place[1:])
    shares, done, picked = sum(weights), sum(used), []
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
        if units is not None:
            following[best] = units(best, taken[best])
    return picked, Place(place.num_taken + count, tuple(taken), tuple(used), tuple(following))


def jump(weights: Sequence[int], place: Place, num_taken: int) -> Place:
    """The place after ``num_taken`` examples where every example is one unit, without the picks.

    The rule is "earliest deadline first" on one processor at full load: the j-th example of a
    source may be taken after ``j * shares / weight`` others, and its share reaches its end at
    ``(j + 1) * shares / weight``. What is due is always taken by then. So at most one more of
    every source is: by its deadline each gets the first place, from its start on, that is left by
    what is due. It costs about 20 ns per example since the earliest of these starts.

    >>> start = Place(0, (0, 0), (0, 0), (1, 1))
    >>> jump([3, 1], start, 6).taken, picks([3, 1], start, 6, None)[1].taken
    ((5, 1), (5, 1))
    """
    shares, sources = sum(weights), range(len(weights))
    taken = [num_taken * weight // shares for weight in weights]
    starts = {
        source: taken[source] * shares // weights[source]
        for source in sources
        if taken[source] * shares < num_taken * weights[source]
        and place.taken[source] <= taken[source]
    }
    first = max(place.num_taken, min(starts.values(), default=num_taken))
    free = _left_over(weights, taken, place, range(first, num_taken)) if starts else []
    for source in sorted(starts, key=lambda of: Fraction(taken[of] + 1, weights[of])):
        at = bisect_left(free, starts[source])
        if at < len(free):
            del free[at]
            taken[source] += 1
    found = tuple(map(max, taken, place.taken))
    return Place(num_taken, found, found, place.following)


def _left_over(weights: Sequence[int], due: Sequence[int], place: Place, where: range) -> list[int]:
    """The places of ``where`` that are not needed for the first ``due`` examples of each source."""
    shares = sum(weights)
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
