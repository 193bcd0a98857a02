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
# First row, number of rows, pieces placed in each of them; and again. Flat, because a tuple each
# sets off the garbage collector, which takes 80 ms in a process with torch.
_Fills = list[int]


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
    fills, num_rows = _fill_best(distinct, counts, capacity, max_pieces)
    return Rows.from_labels(order, _expand(fills), num_rows)


def _fill_best(
    distinct: list[int], counts: list[int], capacity: int, max_pieces: int | None
) -> tuple[_Fills, int]:
    """Which rows take how many pieces of each size, and the number of rows.

    Rows are grouped by free space and, where pieces a row are limited, by free slots. A group's key
    is one integer, ``space * stride + slots``, so that sorted keys are in best-fit order. Rows are
    numbered as they are opened; a group is a list of ranges of row numbers. One flat loop: calls
    would double its time, and most of the time of planning a batch is spent here.
    """
    limited = max_pieces is not None
    stride = 1 if max_pieces is None else max_pieces + 1
    empty = capacity * stride + (max_pieces or 0)
    groups: dict[int, list[range]] = {}
    keys: list[int] = []
    fills: _Fills = []
    num_rows = 0
    for size, count in zip(distinct, counts, strict=True):
        at = bisect_left(keys, size * stride)
        while count:
            is_open = at < len(keys)
            key = keys[at] if is_open else empty
            each = key // stride // size
            if limited and key % stride < each:
                each = key % stride
            num_full = count // each
            if is_open:
                rows = groups[key].pop()
            else:
                rows = range(num_rows, num_rows + (num_full or 1))
                num_rows = rows.stop
            if not num_full:  # one row takes the rest, and has room for more
                num_full, each = 1, count
            part, rest = rows, None
            if num_full < len(rows):
                part, rest = rows[:num_full], rows[num_full:]
            fills += (part.start, len(part), each)
            count -= len(part) * each
            if rest is not None:
                groups[key].append(rest)
            elif is_open and not groups[key]:
                del groups[key], keys[at]
            key -= each * (size * stride + limited)
            if key in groups:
                groups[key].append(part)
            elif not limited or key % stride:  # without a free slot a row is closed
                groups[key] = [part]
                insort(keys, key)
                at += 1  # a row that is not closed by now is too full, or count is 0
    return fills, num_rows


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
    fills: _Fills = []
    for size, count in zip(distinct, counts, strict=True):
        while count:
            node = 1
            while node < num_leaves:
                node *= 2
                node += space[node] < size
            row = node - num_leaves
            each = min(space[node] // size, slots[row], count)
            assert each > 0, "the tree has too few rows"
            fills += (row, 1, each)
            count -= each
            slots[row] -= each
            space[node] = space[node] - each * size if slots[row] else 0
            while node > 1:
                node //= 2
                space[node] = max(space[2 * node], space[2 * node + 1])
    num_rows = max(fills[::3]) + 1
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


def _expand(fills: _Fills) -> npt.NDArray[np.integer]:
    """The row of every piece, in the order in which they were placed: int [S]."""
    first, num_rows, each = np.array(fills, dtype=np.int64).reshape(-1, 3).T
    ends = np.cumsum(num_rows)
    rows = np.repeat(first - ends + num_rows, num_rows) + np.arange(ends[-1])
    return np.repeat(rows.astype(np.uint32), np.repeat(each, num_rows))
