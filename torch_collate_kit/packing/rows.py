"""Pieces in rows: the partition that packers return, the limits of a row, and sums over rows."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Sizes: TypeAlias = tuple[Ints, Ints]
"""Cells and patches of pieces, or their costs in both parts of a model: int64 [S] each."""


class Limits(NamedTuple):
    """The most that a row may hold."""

    tokens: int  # cells
    patches: int
    pieces: int | None = None  # none for no limit
    reserved: int = 0  # cells that a row without an image keeps free, for a dummy image

    @property
    def text(self) -> int:
        """Cells that a row without an image may fill."""
        return self.tokens - self.reserved


class Pieces(NamedTuple):
    """Parts of examples in the order of the rows of a batch; int64 each."""

    examples: np.ndarray  # [S] the example that each piece is taken from
    starts: np.ndarray  # [S] its first token there; not 0 only after a split
    lengths: np.ndarray  # [S] its tokens
    row_offsets: np.ndarray  # [R + 1] row r holds the pieces row_offsets[r]:row_offsets[r + 1]


class Rows(NamedTuple):
    """A partition of numbered pieces: row r holds ``order[offsets[r]:offsets[r + 1]]``."""

    order: Ints  # int64 [S], piece numbers listed row by row
    offsets: Ints  # int64 [R + 1]

    @classmethod
    def from_labels(cls, order: Ints, row_of: npt.NDArray[np.integer], num_rows: int) -> Rows:
        """Group by row: piece ``order[i]`` goes to row ``row_of[i]``; order is kept in a row."""
        offsets = running_sum(np.bincount(row_of, minlength=num_rows))
        return cls(order[stable_argsort(row_of, num_rows)], offsets)

    def labels(self) -> Ints:
        """Return the row of every entry of ``order``: int64 [S]."""
        return np.arange(len(self.offsets) - 1).repeat(self.counts())

    def counts(self) -> Ints:
        """Return the number of pieces of each row: int64 [R]."""
        return self.offsets[1:] - self.offsets[:-1]  # np.diff takes ten times as long to begin

    def take(self, row_indices: Ints) -> Rows:
        """Return the rows ``row_indices``, in that order. A copy."""
        counts = self.counts()[row_indices]
        offsets = running_sum(counts)
        shift = (self.offsets[row_indices] - offsets[:-1]).repeat(counts)
        return Rows(self.order[np.arange(offsets[-1]) + shift], offsets)

    def totals(self, values: Ints) -> Ints:
        """Sum ``values`` (int64 [S], by piece number) over each row: int64 [R]."""
        return row_sums(values[self.order], self.offsets)


def row_sums(values: Ints, offsets: Ints) -> Ints:
    """Sum each row of values listed row by row: row r is ``offsets[r]:offsets[r + 1]``."""
    sums = running_sum(values)[offsets]
    return sums[1:] - sums[:-1]


def running_sum(values: npt.NDArray[np.integer] | npt.NDArray[np.bool_]) -> Ints:
    """Sum the values before each place, and all of them: int64, one entry more than values."""
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    values.cumsum(out=sums[1:])
    return sums


def stable_argsort(keys: npt.NDArray[np.integer], num_keys: int) -> Ints:
    """Sort integers in ``range(num_keys)`` stably: the places, int64, in ascending order.

    NumPy sorts 16-bit integers by radix, wider ones by comparison: two 16-bit passes over 32-bit
    keys are several times faster than one pass of the comparison sort.
    """
    if num_keys <= 1 << 16:
        return np.argsort(keys.astype(np.uint16), kind="stable")
    if num_keys > 1 << 32:
        return np.argsort(keys, kind="stable")
    low = np.argsort((keys & 0xFFFF).astype(np.uint16), kind="stable")
    high = (keys >> 16).astype(np.uint16)
    return low[np.argsort(high[low], kind="stable")]
