"""Balancing: pieces over a given number of rows, and rows over ranks."""

from __future__ import annotations

from bisect import bisect_left
from heapq import heapreplace

import numpy as np
import numpy.typing as npt

from torch_collate_kit.packing.strategies import Rows, running_sum, stable_argsort

__all__ = ["attention_cost", "level", "over_ranks", "split_evenly"]

_Ints = npt.NDArray[np.int64]

# Forward FLOPs of one decoder layer of hidden size h over n tokens: 24 * n * h^2 for the
# projections and the MLP, 2 * n^2 * h for causal attention, that is 2h * n * (12h + n). The
# constant is 12h at h = 2048; a wider model has a larger linear part and is easier to balance.
_LINEAR_TOKENS = 12 * 2048
_CLOSED = 1 << 96  # the weight of a row without a free slot: more than any int64 weights together


def attention_cost(lengths: _Ints) -> _Ints:
    """Relative cost of a piece per length, ``n * (24576 + n)``: int64, the shape of ``lengths``.

    >>> attention_cost(np.array([1, 24576])).tolist()
    [24577, 1207959552]
    """
    return lengths * (_LINEAR_TOKENS + lengths)


def level(
    rows: Rows,
    sizes: _Ints,
    num_rows: int,
    *,
    capacity: int,
    max_pieces: int | None,
    weights: _Ints,
    most: int,
) -> Rows:
    """Redistribute pieces over ``num_rows`` rows, as evenly as their sizes allow.

    ``num_rows`` is at least the present number of rows. The emptiest row and those with the most
    pieces, ``most`` rows in all, are taken apart. Their pieces are redistributed over these rows
    and the added ones, longest piece first, each to the row with the least weight so far (LPT:
    R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969). If that overfills a row, the
    row with the fewest tokens is chosen instead; if that fails too, half as many rows are taken
    apart. ``sizes`` and ``weights`` are int64 [S], by piece number; longer pieces weigh more.

    This terminates, because the pieces of one row always fit into one row or more. Without
    ``max_pieces`` it succeeds at the latest when as many rows are taken apart as are added. For a
    piece of size n to fit nowhere, each of the new rows, twice as many, would have to hold more
    than ``capacity - n``. That is more than the tokens of the old rows or, for n over half the
    capacity, more such pieces than the old rows hold.

    If no row is added, rows change only if that reduces the difference between the heaviest and
    the lightest of them.

    >>> rows, sizes = Rows(np.arange(4), np.array([0, 4])), np.array([4, 3, 2, 1])
    >>> level(rows, sizes, 2, capacity=10, max_pieces=None, weights=sizes, most=1)
    Rows(order=array([0, 3, 1, 2]), offsets=array([0, 2, 4]))
    """
    old_rows = len(rows.offsets) - 1
    added = np.arange(old_rows, num_rows)
    row_of, num_chosen = rows.labels(), min(most, old_rows)
    while num_chosen:
        chosen = np.arange(old_rows)
        if num_chosen < old_rows:
            chosen = np.sort(_by_pieces(rows, sizes)[:num_chosen])
        is_chosen = np.zeros(old_rows, dtype=bool)
        is_chosen[chosen] = True
        places = np.flatnonzero(is_chosen[row_of])
        places = places[stable_argsort(capacity - sizes[rows.order[places]], capacity)]
        pieces = rows.order[places]
        for weigh in (weights,) if weights is sizes else (weights, sizes):
            bins = _deal(
                sizes[pieces], weigh[pieces], num_chosen + len(added), capacity, max_pieces
            )
            if bins is None:
                continue
            if len(added) or _is_evener(bins, weights[pieces], rows.totals(weights)[chosen]):
                row_of[places] = np.concatenate([chosen, added])[bins]
                return Rows.from_labels(rows.order, row_of, num_rows)
        num_chosen //= 2
    return rows


def _by_pieces(rows: Rows, sizes: _Ints) -> _Ints:
    """Row numbers: the emptiest row, then the others by descending number of pieces: int64 [R]."""
    by_pieces = np.argsort(-rows.counts(), kind="stable")
    emptiest = rows.totals(sizes)[by_pieces].argmin()
    return np.concatenate([by_pieces[[emptiest]], np.delete(by_pieces, emptiest)])


def _is_evener(bins: _Ints, weights: _Ints, before: _Ints) -> bool:
    """Whether the rows ``bins`` of the pieces differ less in weight than the rows ``before``."""
    dealt = np.bincount(bins, weights=weights, minlength=len(before))
    return bool(np.ptp(dealt) < np.ptp(before))


def _deal(
    sizes: _Ints, weights: _Ints, num_rows: int, capacity: int, max_pieces: int | None
) -> _Ints | None:
    """The row of each piece: the lightest row so far. None if a row overflows."""
    if max_pieces is not None and len(sizes) > num_rows * max_pieces:
        return None
    heap = list(range(num_rows))  # weight * num_rows + row: one integer is cheap to compare
    slots = None if max_pieces is None else [max_pieces] * num_rows
    bins: list[int] = []
    for weight in weights.tolist():
        key = heap[0]
        row = key % num_rows
        bins.append(row)
        if slots is not None:
            slots[row] -= 1
            if not slots[row]:
                weight = _CLOSED
        heapreplace(heap, key + weight * num_rows)
    rows = np.fromiter(bins, np.int64, len(bins))
    totals = np.zeros(num_rows, dtype=np.int64)
    np.add.at(totals, rows, sizes)
    return None if totals.max() > capacity else rows


def split_evenly(sizes: _Ints, num_rows: int, capacity: int, max_pieces: int | None) -> Rows:
    """Cut the sequence of pieces into ``num_rows`` rows, in order and as evenly as possible.

    The cut after row r is at the piece boundary nearest to r / num_rows of all tokens. It moves
    where that row would exceed a limit, or the rest would not fit into the remaining rows.
    ``num_rows`` must be at least what next fit needs. Once all pieces are placed, the remaining
    rows are empty.

    >>> split_evenly(np.array([4, 6, 3, 7, 1]), 3, 10, None).offsets.tolist()
    [0, 1, 3, 5]
    """
    num_pieces = len(sizes)
    sums = running_sum(sizes)
    latest = np.searchsorted(sums, sums + capacity, side="right") - 1
    earliest = np.searchsorted(sums, sums - capacity, side="left")
    if max_pieces is not None:
        latest = np.minimum(latest, np.arange(num_pieces + 1) + max_pieces)
        earliest = np.maximum(earliest, np.arange(num_pieces + 1) - max_pieces)
    latest_end, earliest_start = latest.tolist(), earliest.tolist()
    boundaries = sums.tolist()
    least = [num_pieces]  # filled backwards: the earliest end of row r
    for _ in range(num_rows):
        least.append(earliest_start[least[-1]])
    offsets = [0]
    for row in range(1, num_rows + 1):
        start, rest = offsets[-1], num_rows - row
        target = boundaries[-1] * row / num_rows
        end = bisect_left(boundaries, target)
        if end > 0 and target - boundaries[end - 1] <= boundaries[end] - target:
            end -= 1
        end = max(min(end, num_pieces - rest), start + 1, least[rest])
        offsets.append(min(end, latest_end[start], num_pieces))
    return Rows(np.arange(num_pieces), np.array(offsets, dtype=np.int64))


def over_ranks(costs: _Ints | None, num_rows: int, num_ranks: int, *, keep_order: bool) -> _Ints:
    """Row numbers in shard-major order, equally many per rank: int64 [num_rows].

    Rows are taken in groups of ``num_ranks``, one row for each rank. Groups are formed in
    descending order of cost, so that the i-th rows of all ranks cost nearly the same, or with
    ``keep_order`` in the given order. Within a group the most expensive row goes to the rank with
    the lowest total cost so far. The totals of the ranks then differ by at most the largest
    difference within a group. ``costs=None`` assigns rows round-robin.

    >>> over_ranks(np.array([1, 2, 3, 9]), 4, 2, keep_order=False).tolist()
    [3, 0, 2, 1]
    """
    order = np.arange(num_rows)
    if costs is None or num_ranks == 1:
        return order.reshape(-1, num_ranks).T.ravel()
    if keep_order:
        groups = order.reshape(-1, num_ranks)
        ranked = np.argsort(-costs[groups], axis=1, kind="stable")
        order = np.take_along_axis(groups, ranked, axis=1).ravel()
    else:
        order = np.argsort(-costs, kind="stable")
    ranks: list[int] = []  # of each row in that order
    load = [0] * num_ranks
    row_costs = costs[order].tolist()
    for first in range(0, num_rows, num_ranks):
        group = sorted(range(num_ranks), key=load.__getitem__)
        ranks += group
        for rank, cost in zip(group, row_costs[first : first + num_ranks], strict=True):
            load[rank] += cost
    return order[np.argsort(np.array(ranks), kind="stable")]
