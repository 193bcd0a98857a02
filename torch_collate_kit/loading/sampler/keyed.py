"""A shuffled order that is computed index by index and never stored."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["KeyedPermutation"]

_NUM_ROUNDS = 12  # even, so that both halves end where they began
_Words = npt.NDArray[np.uint64]


class KeyedPermutation:
    """A permutation of ``range(size)`` in O(1) memory, chosen by ints such as (seed, epoch).

    A Feistel network (Luby & Rackoff 1988) over the next power of two; where it leaves the range it
    is applied again ("cycle walking", Black & Rogaway 2002). Its round function is the finalizer of
    SplitMix64 (Steele, Lea & Flood 2014). About 0.2 us per index, in calls of thousands.

    >>> permutation = KeyedPermutation(10, 0, 1)
    >>> shuffled = permutation(np.arange(10))
    >>> sorted(shuffled.tolist()) == list(range(10)), permutation.inverse(shuffled).tolist()
    (True, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """

    def __init__(self, size: int, *words: int) -> None:
        self._size = size
        num_bits = max(2, (size - 1).bit_length())
        self._num_low = np.uint64(num_bits // 2)
        self._masks = [_mask(num_bits - num_bits // 2), _mask(num_bits // 2)]  # high, low
        keys = np.random.SeedSequence(words).generate_state(_NUM_ROUNDS, np.uint64)
        # one mask for each key: the halves, which may differ by a bit, change places every round
        self._rounds = [(key, self._masks[i % 2]) for i, key in enumerate(keys)]

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The indices at these positions of the order: int64 of their shape."""
        return self._walked(positions, backward=False)

    def inverse(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The positions of these indices: int64 of their shape."""
        return self._walked(indices, backward=True)

    def _walked(self, values: npt.NDArray[np.int64], *, backward: bool) -> npt.NDArray[np.int64]:
        found = self._network(values.astype(np.uint64), backward)
        while (outside := np.flatnonzero(found >= self._size)).size:
            found[outside] = self._network(found[outside], backward)
        return found.astype(np.int64)

    def _network(self, values: _Words, backward: bool) -> _Words:
        """Backward the halves have changed places, and the last round is the first."""
        high, low = values >> self._num_low, values & self._masks[1]
        changed, other = (low, high) if backward else (high, low)
        for key, mask in reversed(self._rounds) if backward else self._rounds:
            changed, other = other, changed ^ (_mixed(other ^ key) & mask)
        high, low = (other, changed) if backward else (changed, other)
        return (high << self._num_low) | low


def _mask(num_bits: int) -> np.uint64:
    return np.uint64((1 << num_bits) - 1)


def _mixed(words: _Words) -> _Words:
    """The finalizer of SplitMix64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
