"""The order of one epoch with its reshuffles: held as an array, or computed where it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from torch_collate_kit.loading.orders.checks import Indices

_NUM_ROUNDS = 12  # even, so that both halves end where they began
_Words = npt.NDArray[np.uint64]
_BLOCK = 8192  # positions computed together: a call of a keyed permutation costs 80 us


class ArrayOrder:
    """An order held in memory, 8 bytes per example.

    A reshuffle after ``num_done`` examples puts those that come later in a new order.
    """

    def __init__(
        self, indices: Indices, words: tuple[int, ...], *, reshuffled_after: Sequence[int] = ()
    ) -> None:
        # from 1: a SeedSequence drops trailing zeros
        for count, num_done in enumerate(reshuffled_after, start=1):
            rest = seeded_generator(*words, count).permutation(indices[num_done:])
            indices = np.concatenate([indices[:num_done], rest])
        self._indices = indices

    def take(self, start: int, stop: int) -> Indices:
        """Return the indices at positions ``start`` to ``stop`` - 1, or to the end: int64."""
        return self._indices[start:stop]

    def places(self, index: int) -> list[int]:
        """Return the positions of an index, ascending."""
        found: list[int] = np.flatnonzero(self._indices == index).tolist()
        return found


class KeyedOrder:
    """An order in O(1) memory, see ``KeyedPermutation``; otherwise as ``ArrayOrder``."""

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

    def take(self, start: int, stop: int) -> Indices:
        """Return the indices at positions ``start`` to ``stop`` - 1, or to the end: int64."""
        stop = min(stop, self._size)
        first, block = self._block  # one read: another thread may be at another place
        if not first <= start <= stop <= first + len(block):
            kept = block[start - first :] if first <= start else block[:0]
            first = start if len(kept) else start // _BLOCK * _BLOCK
            done = first + len(kept)  # read on, so that no position of a scan is computed twice
            rest = self._at(np.arange(done, min(self._size, max(stop, done + _BLOCK))))
            block = np.concatenate([kept, rest])
            self._block = first, block
        return block[start - first : stop - first]

    def _at(self, positions: Indices) -> Indices:
        for num_done, permutation in reversed(self._permutations):
            moved = positions >= num_done
            positions[moved] = num_done + permutation(positions[moved] - num_done)
        return positions

    def places(self, index: int) -> list[int]:
        """Return the positions of an index, ascending."""
        if index >= self._size:
            return []
        place = np.array([index])
        for num_done, permutation in self._permutations:
            if place[0] >= num_done:
                place = num_done + permutation.inverse(place - num_done)
        return [int(place[0])]


EpochOrder: TypeAlias = ArrayOrder | KeyedOrder


def seeded_generator(*words: int) -> np.random.Generator:
    """Return a generator seeded by (seed, epoch, ...)."""
    return np.random.default_rng(np.random.SeedSequence(words))


def epoch_order(
    size: int, shuffle: bool | str, words: tuple[int, ...], *, reshuffled_after: Sequence[int] = ()
) -> EpochOrder:
    """Return the order of indices 0 to ``size`` - 1, shuffled by the words or in sequence."""
    if shuffle == "keyed":
        return KeyedOrder(size, words, reshuffled_after=reshuffled_after)
    order = seeded_generator(*words).permutation(size) if shuffle else np.arange(size)
    return ArrayOrder(order, words, reshuffled_after=reshuffled_after)


class KeyedPermutation:
    """A permutation of ``range(size)`` in O(1) memory, chosen by ints such as (seed, epoch).

    A Feistel network (Luby & Rackoff 1988) over the next power of two; where it leaves the range it
    is applied again ("cycle walking", Black & Rogaway 2002). Its round function is the finalizer of
    SplitMix64 (Steele, Lea & Flood 2014). About 0.2 us per index, in calls of thousands.
    """

    def __init__(self, size: int, *words: int) -> None:
        self._size = size
        num_bits = max(2, (size - 1).bit_length())
        self._num_low = np.uint64(num_bits // 2)
        self._masks = [_mask(num_bits - num_bits // 2), _mask(num_bits // 2)]  # high, low
        keys = np.random.SeedSequence(words).generate_state(_NUM_ROUNDS, np.uint64)
        # one mask for each key: the halves, which may differ by a bit, change places every round
        self._rounds = [(key, self._masks[i % 2]) for i, key in enumerate(keys)]

    def __call__(self, positions: Indices) -> Indices:
        """Return the indices at these positions of the order: int64 of their shape."""
        return self._walked(positions, backward=False)

    def inverse(self, indices: Indices) -> Indices:
        """Return the positions of these indices: int64 of their shape."""
        return self._walked(indices, backward=True)

    def _walked(self, values: Indices, *, backward: bool) -> Indices:
        found = self._network(values.astype(np.uint64), backward)
        while (outside := np.flatnonzero(found >= self._size)).size:
            found[outside] = self._network(found[outside], backward)
        return found.astype(np.int64)

    def _network(self, values: _Words, backward: bool) -> _Words:
        """Apply all rounds, in reverse order if backward."""
        high, low = values >> self._num_low, values & self._masks[1]
        changed, other = (low, high) if backward else (high, low)
        for key, mask in reversed(self._rounds) if backward else self._rounds:
            changed, other = other, changed ^ (_mixed(other ^ key) & mask)
        high, low = (other, changed) if backward else (changed, other)
        return (high << self._num_low) | low


def _mask(num_bits: int) -> np.uint64:
    return np.uint64((1 << num_bits) - 1)


def _mixed(words: _Words) -> _Words:
    """Apply the finalizer of SplitMix64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
