"""The row-filling algorithms: sizes in, rows out.

All of them take ``sizes``, int64 [S], the aligned piece lengths, each in 1..capacity, and return
``Rows``. Best fit and first fit treat all pieces of one size together, so what they cost depends on
the number of distinct sizes more than on the number of pieces. There is at least one piece.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Rows", "best_fit_decreasing", "first_fit_decreasing", "sequential", "stable_argsort"]

_Ints = npt.NDArray[np.int64]
_Fill = tuple[int, int, int]  # first row, number of rows, pieces placed in each of them


class Rows(NamedTuple):
    """A partition of pieces into rows: row r holds ``order[offsets[r]:offsets[r + 1]]``."""

    order: _Ints
    """int64 [S], piece numbers listed row by row."""
    offsets: _Ints
    """int64 [R + 1]."""

    @classmethod
    def from_labels(cls, order: _Ints, row_of: npt.NDArray[np.integer], num_rows: int) -> Rows:
        """Group by row: piece ``order[i]`` goes to row ``row_of[i]``; order is kept in a row."""
        offsets = np.zeros(num_rows + 1, dtype=np.int64)
        np.cumsum(np.bincount(row_of, minlength=num_rows), out=offsets[1:])
        return cls(order[stable_argsort(row_of, num_rows)], offsets)

    def labels(self) -> _Ints:
        """The row of every entry of ``order``: int64 [S]."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def take(self, row_indices: _Ints) -> Rows:
        """The rows ``row_indices``, in that order. A copy."""
        counts = np.diff(self.offsets)[row_indices]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        shift = np.repeat(self.offsets[row_indices] - offsets[:-1], counts)
        return Rows(self.order[np.arange(offsets[-1]) + shift], offsets)

    def totals(self, values: _Ints) -> _Ints:
        """Sum of ``values`` (int64 [S], by piece number) over each row: int64 [R]."""
        sums = np.concatenate([[0], np.cumsum(values[self.order])])
        return np.diff(sums[self.offsets])


def stable_argsort(keys: npt.NDArray[np.integer], num_keys: int) -> _Ints:
    """Stable argsort of integers in ``range(num_keys)``: int64, the shape of ``keys``.

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


def best_fit_decreasing(sizes: _Ints, capacity: int, max_pieces: int | None) -> Rows:
    """Longest piece first, each into the fullest row that still has room for it.

    Source: D. S. Johnson, "Near-optimal bin packing algorithms" (1973): at most 11/9 of the best
    possible number of rows + 6/9. Packing by length histogram: Krell et al., "Efficient sequence
    packing without cross-contamination" (2021).

    The result is exactly that of placing the pieces one by one. A row that takes a piece of some
    size is then the fullest one with room, so it takes the next piece of that size as well, until
    too little is free: rows with equal free space each take ``space // size`` at once. With
    ``max_pieces``, of equally full rows the one with the fewest free slots comes first.

    >>> rows = best_fit_decreasing(np.array([4, 6, 3, 7]), 10, None)
    >>> rows.order.tolist(), rows.offsets.tolist()
    ([3, 2, 1, 0], [0, 2, 4])
    """
    order, distinct, counts = _histogram(sizes, capacity)
    open_rows = _OpenRows(capacity, max_pieces)
    for size, count in zip(distinct, counts, strict=True):
        open_rows.place(size, count)
    return Rows.from_labels(order, _expand(open_rows.fills), open_rows.num_rows)


class _OpenRows:
    """Rows grouped by free space and, where pieces a row are limited, by free slots.

    A group's key is one integer, ``space * stride + slots``, so that sorted keys are in best-fit
    order. Rows are numbered as they are opened; a group is a list of ranges of row numbers.
    """

    def __init__(self, capacity: int, max_pieces: int | None) -> None:
        self.fills: list[_Fill] = []
        self.num_rows = 0
        self._limited = max_pieces is not None
        self._stride = 1 if max_pieces is None else max_pieces + 1
        self._empty = capacity * self._stride + (max_pieces or 0)
        self._groups: dict[int, list[range]] = {}
        self._keys: list[int] = []

    def place(self, size: int, count: int) -> None:
        """Put ``count`` pieces of ``size`` into the fullest rows that fit, then into new rows."""
        moved: list[tuple[int, range]] = []
        first = last = bisect_left(self._keys, size * self._stride)
        while count and last < len(self._keys):
            key = self._keys[last]
            count = self._fill(self._groups[key], key, size, count, moved)
            if self._groups[key]:
                break
            del self._groups[key]
            last += 1
        del self._keys[first:last]
        if count:
            num_new = -(-count // self._num_fit(self._empty, size))
            new_rows = range(self.num_rows, self.num_rows + num_new)
            self._fill([new_rows], self._empty, size, count, moved)
            self.num_rows += num_new
        for key, rows in moved:
            if self._limited and key % self._stride == 0:
                continue  # no slot left: the row is closed
            if key not in self._groups:
                self._groups[key] = []
                insort(self._keys, key)
            self._groups[key].append(rows)

    def _num_fit(self, key: int, size: int) -> int:
        """How many pieces of ``size`` go into one row of group ``key``."""
        num_fit = key // self._stride // size
        return min(num_fit, key % self._stride) if self._limited else num_fit

    def _fill(
        self, group: list[range], key: int, size: int, count: int, moved: list[tuple[int, range]]
    ) -> int:
        """Fill the rows of one group, taking them out of it; returns how many pieces are left."""
        each = self._num_fit(key, size)
        price = size * self._stride + self._limited  # what one piece takes off the key
        while count and group:
            rows = group.pop()
            num_full = min(len(rows), count // each)
            if num_full:
                self.fills.append((rows.start, num_full, each))
                moved.append((key - each * price, rows[:num_full]))
                count -= num_full * each
                rows = rows[num_full:]
            if rows and 0 < count < each:
                self.fills.append((rows.start, 1, count))
                moved.append((key - count * price, rows[:1]))
                rows, count = rows[1:], 0
            if rows:
                group.append(rows)
        return count


def first_fit_decreasing(sizes: _Ints, capacity: int, max_pieces: int | None) -> Rows:
    """Longest piece first, each into the earliest opened row that has room for it.

    Source: D. S. Johnson (1973), as for ``best_fit_decreasing``, with the same bound. A binary tree
    over the rows, each node the most free space below it, finds the earliest row with room in
    log2(rows) steps; the row takes as many pieces of the same size as fit.

    >>> rows = first_fit_decreasing(np.array([4, 6, 3, 7]), 10, None)
    >>> rows.order.tolist(), rows.offsets.tolist()
    ([3, 2, 1, 0], [0, 2, 4])
    """
    order, distinct, counts = _histogram(sizes, capacity)
    # Any two rows with free slots hold more than one capacity together; the others hold max_pieces.
    most_rows = 2 * int(sizes.sum()) // capacity + 2 + len(sizes) // (max_pieces or len(sizes))
    num_leaves = 1 << (most_rows - 1).bit_length()
    space = [capacity] * (2 * num_leaves)
    slots = [max_pieces or len(sizes)] * num_leaves
    fills: list[_Fill] = []
    for size, count in zip(distinct, counts, strict=True):
        while count:
            node = 1
            while node < num_leaves:
                node *= 2
                node += space[node] < size
            row = node - num_leaves
            each = min(space[node] // size, slots[row], count)
            assert each > 0, "the tree has too few rows"
            fills.append((row, 1, each))
            count -= each
            slots[row] -= each
            space[node] = space[node] - each * size if slots[row] else 0
            while node > 1:
                node //= 2
                space[node] = max(space[2 * node], space[2 * node + 1])
    num_rows = max(row for row, _, _ in fills) + 1
    return Rows.from_labels(order, _expand(fills), num_rows)


def sequential(sizes: _Ints, capacity: int, max_pieces: int | None) -> Rows:
    """Next fit: pieces in the order given, a new row whenever the next one does not fit.

    >>> sequential(np.array([4, 6, 3, 7, 1]), 10, None).offsets.tolist()
    [0, 2, 4, 5]
    """
    sums = np.concatenate([[0], np.cumsum(sizes)])
    row_end = np.searchsorted(sums, sums[:-1] + capacity, side="right") - 1
    if max_pieces is not None:
        row_end = np.minimum(row_end, np.arange(len(sizes)) + max_pieces)
    next_start: list[int] = row_end.tolist()
    offsets = [0]
    while offsets[-1] < len(sizes):
        offsets.append(next_start[offsets[-1]])
    return Rows(np.arange(len(sizes)), np.array(offsets, dtype=np.int64))


def _histogram(sizes: _Ints, capacity: int) -> tuple[_Ints, list[int], list[int]]:
    """Piece numbers by size, longest first, ties by number; the distinct sizes; their counts."""
    order = stable_argsort(capacity - sizes, capacity)
    ordered = sizes[order]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(ordered)) + 1])
    counts = np.diff(starts, append=len(sizes))
    return order, ordered[starts].tolist(), counts.tolist()


def _expand(fills: list[_Fill]) -> npt.NDArray[np.integer]:
    """The row of every piece, in the order in which they were placed: int [S]."""
    first, num_rows, each = np.array(fills, dtype=np.int64).T
    ends = np.cumsum(num_rows)
    rows = np.repeat(first - ends + num_rows, num_rows) + np.arange(ends[-1])
    return np.repeat(rows.astype(np.uint32), np.repeat(each, num_rows))
