"""Sums of tokens along an order, from which the place of any token follows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from torch_collate_kit.loading.orders.checks import Indices
from torch_collate_kit.packing.rows import running_sum

_BLOCK = 1 << 16  # examples whose tokens are summed together


class TokenSums:
    """The tokens before each place of an order of ``size`` examples.

    ``take(start, stop)`` returns the examples at these places, ``lengths`` are those of all. A sum
    of each block of 65,536 examples is kept, and all sums within the four blocks used last.
    """

    def __init__(self, take: Callable[[int, int], Indices], size: int, lengths: Indices) -> None:
        self._take, self._size, self._lengths = take, size, lengths
        blocks = [int(self._lengths_in(at).sum()) for at in range(-(-size // _BLOCK))]
        self._starts = running_sum(np.array(blocks, dtype=np.int64))
        self._ends: dict[int, Indices] = {}

    @property
    def total(self) -> int:
        """Tokens of all examples."""
        return int(self._starts[-1])

    def before(self, place: int) -> int:
        """Return the tokens before a place."""
        block, within = divmod(place, _BLOCK)
        return int(self._ends_in(block)[within - 1] if within else self._starts[block])

    def place(self, num_tokens: int) -> int:
        """Count the examples that end within the first so many tokens."""
        block = int(np.searchsorted(self._starts, num_tokens, side="right")) - 1
        block = min(block, len(self._starts) - 2)
        return block * _BLOCK + int(np.searchsorted(self._ends_in(block), num_tokens, side="right"))

    def _lengths_in(self, block: int) -> Indices:
        start = block * _BLOCK
        return self._lengths[self._take(start, min(start + _BLOCK, self._size))]

    def _ends_in(self, block: int) -> Indices:
        """Return the tokens up to the end of each example of a block: int64."""
        kept = self._ends  # one read: another thread may be at another block
        if block in kept:
            return kept[block]
        ends: Indices = int(self._starts[block]) + np.cumsum(self._lengths_in(block))
        self._ends = {**dict(list(kept.items())[-3:]), block: ends}
        return ends
