"""The row-filling algorithms: sizes in, rows out.

All of them take ``sizes``, int64 [S], the aligned piece lengths, each in 1..capacity, and return
``Rows``. Best fit and first fit treat all pieces of one size together, so what they cost depends on
the number of distinct sizes more than on the number of pieces. There is at least one piece.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "OpenRows",
    "Rows",
    "best_fit_decreasing",
    "first_fit_decreasing",
    "latest_ends",
    "running_sum",
    "sequential",
    "stable_argsort",
]

_Ints = npt.NDArray[np.int64]


class Rows(NamedTuple):
    """A partition of pieces into rows: row r holds ``order[offsets[r]:offsets[r + 1]]``."""

    order: _Ints
    """int64 [S], piece numbers listed row by row."""
    offsets: _Ints
    """int64 [R + 1]."""

    @classmethod
    def from_labels(cls, order: _Ints, row_of: npt.NDArray[np.integer], num_rows: int) -> Rows:
        """Group by row: piece ``order[i]`` goes to row ``row_of[i]``; order is kept in a row."""
        offsets = running_sum(np.bincount(row_of, minlength=num_rows))
        return cls(order[stable_argsort(row_of, num_rows)], offsets)

    def labels(self) -> _Ints:
        """The row of every entry of ``order``: int64 [S]."""
        return np.repeat(np.arange(len(self.offsets) - 1), self.counts())

    def counts(self) -> _Ints:
        """The pieces of each row: int64 [R]."""
        return self.offsets[1:] - self.offsets[:-1]  # np.diff takes ten times as long to begin

    def take(self, row_indices: _Ints) -> Rows:
        """The rows ``row_indices``, in that order. A copy."""
        counts = self.counts()[row_indices]
        offsets = running_sum(counts)
        shift = np.repeat(self.offsets[row_indices] - offsets[:-1], counts)
        return Rows(self.order[np.arange(offsets[-1]) + shift], offsets)

    def totals(self, values: _Ints) -> _Ints:
        """Sum of ``values`` (int64 [S], by piece number) over each row: int64 [R]."""
        sums = running_sum(values[self.order])[self.offsets]
        return sums[1:] - sums[:-1]


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


class OpenRows(NamedTuple):
    """Rows that hold pieces already: the free space of each, and its free slots for pieces."""

    space: _Ints
    """int64 [R]"""
    slots: _Ints
    """int64 [R]"""

    def fullest_last(self) -> _Ints:
        """Row numbers by descending space and slots: int64 [R]."""
        return np.lexsort((-self.slots, -self.space))


def best_fit_decreasing(
    sizes: _Ints, capacity: int, max_pieces: int | None, opened: OpenRows | None = None
) -> Rows:
    """Longest piece first, each into the fullest row that still has room for it.

    Source: D. S. Johnson, "Near-optimal bin packing algorithms" (1973): at most 11/9 of the best
    possible number of rows + 6/9. Packing by length histogram: Krell et al., "Efficient sequence
    packing without cross-contamination" (2021).

    The result is exactly that of placing the pieces one by one. A row that takes a piece of some
    size is then the fullest one with room, so it takes the next piece of that size as well, until
    too little is free: rows with equal free space each take ``space // size`` at once. With
    ``max_pieces``, of equally full rows the one with the fewest free slots comes first. ``opened``
    rows are numbered before the new ones, and a new row is opened if none of them has room.

    >>> rows = best_fit_decreasing(np.array([4, 6, 3, 7]), 10, None)
    >>> rows.order.tolist(), rows.offsets.tolist()
    ([3, 2, 1, 0], [0, 2, 4])
    """
    order, distinct, counts = _histogram(sizes)
    if opened is None:
        firsts, num_taken, each, num_rows = _fill_best(distinct, counts, capacity, max_pieces)
        return Rows.from_labels(order, _expand(firsts, num_taken, each), num_rows)
    by_space = opened.fullest_last()
    in_order = OpenRows(opened.space[by_space], opened.slots[by_space])
    firsts, num_taken, each, num_rows = _fill_best(distinct, counts, capacity, max_pieces, in_order)
    numbers = np.append(by_space, np.arange(len(by_space), num_rows))
    return Rows.from_labels(order, numbers[_expand(firsts, num_taken, each)], num_rows)


def _fill_best(
    distinct: list[int],
    counts: list[int],
    capacity: int,
    max_pieces: int | None,
    opened: OpenRows | None = None,
) -> tuple[_Ints, _Ints, _Ints, int]:
    """The fills in turn, and the number of rows.

    A fill is a run of rows, numbered as they are opened, that take ``each`` pieces of one size:
    first row, number of rows, each. The rows of a run are equally full until another fill splits
    it. It is one integer, ``first * unit + number``; run 1 is the rows that are not yet opened.
    ``opened`` rows come first, and take pieces before a new row does.

    A run's place in best-fit order is one integer, ``run - (key + 1) * unit``: ``key`` is its free
    space, or where pieces are limited ``space * stride + free slots``, and of equally full runs the
    last one comes first. Runs with room for the size at hand are a stack, best fit on top. What a
    fill leaves is below all of them and too full for that size, so it waits in a heap until sizes
    have come down to it. One flat loop over integers: calls would double its time, most of the time
    of planning a batch is spent here, and a tuple or list per run sets off the garbage collector,
    which takes 80 ms in a process with torch.
    """
    stride, closes = (1, 0) if max_pieces is None else (max_pieces + 1, 1)
    num_opened = 0 if opened is None else len(opened.space)
    num_pieces = sum(counts)
    unit = num_pieces + num_opened + 3  # more than there can be runs, or rows
    runs = [0, num_opened * unit + num_pieces + 1]
    with_room = [1 - (capacity * stride + (max_pieces or 0) + 1) * unit]
    waiting: list[int] = []
    filled: list[int] = []
    eachs: list[int] = []
    size_unit, slot_unit = stride * unit, closes * unit
    shortest = distinct[-1] * size_unit
    if opened is not None:
        keys = opened.space * stride + opened.slots * closes
        fits = (opened.space >= distinct[-1]) & (opened.slots > 0)
        # Descending keys make ascending places, and a sorted list is a heap.
        starts = np.flatnonzero(np.diff(keys, prepend=-1))
        for first, end in pairwise([*starts.tolist(), num_opened]):
            if fits[first]:
                waiting.append(len(runs) - (int(keys[first]) + 1) * unit)
                runs.append(first * unit + end - first)
    for size, count in zip(distinct, counts, strict=True):
        room = size * size_unit
        while waiting and waiting[0] < -room:
            with_room.append(heappop(waiting))
        while count:
            place = with_room[-1]
            run = place % unit
            rows = runs[run]
            each = used = 1
            if count > 1:
                each = -place // room
                if closes:
                    each = min(each, -place // unit % stride)
                if count < each:  # one row takes the rest, and has room for more
                    each = count
                else:
                    used = min(count // each, rows % unit)
            unused = rows % unit - used
            if unused:
                runs[run] = rows + used * unit - used
                rows -= unused
            else:
                del with_room[-1]
            place += len(runs) - run + each * (room + slot_unit)
            runs.append(rows)
            filled.append(rows)
            eachs.append(each)
            count -= used * each
            # A row closes without room for the shortest piece, or without a free slot.
            if place < -shortest and (not closes or -place // unit % stride):
                heappush(waiting, place)
    firsts, num_taken = np.divmod(_int_array(filled), unit)
    return firsts, num_taken, _int_array(eachs), runs[1] // unit


def first_fit_decreasing(
    sizes: _Ints, capacity: int, max_pieces: int | None, opened: OpenRows | None = None
) -> Rows:
    """Longest piece first, each into the earliest opened row that has room for it.

    Source: D. S. Johnson (1973), as for ``best_fit_decreasing``, with the same bound. A binary tree
    over the rows, each node the most free space below it, finds the earliest row with room in
    log2(rows) steps; the row takes as many pieces of the same size as fit. ``opened`` rows are
    the earliest.

    >>> rows = first_fit_decreasing(np.array([4, 6, 3, 7]), 10, None)
    >>> rows.order.tolist(), rows.offsets.tolist()
    ([3, 2, 1, 0], [0, 2, 4])
    """
    order, distinct, counts = _histogram(sizes)
    # Any two rows with free slots hold more than one capacity together; the others hold max_pieces.
    most_rows = 2 * int(sizes.sum()) // capacity + 2 + len(sizes) // (max_pieces or len(sizes))
    num_opened = 0 if opened is None else len(opened.space)
    num_leaves = 1 << (num_opened + most_rows - 1).bit_length()
    space = [capacity] * (2 * num_leaves)
    slots = [max_pieces or len(sizes)] * num_leaves
    if opened is not None:
        slots[:num_opened] = opened.slots.tolist()
        space[num_leaves : num_leaves + num_opened] = np.where(
            opened.slots > 0, opened.space, 0
        ).tolist()
        for node in range(num_leaves - 1, 0, -1):
            space[node] = max(space[2 * node], space[2 * node + 1])
    filled: list[int] = []
    eachs: list[int] = []
    for size, count in zip(distinct, counts, strict=True):
        while count:
            node = 1
            while node < num_leaves:
                node *= 2
                node += space[node] < size
            row = node - num_leaves
            each = min(space[node] // size, slots[row], count)
            assert each > 0, "the tree has too few rows"
            filled.append(row)
            eachs.append(each)
            count -= each
            slots[row] -= each
            space[node] = space[node] - each * size if slots[row] else 0
            while node > 1:
                node //= 2
                space[node] = max(space[2 * node], space[2 * node + 1])
    rows = _int_array(filled)
    labels = _expand(rows, np.ones_like(rows), _int_array(eachs))
    return Rows.from_labels(order, labels, max(num_opened, int(rows.max()) + 1))


def sequential(
    sizes: _Ints,
    capacity: int,
    max_pieces: int | None,
    patches: tuple[_Ints, int] | None = None,
) -> Rows:
    """Next fit: pieces in the order given, a new row whenever the next one does not fit.

    ``patches`` are those of each piece, and the most of a row.

    >>> sequential(np.array([4, 6, 3, 7, 1]), 10, None).offsets.tolist()
    [0, 2, 4, 5]
    """
    next_start: list[int] = latest_ends(sizes, capacity, max_pieces, patches).tolist()
    offsets = [0]
    while offsets[-1] < len(sizes):
        offsets.append(next_start[offsets[-1]])
    return Rows(np.arange(len(sizes)), np.array(offsets, dtype=np.int64))


def latest_ends(
    sizes: _Ints, capacity: int, max_pieces: int | None, patches: tuple[_Ints, int] | None
) -> _Ints:
    """Where a row that begins at each place, or at the end, must end at the latest: int64 [S + 1].

    >>> latest_ends(np.array([4, 6, 3]), 10, None, None).tolist()
    [2, 3, 3, 3]
    """
    ends = np.full(len(sizes) + 1, len(sizes))
    for values, most in ((sizes, capacity), *(() if patches is None else (patches,))):
        sums = running_sum(values)
        ends = np.minimum(ends, np.searchsorted(sums, sums + most, side="right") - 1)
    if max_pieces is not None:
        ends = np.minimum(ends, np.arange(len(sizes) + 1) + max_pieces)
    return ends


def _histogram(sizes: _Ints) -> tuple[_Ints, list[int], list[int]]:
    """Piece numbers by size, longest first, ties by number; the distinct sizes; their counts."""
    longest = int(sizes.max())
    order = stable_argsort(longest - sizes, longest)
    ordered = sizes[order]
    starts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    starts = np.concatenate([[0], starts, [len(sizes)]])
    return order, ordered[starts[:-1]].tolist(), (starts[1:] - starts[:-1]).tolist()


def _expand(firsts: _Ints, num_rows: _Ints, each: _Ints) -> npt.NDArray[np.integer]:
    """The row of every piece, in the order in which they were placed: int [S]."""
    ends = np.cumsum(num_rows)
    rows = np.repeat(firsts - ends + num_rows, num_rows) + np.arange(ends[-1])
    return np.repeat(rows.astype(np.uint32), np.repeat(each, num_rows))


def running_sum(values: _Ints) -> _Ints:
    """The sum of the values before each place, and of all: int64, one entry more than values."""
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return sums


def _int_array(values: list[int]) -> _Ints:
    return np.fromiter(values, np.int64, len(values))  # np.array takes twice as long
