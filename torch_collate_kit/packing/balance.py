"""Evening out: pieces over a given number of rows, and rows over ranks."""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heapreplace

import numpy as np
import numpy.typing as npt

from torch_collate_kit.packing.strategies import Rows

__all__ = ["attention_cost", "level", "over_ranks", "split_evenly"]

_Ints = npt.NDArray[np.int64]

# Forward FLOPs of one decoder layer of hidden size h over n tokens: 24 * n * h^2 for the
# projections and the MLP, 2 * n^2 * h for causal attention, that is 2h * n * (12h + n). The
# constant is 12h at h = 2048; a wider model has a larger linear part and is easier to balance.
_LINEAR_TOKENS = 12 * 2048


def attention_cost(lengths: _Ints) -> _Ints:
    """Relative cost of one piece per length, ``n * (24576 + n)``: int64, the shape of ``lengths``.

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
    """Spread the pieces over ``num_rows`` rows, at least as many as there are, as evenly as fits.

    Takes apart the emptiest row and those with the most pieces, ``most`` rows in all, and deals
    their pieces out anew, the added rows included: longest piece first, to the row of least
    weight (LPT: R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969). Where that
    overfills a row, least tokens is tried instead of least weight, then half as many rows.
    ``sizes`` and ``weights`` are int64 [S], by piece number; longer pieces weigh more.

    It ends, because the pieces of one row always fit into one row or more. Without ``max_pieces``
    it ends when as many rows are taken apart as are added: for a piece of size n to fit nowhere,
    each of the new rows, twice as many, would hold more than ``capacity - n``; that is more than
    the old rows' tokens, or for n over half the capacity more such pieces than the old rows hold.

    With no row added, rows are dealt out anew only where that brings the heaviest and the lightest
    of them closer together.

    >>> rows, sizes = Rows(np.arange(4), np.array([0, 4])), np.array([4, 3, 2, 1])
    >>> level(rows, sizes, 2, capacity=10, max_pieces=None, weights=sizes, most=1)
    Rows(order=array([0, 3, 1, 2]), offsets=array([0, 2, 4]))
    """
    old_rows = len(rows.offsets) - 1
    added = np.arange(old_rows, num_rows)
    row_of, heaviness = rows.labels(), rows.totals(weights)
    by_pieces = np.argsort(-np.diff(rows.offsets), kind="stable")
    emptiest = rows.totals(sizes)[by_pieces].argmin()
    candidates = np.concatenate([by_pieces[[emptiest]], np.delete(by_pieces, emptiest)])
    num_chosen = min(most, old_rows)
    while num_chosen:
        chosen = np.sort(candidates[:num_chosen])
        is_chosen = np.zeros(old_rows, dtype=bool)
        is_chosen[chosen] = True
        places = np.flatnonzero(is_chosen[row_of])
        places = places[np.argsort(-sizes[rows.order[places]], kind="stable")]
        pieces = rows.order[places]
        for weigh in (weights,) if weights is sizes else (weights, sizes):
            bins = _deal(
                sizes[pieces], weigh[pieces], num_chosen + len(added), capacity, max_pieces
            )
            if bins is None:
                continue
            dealt = np.bincount(bins, weights=weights[pieces], minlength=num_chosen)
            if len(added) or np.ptp(dealt) < np.ptp(heaviness[chosen]):
                row_of[places] = np.concatenate([chosen, added])[bins]
                return Rows.from_labels(rows.order, row_of, num_rows)
        num_chosen //= 2
    return rows


def _deal(
    sizes: _Ints, weights: _Ints, num_rows: int, capacity: int, max_pieces: int | None
) -> list[int] | None:
    """The row of each piece, in turn the one of least weight; None when a row is overfilled."""
    heap = list(range(num_rows))  # weight * num_rows + row: one integer is cheap to compare
    free = [capacity] * num_rows
    slots = [max_pieces or len(sizes)] * num_rows
    bins: list[int] = []
    for size, weight in zip(sizes.tolist(), weights.tolist(), strict=True):
        row = heap[0] % num_rows if heap else 0
        free[row] -= size
        slots[row] -= 1
        if free[row] < 0 or slots[row] < 0:
            return None
        bins.append(row)
        if slots[row]:
            heapreplace(heap, heap[0] + weight * num_rows)
        else:
            heappop(heap)
    return bins


def split_evenly(sizes: _Ints, num_rows: int, capacity: int, max_pieces: int | None) -> Rows:
    """Cut the sequence of pieces into ``num_rows`` rows, in order and as even as fits.

    The cut after row r goes to the piece boundary nearest to r / num_rows of all tokens, moved as
    far as needed to keep the row within the limits and the rest within the remaining rows.
    ``num_rows`` must be feasible: at least what next fit needs. Rows behind the last are empty.

    >>> split_evenly(np.array([4, 6, 3, 7, 1]), 3, 10, None).offsets.tolist()
    [0, 1, 3, 5]
    """
    num_pieces = len(sizes)
    sums = np.concatenate([[0], np.cumsum(sizes)])
    latest = np.searchsorted(sums, sums + capacity, side="right") - 1
    earliest = np.searchsorted(sums, sums - capacity, side="left")
    if max_pieces is not None:
        latest = np.minimum(latest, np.arange(num_pieces + 1) + max_pieces)
        earliest = np.maximum(earliest, np.arange(num_pieces + 1) - max_pieces)
    latest_end, earliest_start = latest.tolist(), earliest.tolist()
    boundaries = sums.tolist()
    least = [num_pieces]  # from the back: where row r must end at the earliest
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
    """Row numbers in shard-major order, so many a rank: int64 [num_rows].

    Rows are taken ``num_ranks`` at a time, one for every rank: in descending order of cost, so that
    the i-th rows of all ranks cost nearly the same, or with ``keep_order`` in the order given. Of
    each such group the costliest row goes to the rank with the least cost so far. The ranks' sums
    then differ by at most the widest difference within one group. ``costs=None`` is round-robin.

    >>> over_ranks(np.array([1, 2, 3, 9]), 4, 2, keep_order=False).tolist()
    [3, 0, 2, 1]
    """
    order = np.arange(num_rows)
    if costs is None or num_ranks == 1:
        return order.reshape(-1, num_ranks).T.ravel()
    if not keep_order:
        order = np.argsort(-costs, kind="stable")
    groups = order.reshape(-1, num_ranks)
    groups = np.take_along_axis(groups, np.argsort(-costs[groups], axis=1, kind="stable"), axis=1)
    assigned = np.empty_like(groups)
    load = np.zeros(num_ranks, dtype=np.int64)
    for group, row_costs, target in zip(groups, costs[groups], assigned, strict=True):
        ranks = np.argsort(load, kind="stable")
        target[ranks] = group
        load[ranks] += row_costs
    return assigned.T.ravel()
