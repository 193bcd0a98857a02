"""The examples of one source of a mixture, pass after pass, with the virtual time they are due."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torch_collate_kit.loading.orders.checks import Indices, Shuffle
from torch_collate_kit.loading.orders.order import EpochOrder, epoch_order
from torch_collate_kit.loading.orders.token_sums import TokenSums


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
        shuffle: Shuffle,
    ) -> None:
        self.size, self.limit = size, limit
        self._lengths, self._words, self._shuffle = lengths, words, shuffle
        self._num_units = size if lengths is None else int(lengths.sum())
        self.mean_units = self._num_units / size
        self._orders: dict[int, EpochOrder] = {}
        self._kept_sums: dict[int, TokenSums] = {}
        self._kept_firsts: dict[int, int] = {}

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
            ends = self._before(start) - self._before_stage(first) + np.cumsum(lengths)
            middles = 2 * ends - lengths
        return middles / weight

    def end(self, number: int, first: int, weight: float) -> float:
        """Return the virtual time at which the share reaches the end of so many examples."""
        if self._lengths is None:
            return 2 * (number - first) / weight
        return 2 * (self._before(number) - self._before_stage(first)) / weight

    def until(self, time: float, first: int, weight: float) -> int:
        """Count the examples that are due by a virtual time, those before ``first`` included."""
        twice = int(min(time * weight, 2.0**62))
        if self._lengths is None:
            count = first + (twice + 1) // 2
        else:
            units = self._before_stage(first) + twice // 2
            turn, rest = divmod(units, self._num_units)
            count = max(first, turn * self.size + self._sums(turn).place(rest))
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

    def _sums(self, turn: int) -> TokenSums:
        """Return the sums of tokens of a pass."""
        if turn not in self._kept_sums:
            assert self._lengths is not None
            sums = TokenSums(self._order(turn).take, self.size, self._lengths)
            kept = {of: known for of, known in self._kept_sums.items() if of == turn - 1}
            self._kept_sums = {**kept, turn: sums}
        return self._kept_sums[turn]

    def _before(self, number: int) -> int:
        """Return the tokens before an example."""
        turn, at = divmod(number, self.size)
        return turn * self._num_units + (self._sums(turn).before(at) if at else 0)

    def _before_stage(self, first: int) -> int:
        """Return the tokens before a stage, also long after the pass in which it began."""
        kept = self._kept_firsts  # one read: another thread may be at another stage
        if first not in kept:
            kept = {**dict(list(kept.items())[-7:]), first: self._before(first)}
            self._kept_firsts = kept
        return kept[first]
