"""Rows into micro-batches of a budget of cells: rows times the width of the widest of them."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.packing.rows import Ints

__all__ = ["fewest_micro_batches", "micro_batch_rows"]


def fewest_micro_batches(widths: Ints, max_cells: int) -> int:
    """The least number of micro-batches that hold rows of these widths, int64 [N].

    Widest first, each micro-batch takes as many of the next rows as fit with its first one. No
    other choice needs fewer, since the rows that are left could not be narrower.

    >>> fewest_micro_batches(np.array([2, 8, 3, 2]), 8)
    3
    """
    return len(_sizes(np.sort(widths)[::-1].tolist(), max_cells))


def micro_batch_rows(widths: Ints, max_cells: int, num_micro_batches: int) -> list[Ints]:
    """Row numbers of each micro-batch, none without rows, widest first: int64 each.

    Their number is ``num_micro_batches``, which lies between the fewest possible and the number of
    rows, and the cells of the largest are as few as this number allows.

    >>> [rows.tolist() for rows in micro_batch_rows(np.array([2, 8, 3, 2]), 16, 2)]
    [[1], [2, 0, 3]]
    """
    order = np.argsort(-widths, kind="stable")
    descending = widths[order].tolist()
    low, high = descending[0], max_cells
    while low < high:  # the smallest budget for which that many are enough
        middle = (low + high) // 2
        if len(_sizes(descending, middle)) <= num_micro_batches:
            high = middle
        else:
            low = middle + 1
    parts = np.split(order, np.cumsum(_sizes(descending, high))[:-1])
    while len(parts) < num_micro_batches:
        cells = [len(rows) * int(widths[rows[0]]) if len(rows) > 1 else 0 for rows in parts]
        i = int(np.argmax(cells))
        parts[i : i + 1] = np.array_split(parts[i], 2)
    return parts


def _sizes(descending: list[int], max_cells: int) -> list[int]:
    """Rows of each micro-batch, filled up one after the other; no row is over the budget."""
    sizes: list[int] = []
    first = 0
    while first < len(descending):
        sizes.append(min(max_cells // descending[first], len(descending) - first))
        first += sizes[-1]
    return sizes
