"""Balancing: rows over ranks, by one cost or by two."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.packing.rows import Ints

__all__ = ["over_ranks"]

_TOTAL = 1 << 30  # costs are scaled to about this sum, so that a product of two sums fits int64
_EVEN = 1000  # ranks within 1 / _EVEN of the mean are even
_SWAPS_PER_RANK = 16


def over_ranks(
    costs: Ints | None,
    num_rows: int,
    num_ranks: int,
    *,
    keep_order: bool,
    image_costs: Ints | None = None,
) -> Ints:
    """Row numbers in shard-major order, equally many per rank: int64 [num_rows].

    Rows are taken in groups of ``num_ranks``, one row for each rank. Groups are formed in
    descending order of cost, so that the i-th rows of all ranks cost nearly the same, or with
    ``keep_order`` in the given order. Within a group the most expensive row goes to the rank with
    the lowest total cost so far. The totals of the ranks then differ by at most the largest
    difference within a group. ``costs=None`` assigns rows round-robin.

    With ``image_costs`` groups are formed in descending order of these, so that rows with images
    are the same ones on all ranks, but for one group. Both costs count. Ranks whose totals still
    differ then swap rows of a group. The most expensive images come last: DDP exchanges gradients
    in the backward pass of the last row, and demands some of the vision tower there.

    >>> over_ranks(np.array([1, 2, 3, 9]), 4, 2, keep_order=False).tolist()
    [3, 0, 2, 1]
    """
    places = order = np.arange(num_rows)
    if costs is None or num_ranks == 1:
        return order.reshape(-1, num_ranks).T.ravel()
    if image_costs is not None and not image_costs.any():
        image_costs = None
    both = costs
    if image_costs is not None:
        costs, image_costs = _comparable(costs, image_costs)
        both = costs + image_costs
    if not keep_order:
        order = np.lexsort((-costs,) if image_costs is None else (-costs, -image_costs))
    if keep_order or image_costs is not None:  # else each group is in descending order already
        order = order[np.lexsort((-both[order], places // num_ranks))]
    order = order[np.argsort(_lightest_first(both[order], num_ranks), kind="stable")]
    if image_costs is None:
        return order
    rows = _swapped(order.reshape(num_ranks, -1), costs, image_costs)
    return (rows if keep_order else rows[:, ::-1]).ravel()


def _lightest_first(costs: Ints, num_ranks: int) -> Ints:
    """The rank of each row: in each group in turn, the ranks by ascending cost so far."""
    ranks: list[int] = []
    load = [0] * num_ranks
    row_costs = costs.tolist()
    for first in range(0, len(costs), num_ranks):
        group = sorted(range(num_ranks), key=load.__getitem__)
        ranks += group
        for rank, cost in zip(group, row_costs[first : first + num_ranks], strict=True):
            load[rank] += cost
    return np.array(ranks)


def _comparable(costs: Ints, image_costs: Ints) -> tuple[Ints, Ints]:
    """Both scaled so that their sums are equal: what is to be even is each in relation to its sum.

    In integers, so that every rank decides alike.
    """
    scaled = []
    for values in (costs, image_costs):
        shift = max(0, int(values.sum()).bit_length() - _TOTAL.bit_length() + 1)
        scaled.append(values >> shift)
    sums = [max(1, int(values.sum())) for values in scaled]
    return scaled[0] * sums[1], scaled[1] * sums[0]


def _swapped(rows: Ints, costs: Ints, image_costs: Ints) -> Ints:
    """Rows of each rank [ranks, rows], after swaps between the heaviest rank and others.

    ``costs`` are comparable. A rank is as heavy as the larger of its two totals. Each swap is of
    two rows at one index, the one after which the heavier of both ranks is lightest.
    """
    rows = rows.copy()
    num_ranks = len(rows)
    even = int(costs.sum()) // num_ranks * (_EVEN + 1) // _EVEN
    both = np.stack([costs[rows], image_costs[rows]])  # [2, ranks, rows]
    for _ in range(_SWAPS_PER_RANK * num_ranks):
        totals = both.sum(axis=2)
        heaviest = int(totals.max(axis=0).argmax())
        most = int(totals[:, heaviest].max())
        if most <= even:
            break
        gained = both - both[:, heaviest, None]  # by the heaviest rank
        after = np.maximum(
            (totals[:, heaviest, None, None] + gained).max(axis=0),
            (totals[:, :, None] - gained).max(axis=0),
        )
        other, index = divmod(int(after.argmin()), after.shape[1])
        if after[other, index] >= most:
            break
        swap, back = [heaviest, other], [other, heaviest]
        rows[swap, index] = rows[back, index]
        both[:, swap, index] = both[:, back, index]
    return rows
