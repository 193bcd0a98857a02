"""Other ways to give examples to ranks, as plain code: what bench_balance.py compares with.

All take the examples of a step and return its rows, rank by rank, as lists of example numbers.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np
from row_by_row import best_fit

__all__ = ["Rows", "differencing", "in_turn", "of_differencing", "of_each_rank", "over_ranks"]

Rows = list[list[list[int]]]
"""Of each rank its rows, of each row its examples."""


def differencing(costs: list[int], num_parts: int, *, equal_size: bool) -> list[list[int]]:
    """Parts of about equal cost, by largest differencing (N. Karmarkar, R. Karp, 1982).

    As verl's ``get_seqlen_balanced_partitions``: with ``equal_size`` parts have equally many
    entries, whose number divides.

    >>> differencing([8, 7, 6, 5, 4], 2, equal_size=False)
    [[4, 3, 1], [2, 0]]
    """
    order = sorted(range(len(costs)), key=costs.__getitem__)
    step = num_parts if equal_size else 1
    states = []
    for first in range(0, len(order), step):
        parts = [(costs[i], [i]) for i in order[first : first + step]]
        states.append(_state(parts + [(0, [])] * (num_parts - len(parts)), len(states)))
    heapify(states)
    while len(states) > 1:
        _, number, large = heappop(states)
        _, _, small = heappop(states)
        pairs = zip(large, reversed(small), strict=True)
        heappush(states, _state([(a + b, x + y) for (a, x), (b, y) in pairs], number))
    return [part for _, part in states[0][2]]


def _state(parts: list[tuple[int, list[int]]], number: int):
    """Sort key (the largest difference first), a number to break ties, parts by cost."""
    parts = sorted(parts, key=lambda part: -part[0])
    return parts[-1][0] - parts[0][0], number, parts


def over_ranks(costs: np.ndarray, num_ranks: int) -> list[list[int]]:
    """Examples of each rank by differencing, equally many; the few that do not divide come last."""
    rest = len(costs) % num_ranks
    by_cost = np.argsort(costs, kind="stable")
    left, divided = by_cost[:rest].tolist(), np.sort(by_cost[rest:])
    parts = differencing(costs[divided].tolist(), num_ranks, equal_size=True)
    examples = [divided[part].tolist() for part in parts]
    for rank, example in enumerate(left):
        examples[-1 - rank].append(example)
    return examples


def of_differencing(
    ranks: list[list[int]],
    lengths: np.ndarray,
    costs: np.ndarray,
    max_tokens: int,
    *,
    more_rows: int = 0,
) -> Rows:
    """Rows by differencing within each rank, as many as the tokens of the fullest rank need.

    As verl's ``rearrange_micro_batches``: nothing holds a row to ``max_tokens``. ``more_rows`` are
    added to each rank.
    """
    num_rows = max(-(-int(lengths[examples].sum()) // max_tokens) for examples in ranks)
    rows = []
    for examples in ranks:
        parts = differencing(costs[examples].tolist(), num_rows + more_rows, equal_size=False)
        rows.append([[examples[i] for i in part] for part in parts])
    return rows


def of_each_rank(ranks: list[list[int]], lengths: np.ndarray, max_tokens: int) -> Rows:
    """Rows by best fit within each rank; all have as many as the one that needs most."""
    rows = []
    for examples in ranks:
        filled = best_fit(lengths[examples].tolist(), max_tokens)
        rows.append([[examples[i] for i in row] for row in filled])
    most = max(map(len, rows))
    return [of_rank + [[]] * (most - len(of_rank)) for of_rank in rows]


def in_turn(rows: list[list[int]], costs: np.ndarray, num_ranks: int, *, how: str) -> Rows:
    """Rows of the whole step, equally many per rank: "in turn", by "snake", or "greedy".

    Snake deals rows by descending cost, back and forth. Greedy deals them so, each to the rank with
    the lowest cost so far that has a free place.
    """
    rows = rows + [[]] * (-len(rows) % num_ranks)
    per_rank = len(rows) // num_ranks
    row_costs = [int(costs[row].sum()) for row in rows]
    order = sorted(range(len(rows)), key=lambda row: -row_costs[row])
    ranks: Rows = [[] for _ in range(num_ranks)]
    if how == "greedy":
        heap = [(0, rank) for rank in range(num_ranks)]
        for row in order:
            load, rank = heappop(heap)
            ranks[rank].append(rows[row])
            if len(ranks[rank]) < per_rank:
                heappush(heap, (load + row_costs[row], rank))
        return ranks
    for i, row in enumerate(range(len(rows)) if how == "in turn" else order):
        turn, rank = divmod(i, num_ranks)
        ranks[num_ranks - 1 - rank if how == "snake" and turn % 2 else rank].append(rows[row])
    return ranks
