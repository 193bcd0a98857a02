"""Rows that keep the order of the pieces: filled one after the other, or evenly."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from torch_collate_kit.packing.rows import Ints, Limits, Rows, Sizes, running_sum

__all__ = ["sequential", "split_evenly"]


def sequential(sizes: Sizes, limits: Limits) -> Rows:
    """Next fit: pieces in the order given, a new row whenever the next one does not fit.

    All rows keep the reserved cells free. Only a piece with an image may use them, and is then
    alone in its row.

    >>> sizes = Sizes(np.array([4, 6, 3, 7, 1]), np.zeros(5, dtype=np.int64))
    >>> sequential(sizes, Limits(10, 0)).offsets.tolist()
    [0, 2, 4, 5]
    """
    next_start = _latest_ends(sizes, limits)
    offsets = [0]
    while offsets[-1] < len(sizes.tokens):
        offsets.append(int(next_start[offsets[-1]]))
    return Rows(np.arange(len(sizes.tokens)), np.array(offsets, dtype=np.int64))


def split_evenly(sizes: Sizes, num_rows: int, limits: Limits) -> Rows:
    """Cut the sequence of pieces into ``num_rows`` rows, in order and as evenly as possible.

    The cut after row r is at the piece boundary nearest to r / num_rows of all tokens. It moves
    where that row would exceed a limit, or the rest would not fit into the remaining rows.
    ``num_rows`` must be at least what next fit needs. Once all pieces are placed, the remaining
    rows are empty.

    >>> sizes = Sizes(np.array([4, 6, 3, 7, 1]), np.zeros(5, dtype=np.int64))
    >>> split_evenly(sizes, 3, Limits(10, 0)).offsets.tolist()
    [0, 1, 3, 5]
    """
    num_pieces = len(sizes.tokens)
    latest_end = _latest_ends(sizes, limits)
    backwards = Sizes(sizes.tokens[::-1], sizes.patches[::-1])
    earliest_start = num_pieces - _latest_ends(backwards, limits)[::-1]
    boundaries = running_sum(np.minimum(sizes.tokens, limits.text)).tolist()
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
    """Where a row that begins at each place, or at the end, must end at last: int64 [S + 1]."""
    ends = np.full(len(sizes.tokens) + 1, len(sizes.tokens))
    budgets = [(np.minimum(sizes.tokens, limits.text), limits.text)]
    if limits.patches:
        budgets.append((sizes.patches, limits.patches))
    for values, most in budgets:
        sums = running_sum(values)
        ends = np.minimum(ends, np.searchsorted(sums, sums + most, side="right") - 1)
    if limits.pieces is not None:
        ends = np.minimum(ends, np.arange(len(ends)) + limits.pieces)
    return ends
