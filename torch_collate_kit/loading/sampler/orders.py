"""The order of one epoch with its reshuffles: held as an array, or computed where it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from torch_collate_kit.loading.sampler.arguments import Indices, seeded_generator
from torch_collate_kit.loading.sampler.keyed import KeyedPermutation

__all__ = ["ArrayOrder", "EpochOrder", "KeyedOrder", "epoch_order"]

_BLOCK = 8192  # positions computed together: a call of a keyed permutation costs 80 us


class ArrayOrder:
    """An order held in memory, 8 bytes per example.

    A reshuffle after ``num_done`` examples puts those that come later in a new order.

    >>> order = ArrayOrder(np.array([2, 0, 1]), (0, 0), reshuffled_after=[2])
    >>> order.take(1, 9).tolist(), order.places(2)
    ([0, 1], [0])
    """

    def __init__(
        self, indices: Indices, words: tuple[int, ...], *, reshuffled_after: Sequence[int] = ()
    ) -> None:
        # from 1: a SeedSequence drops trailing zeros
        for count, num_done in enumerate(reshuffled_after, start=1):
            rest = seeded_generator(*words, count).permutation(indices[num_done:])
            indices = np.concatenate([indices[:num_done], rest])
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def take(self, start: int, stop: int) -> Indices:
        """The indices at positions ``start`` to ``stop`` - 1, or to the end: int64."""
        return self._indices[start:stop]

    def places(self, index: int) -> list[int]:
        """The positions at which an index comes, ascending."""
        found: list[int] = np.flatnonzero(self._indices == index).tolist()
        return found


class KeyedOrder:
    """An order in O(1) memory, see ``KeyedPermutation``; otherwise as ``ArrayOrder``.

    >>> order = KeyedOrder(5, (0, 1), reshuffled_after=[2])
    >>> indices = order.take(0, 9).tolist()
    >>> sorted(indices), order.places(indices[3])
    ([0, 1, 2, 3, 4], [3])
    """

    def __init__(
        self, size: int, words: tuple[int, ...], *, reshuffled_after: Sequence[int] = ()
    ) -> None:
        self._size = size
        self._permutations = [(0, KeyedPermutation(size, *words))]
        for count, num_done in enumerate(reshuffled_after, start=1):
            if num_done < size:
                rest = KeyedPermutation(size - num_done, *words, count)
                self._permutations.append((num_done, rest))
        self._block = 0, np.zeros(0, dtype=np.int64)  # its first position, and its indices

    def __len__(self) -> int:
        return self._size

    def take(self, start: int, stop: int) -> Indices:
        stop = min(stop, self._size)
        first, block = self._block  # one read: another thread may be at another place
        if not first <= start <= stop <= first + len(block):
            first = start // _BLOCK * _BLOCK
            block = self._at(np.arange(first, min(self._size, max(stop, first + _BLOCK))))
            self._block = first, block
        return block[start - first : stop - first]

    def _at(self, positions: Indices) -> Indices:
        for num_done, permutation in reversed(self._permutations):
            moved = positions >= num_done
            positions[moved] = num_done + permutation(positions[moved] - num_done)
        return positions

    def places(self, index: int) -> list[int]:
        if index >= self._size:
            return []
        place = np.array([index])
        for num_done, permutation in self._permutations:
            if place[0] >= num_done:
                place = num_done + permutation.inverse(place - num_done)
        return [int(place[0])]


EpochOrder: TypeAlias = ArrayOrder | KeyedOrder


def epoch_order(
    size: int, shuffle: bool | str, words: tuple[int, ...], *, reshuffled_after: Sequence[int] = ()
) -> EpochOrder:
    """Indices 0 to ``size`` - 1, shuffled by the words or in sequence.

    >>> epoch_order(3, False, (0, 0)).take(0, 3).tolist()
    [0, 1, 2]
    """
    if shuffle == "keyed":
        return KeyedOrder(size, words, reshuffled_after=reshuffled_after)
    order = seeded_generator(*words).permutation(size) if shuffle else np.arange(size)
    return ArrayOrder(order, words, reshuffled_after=reshuffled_after)
