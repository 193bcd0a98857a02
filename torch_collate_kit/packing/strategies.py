"""Strategies, sizes in, rows out: best fit and first fit, longest piece first, and in order.

The two fits take ``sizes``, int64 [S], the aligned lengths of at least one piece, each in
1..capacity. They treat all pieces of one size together, so their time depends on the number of
distinct sizes more than on the number of pieces. The others take cells and patches,
or both: see ``fill_two_budgets``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_collate_kit.packing.rows import Ints, Limits, Rows, Sizes, running_sum, stable_argsort


class OpenRows(NamedTuple):
    """Rows that hold pieces already: free space and free slots for pieces, int64 [R] each."""

    space: Ints
    slots: Ints


def best_fit_decreasing(
    sizes: Ints, capacity: int, max_pieces: int | None, opened: OpenRows | None = None
) -> Rows:
    """Place the longest piece first, each into the fullest row that still has room for it.

    Source: D. S. Johnson, "Near-optimal bin packing algorithms" (1973): at most 11/9 of the best
    possible number of rows + 6/9. Packing by length histogram: Krell et al., "Efficient sequence
    packing without cross-contamination" (2021).

    The result is exactly that of placing the pieces one by one. A row that takes a piece of some
    size is then the fullest one with room, so it takes the next piece of that size as well: rows
    with equal free space each take ``space // size`` at once. With ``max_pieces``, of equally full
    rows the one with the fewest free slots comes first. ``opened`` rows are numbered first.
    """
    order, distinct, counts = _histogram(sizes)
    numbers = np.zeros(0, dtype=np.int64)
    if opened is not None:
        numbers = np.lexsort((-opened.slots, -opened.space))  # the fullest last
        opened = OpenRows(opened.space[numbers], opened.slots[numbers])
    if opened is None:
        fills = _fill_empty(tuple(distinct), tuple(counts), capacity, max_pieces)
    else:
        fills = _fill_best(distinct, counts, capacity, max_pieces, opened)
    firsts, num_taken, each, num_rows = fills
    row_of = _expand(firsts, num_taken, each)
    if opened is not None:
        row_of = np.append(numbers, np.arange(len(numbers), num_rows))[row_of]
    return Rows.from_labels(order, row_of, num_rows)


def num_rows_best_fit(sizes: Ints, capacity: int) -> int:
    """Count the rows of ``best_fit_decreasing``, without placing a piece."""
    _, distinct, counts = _histogram(sizes)
    return _fill_empty(tuple(distinct), tuple(counts), capacity, None)[3]


@lru_cache(maxsize=1)  # a window of steps is counted, and then filled: a fifth of its time
def _fill_empty(
    distinct: tuple[int, ...], counts: tuple[int, ...], capacity: int, max_pieces: int | None
) -> tuple[Ints, Ints, Ints, int]:
    return _fill_best([*distinct], [*counts], capacity, max_pieces, None)


def _fill_best(
    distinct: list[int],
    counts: list[int],
    capacity: int,
    max_pieces: int | None,
    opened: OpenRows | None,
) -> tuple[Ints, Ints, Ints, int]:
    """Return the fills in turn, and the number of rows.

    A fill is a run of rows, numbered as they are opened, that take ``each`` pieces: first row,
    number of rows, each. Rows with room for at most the rest of a size take pieces of this size
    alone. A row with room for more goes on with the next sizes, as long as it has room for all
    pieces of a size and no row that waits has room for one: that row would be the fuller one.

    The rows of a run are equally full until another fill splits it. It is one integer, ``first *
    unit + number``; run 1 is the rows that are not yet opened. A run's place in best-fit order is
    one integer, ``run - (key + 1) * unit``: ``key`` is its free space, or where pieces are limited
    ``space * stride + free slots``; of equally full runs the last comes first. Runs with room for
    the size at hand are a stack, best fit on top. The rest of a fill is too full for that size, so
    it waits in a heap until sizes have come down to it. One flat loop over integers: calls would
    double its time, and a tuple or list per run sets off the garbage collector (80 ms with torch).
    """
    stride, closes = (1, 0) if max_pieces is None else (max_pieces + 1, 1)
    sizes = [*(size * stride for size in distinct), 0] if closes else [*distinct, 0]
    num_pieces, num_opened = sum(counts), 0 if opened is None else len(opened.space)
    unit = num_pieces + num_opened + 3  # more than there can be runs, or rows
    runs = [0, num_opened * unit + num_pieces + 1]
    with_room = [1 - (capacity * stride + (max_pieces or 0) + 1) * unit]
    waiting: list[int] = []
    filled: list[int] = []
    eachs: list[int] = []
    if opened is not None:
        for first, number, key in _equally_full(opened, distinct[-1], stride, closes):
            waiting.append(len(runs) - (key + 1) * unit)
            runs.append(first * unit + number)
    i = 0
    while i < len(counts):
        size, count = sizes[i], counts[i]
        i += 1
        while waiting and waiting[0] < -size * unit:
            with_room.append(heappop(waiting))
        while count:
            place = with_room[-1]
            run, key = place % unit, -place // unit
            rows = runs[run]
            number = rows % unit
            each = key // size
            if closes:
                each = min(each, key % stride)
            if each <= count:
                used = min(count // each, number)
                count -= used * each
                key -= each * (size + closes)
            else:
                used, each = 1, count
                key -= count * (size + closes)
                too_long = -waiting[0] // unit if waiting else 0
                while (size := sizes[i]) > too_long:
                    count = counts[i]
                    if count * size > key or (closes and count > key % stride):
                        break
                    key -= count * (size + closes)
                    each += count
                    i += 1
                count = 0
            if used < number:
                runs[run] = rows + used * unit - used
                rows += used - number
            else:
                del with_room[-1]
            # A row closes without room for the shortest piece, or without a free slot.
            if key >= sizes[-2] and (not closes or key % stride):
                heappush(waiting, len(runs) - (key + 1) * unit)
            runs.append(rows)
            filled.append(rows)
            eachs.append(each)
    firsts, num_taken = np.divmod(_int_array(filled), unit)
    return firsts, num_taken, _int_array(eachs), runs[1] // unit


def _equally_full(
    opened: OpenRows, shortest: int, stride: int, closes: int
) -> Iterator[tuple[int, int, int]]:
    """Yield first row, number of rows and key of each run of opened rows that can take a piece."""
    keys = opened.space * stride + opened.slots * closes
    fits = (opened.space >= shortest) & (opened.slots > 0)
    starts = np.flatnonzero(np.diff(keys, prepend=-1)).tolist()
    for first, end in pairwise([*starts, len(keys)]):
        if fits[first]:
            yield first, end - first, int(keys[first])


def first_fit_decreasing(
    sizes: Ints, capacity: int, max_pieces: int | None, opened: OpenRows | None = None
) -> Rows:
    """Place the longest piece first, each into the earliest opened row that has room for it.

    Source: D. S. Johnson (1973), as for ``best_fit_decreasing``, with the same bound. A binary tree
    over the rows, each node the most free space below it, finds the earliest row with room in
    log2(rows) steps; the row takes as many pieces of the same size as fit. ``opened`` rows are
    the earliest.
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


def _histogram(sizes: Ints) -> tuple[Ints, list[int], list[int]]:
    """Return piece numbers, longest first, ties by number; the distinct sizes; their counts."""
    longest = int(sizes.max())
    order = stable_argsort(longest - sizes, longest)
    ordered = sizes[order]
    starts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    starts = np.concatenate([[0], starts, [len(sizes)]])
    return order, ordered[starts[:-1]].tolist(), (starts[1:] - starts[:-1]).tolist()


def _expand(firsts: Ints, num_rows: Ints, each: Ints) -> npt.NDArray[np.integer]:
    """Return the row of every piece, in the order in which they were placed: int [S]."""
    ends = num_rows.cumsum()
    rows = (firsts - ends + num_rows).repeat(num_rows) + np.arange(ends[-1])
    return rows.astype(np.uint32).repeat(each.repeat(num_rows))


def _int_array(values: list[int]) -> Ints:
    return np.fromiter(values, np.int64, len(values))  # np.array takes twice as long


def sequential(sizes: Sizes, limits: Limits) -> Rows:
    """Place pieces in the order given, in a new row whenever the next one does not fit.

    All rows keep the reserved cells free. Only a piece with an image may use them, and is then
    alone in its row.
    """
    next_start, num_pieces = _latest_ends(sizes, limits), len(sizes[0])
    offsets = [0]
    while offsets[-1] < num_pieces:
        offsets.append(int(next_start[offsets[-1]]))
    return Rows(np.arange(num_pieces), np.array(offsets, dtype=np.int64))


def split_evenly(sizes: Sizes, num_rows: int, limits: Limits) -> Rows:
    """Cut the sequence of pieces into ``num_rows`` rows, in order and as evenly as possible.

    The cut after row r is at the piece boundary nearest to r / num_rows of all tokens. It moves
    where that row would exceed a limit, or the rest would not fit into the remaining rows.
    ``num_rows`` must be at least what next fit needs. Once all pieces are placed, the remaining
    rows are empty.
    """
    (tokens, patches), num_pieces = sizes, len(sizes[0])
    latest_end = _latest_ends(sizes, limits)
    earliest_start = num_pieces - _latest_ends((tokens[::-1], patches[::-1]), limits)[::-1]
    boundaries = running_sum(np.minimum(tokens, limits.text)).tolist()
    least = [num_pieces]  # filled backwards: the earliest end of row r
    for _ in range(num_rows):
        least.append(int(earliest_start[least[-1]]))
    offsets = [0]
    for row in range(1, num_rows + 1):
        start, rest = offsets[-1], num_rows - row
        target = boundaries[-1] * row / num_rows
        end = bisect_left(boundaries, target)
        if end > 0 and target - boundaries[end - 1] <= boundaries[end] - target:
            end -= 1
        end = max(min(end, num_pieces - rest), start + 1, least[rest])
        offsets.append(min(end, int(latest_end[start]), num_pieces))
    return Rows(np.arange(num_pieces), np.array(offsets, dtype=np.int64))


def _latest_ends(sizes: Sizes, limits: Limits) -> Ints:
    """Return the latest end of a row that begins at each place, or at the end: int64 [S + 1]."""
    tokens, patches = sizes
    ends = np.full(len(tokens) + 1, len(tokens))
    budgets = [(np.minimum(tokens, limits.text), limits.text)]
    if limits.patches:
        budgets.append((patches, limits.patches))
    for values, most in budgets:
        sums = running_sum(values)
        ends = np.minimum(ends, np.searchsorted(sums, sums + most, side="right") - 1)
    if limits.pieces is not None:
        ends = np.minimum(ends, np.arange(len(ends)) + limits.pieces)
    return ends


# --- Rows under two budgets: tokens, and patches of images.
#
# Rows are filled in one budget at a time. Pieces are divided by slope, their share of one budget
# over their share of the other. Each class is packed by the larger share, into rows whose room is
# what both budgets leave for pieces of this slope. So every row is within both by construction, and
# every pass is the packing of one number, by histogram.

Fill = Callable[[Ints, int, int | None, OpenRows | None], Rows]

# Classes of images: the larger share, of tokens or of patches, is at least num / den times the
# smaller. Finer classes leave less of what is free unused, but large images no longer all come
# first. Those of more tokens have positive numbers, of more patches negative ones; texts have 0.
_TOKEN_SLOPES = ((1, 1), (4, 3), (2, 1), (3, 1), (4, 1), (8, 1), (16, 1))
_PATCH_SLOPES = ((1, 1), (2, 1))
_STEEPEST = 16
_TOKENS, _PATCHES, _SLOTS = range(3)  # free in a row, and used by a piece
_KEPT = 8  # of the images that are dealt, the smallest are kept to fill rows up: this part of all


def fill_two_budgets(fill: Fill, sizes: Sizes, limits: Limits) -> Rows:
    """Fill rows with the pieces, each of which fits in one, by ``fill``: best fit or first fit.

    Pieces with a larger share of the patches come first, by patches; then those with a larger
    share of the tokens, by tokens, those with the most patches per token first; then those without
    an image, into the tokens that are left. This is best where one budget binds. Where both do,
    rows must hold a mixture, so in two more plans most images are first dealt out over as many rows
    as are needed at least, or 1% more. The plan with the fewest rows is taken.
    """
    num_tokens, num_patches = (int(values.sum()) for values in sizes)
    least = max(-(-num_tokens // limits.tokens), -(-num_patches // limits.patches))
    best: Rows | None = None
    for rows in _plans(fill, _Budgets(sizes, limits), least):
        if best is None or len(rows.offsets) < len(best.offsets):
            best = rows
        if len(best.offsets) - 1 <= least:
            break
    assert best is not None
    return best


def _plans(fill: Fill, pieces: _Budgets, least: int) -> Iterator[Rows]:
    images = np.flatnonzero(pieces.classes)
    yield _Filling(fill, pieces).filled(images)
    order = images[np.argsort(-pieces.shares[images], kind="stable")]
    shares = np.cumsum(pieces.shares[order])
    dealt = int(np.searchsorted(shares, shares[-1] - shares[-1] // _KEPT)) + 1
    for num_rows in (least, least + -(-least // 100)):
        rows = _Filling(fill, pieces)
        unplaced = rows.deal(order[:dealt], min(num_rows, dealt))
        yield rows.filled(np.concatenate([unplaced, order[dealt:]]))


class _Budgets:
    """Sizes, shares and classes of the pieces, each [S], and the limits of their rows."""

    def __init__(self, sizes: Sizes, limits: Limits) -> None:
        tokens, patches = sizes
        num_pieces = len(tokens)
        self.limits = limits
        self.most = (limits.tokens, limits.patches, limits.pieces or num_pieces)
        self.takes = (tokens, patches, np.ones(num_pieces, dtype=np.int64))
        # A product of both budgets, a slope and the number of rows must fit.
        is_small = limits.tokens * limits.patches * _STEEPEST < 2**62
        self.integer: type = np.int64 if is_small else object
        by_tokens = tokens.astype(self.integer) * limits.patches
        by_patches = patches.astype(self.integer) * limits.tokens
        self.shares = by_tokens + by_patches
        self.classes = np.zeros(num_pieces, dtype=np.int64)
        for number, (num, den) in enumerate(_TOKEN_SLOPES, 1):
            self.classes[(by_patches * num <= by_tokens * den).astype(bool)] = number
        for number, (num, den) in enumerate(_PATCH_SLOPES, 1):
            self.classes[(by_tokens * num <= by_patches * den).astype(bool)] = -number
        if limits.patches >= int(patches.sum()):  # no limit: images are packed by tokens
            self.classes[:] = len(_TOKEN_SLOPES)
        self.classes[patches == 0] = 0


class _Filling:
    """Rows being filled: their pieces, and the free room in each."""

    def __init__(self, fill: Fill, pieces: _Budgets) -> None:
        self._fill, self._pieces = fill, pieces
        self._free = [np.zeros(0, dtype=np.int64)] * len(pieces.takes)
        self._order: list[Ints] = []
        self._labels: list[Ints] = []

    def deal(self, pieces: Ints, num_rows: int) -> Ints:
        """Deal pieces, at least as many as rows, and return those that did not fit."""
        known, limits = self._pieces, self._pieces.limits
        self._add(pieces[:num_rows], np.arange(num_rows), num_rows)
        unplaced = [pieces[:0]]
        for first in range(num_rows, len(pieces), num_rows):
            dealt = pieces[first : first + num_rows]
            free: Any = self._free[_TOKENS].astype(known.integer) * limits.patches
            free += self._free[_PATCHES].astype(known.integer) * limits.tokens
            rows = np.argsort(-free, kind="stable")[: len(dealt)]
            fits = np.ones(len(dealt), dtype=bool)
            for takes, has in zip(known.takes, self._free, strict=True):
                fits &= takes[dealt] <= has[rows]
            self._add(dealt[fits], rows[fits], 0)
            unplaced.append(dealt[~fits])
        return np.concatenate(unplaced)

    def filled(self, images: Ints) -> Rows:
        """Return the rows with these images, and all pieces without one, as they were placed."""
        known = self._pieces
        classes = known.classes[images]
        if not self._order:  # new rows have room for all with a larger share of patches
            classes = np.where(classes < 0, -1, classes)
        for number, slope in enumerate(_PATCH_SLOPES, 1):
            self._place(images[classes == -number], slope, larger=_PATCHES, smaller=_TOKENS)
        for number, slope in enumerate(_TOKEN_SLOPES, 1):
            self._place(images[classes == number], slope, larger=_TOKENS, smaller=_PATCHES)
        texts = np.flatnonzero(known.classes == 0)
        self._fill_in(texts, known.takes[_TOKENS], known.limits.text, self._free[_TOKENS])
        order, labels = np.concatenate(self._order), np.concatenate(self._labels)
        return Rows.from_labels(order, labels, len(self._free[_TOKENS]))

    def _place(self, images: Ints, slope: tuple[int, int], *, larger: int, smaller: int) -> None:
        """Place images of at least this slope, by the larger share."""
        (num, den), known = slope, self._pieces
        most, free = known.most[larger], self._free[larger]
        room: Any = self._free[smaller].astype(known.integer) * (most * num)
        room = np.minimum(room // (known.most[smaller] * den), free).astype(np.int64)
        self._fill_in(images, known.takes[larger], most, room)

    def _fill_in(self, pieces: Ints, sizes: Ints, capacity: int, room: Ints) -> None:
        """Fill pieces of these sizes into rows with so much room, or into new rows."""
        if len(pieces):
            opened = OpenRows(room, self._free[_SLOTS]) if len(room) else None
            rows = self._fill(sizes[pieces], capacity, self._pieces.limits.pieces, opened)
            self._add(pieces[rows.order], rows.labels(), len(rows.offsets) - 1 - len(room))

    def _add(self, pieces: Ints, labels: Ints, num_new: int) -> None:
        """Record that the pieces are in these rows, of which ``num_new`` are new."""
        known = self._pieces
        for i, (most, takes) in enumerate(zip(known.most, known.takes, strict=True)):
            self._free[i] = np.append(self._free[i], np.full(num_new, most, dtype=np.int64))
            np.subtract.at(self._free[i], labels, takes[pieces])
        self._order.append(pieces)
        self._labels.append(labels)
