"""The examples of one source of a mixture, pass after pass, with the virtual time they are due."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torch_collate_kit.loading.orders.checks import Indices
from torch_collate_kit.loading.orders.permutations import EpochOrder, epoch_order

_BLOCK = 1 << 16  # examples whose tokens are summed together


class SourcePasses:
    """An endless sequence of examples: pass after pass, each in an order of its own.

    Its unit is an example, or a token if ``lengths`` are given. ``limit`` is the most examples.
    Methods count examples from the start of the run; ``first`` is the first one of a stage, whose
    virtual time begins at 0, and ``weight`` twice the weight of the source in it.
    """

    def __init__(
        self,
        size: int,
        lengths: Indices | None,
        *,
        limit: int | None,
        words: tuple[int, ...],
        shuffle: bool | str,
    ) -> None:
        self.size, self.limit = size, limit
        self._lengths, self._words, self._shuffle = lengths, words, shuffle
        self._num_units = size if lengths is None else int(lengths.sum())
        self.mean_units = self._num_units / size
        self._orders: dict[int, EpochOrder] = {}
        self._sums: dict[int, Indices] = {}
        self._ends: dict[tuple[int, int], Indices] = {}

    def read(self, start: int, stop: int) -> Indices:
        """Return the indices within the source of its examples ``start`` to ``stop`` - 1."""
        parts = [np.zeros(0, dtype=np.int64)]
        while start < stop:
            turn, at = divmod(start, self.size)
            parts.append(self._order(turn).take(at, min(self.size, at + stop - start)))
            start += len(parts[-1])
        return np.concatenate(parts)

    def due(self, start: int, stop: int, first: int, weight: float) -> npt.NDArray[np.float64]:
        """Return the virtual time at which these examples are due: float64 [stop - start]."""
        if self._lengths is None:
            middles = 2 * np.arange(start - first, stop - first) + 1
        else:
            lengths = self._lengths[self.read(start, stop)]
            ends = self._before(start) - self._before(first) + np.cumsum(lengths)
            middles = 2 * ends - lengths
        return middles / weight

    def end(self, number: int, first: int, weight: float) -> float:
        """Return the virtual time at which the share reaches the end of so many examples."""
        if self._lengths is None:
            return 2 * (number - first) / weight
        return 2 * (self._before(number) - self._before(first)) / weight

    def until(self, time: float, first: int, weight: float) -> int:
        """Count the examples that are due by a virtual time, those before ``first`` included."""
        twice = int(min(time * weight, 2.0**62))
        if self._lengths is None:
            count = first + (twice + 1) // 2
        else:
            units = self._before(first) + twice // 2
            turn, rest = divmod(units, self._num_units)
            count = max(first, turn * self.size + self._count_in(turn, rest))
        limit = 2**62 if self.limit is None else self.limit
        count = min(count, limit)
        while count > first and self.due(count - 1, count, first, weight)[0] > time:
            count -= 1
        while count < limit and self.due(count, count + 1, first, weight)[0] <= time:
            count += 1
        return count

    def numbers(self, index: int, start: int, stop: int) -> list[int]:
        """Return which of the examples ``start`` to ``stop`` - 1 are one index of the source."""
        turns = range(start // self.size, -(-stop // self.size))
        found = [turn * self.size + self._order(turn).places(index)[0] for turn in turns]
        return [number for number in found if start <= number < stop]

    def _order(self, turn: int) -> EpochOrder:
        if turn not in self._orders:
            order = epoch_order(self.size, self._shuffle, (*self._words, turn))
            kept = {of: known for of, known in self._orders.items() if of == turn - 1}
            self._orders = {**kept, turn: order}
        return self._orders[turn]

    def _block_sums(self, turn: int) -> Indices:
        """Return the tokens before every block of a pass: int64 [blocks + 1]."""
        if turn not in self._sums:
            assert self._lengths is not None
            order, sums = self._order(turn), [0]
            for start in range(0, self.size, _BLOCK):
                examples = order.take(start, min(start + _BLOCK, self.size))
                sums.append(sums[-1] + int(self._lengths[examples].sum()))
            kept = {of: known for of, known in self._sums.items() if of == turn - 1}
            self._sums = {**kept, turn: np.array(sums)}
        return self._sums[turn]

    def _before(self, number: int) -> int:
        """Return the tokens before an example."""
        assert self._lengths is not None
        turn, at = divmod(number, self.size)
        if not at:
            return turn * self._num_units
        block, within = divmod(at, _BLOCK)
        start = int(self._block_sums(turn)[block])
        before = int(self._block_ends(turn, block)[within - 1]) if within else start
        return turn * self._num_units + before

    def _block_ends(self, turn: int, block: int) -> Indices:
        """Return the tokens of a pass up to the end of each example of a block: int64."""
        if (turn, block) not in self._ends:
            assert self._lengths is not None
            start = block * _BLOCK
            examples = self._order(turn).take(start, min(start + _BLOCK, self.size))
            ends = int(self._block_sums(turn)[block]) + np.cumsum(self._lengths[examples])
            latest = dict(list(self._ends.items())[-3:])
            self._ends = {**latest, (turn, block): ends}
        return self._ends[turn, block]

    def _count_in(self, turn: int, units: int) -> int:
        """Count the examples of a pass that end within so many tokens."""
        sums = self._block_sums(turn)
        block = min(int(np.searchsorted(sums, units, side="right")) - 1, len(sums) - 2)
        ends = self._block_ends(turn, block)
        return block * _BLOCK + int(np.searchsorted(ends, units, side="right"))
