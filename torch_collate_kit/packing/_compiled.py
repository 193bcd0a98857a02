"""Best fit decreasing as a loop compiled by numba, to the same rows. Imported on use."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, int64, njit, types

__all__ = ["MAX_KEYS", "best_fit_rows"]

MAX_KEYS = 1 << 22  # 34 MB of group heads
_BLOCK = 64  # keys whose groups are counted together, so that the next group is found fast


def best_fit_rows(
    distinct: Any, counts: Any, capacity: int, max_pieces: int | None
) -> tuple[np.ndarray, int]:
    """The row of every piece, in the order in which they are placed, and the number of rows."""
    limited = max_pieces is not None
    stride = 1 if max_pieces is None else max_pieces + 1
    sizes, num_pieces = np.array(distinct, dtype=np.int64), np.array(counts, dtype=np.int64)
    row_of, num_rows = _best_fit(sizes, num_pieces, capacity, stride, max_pieces or 0, limited)
    return row_of, int(num_rows)


@njit(
    types.Tuple((int64[::1], int64))(int64[::1], int64[::1], int64, int64, int64, boolean),
    nogil=True,
    cache=True,
    error_model="numpy",
)
def _best_fit(
    sizes: Any, counts: Any, capacity: Any, stride: Any, max_pieces: Any, limited: Any
) -> Any:
    """As ``strategies._fill_best``; a group is a linked list of ranges of rows, newest first."""
    empty = capacity * stride + max_pieces
    num_pieces = counts.sum()
    heads = np.full(empty + 1, -1, dtype=np.int64)
    in_block = np.zeros(empty // _BLOCK + 1, dtype=np.int64)  # groups that have rows
    starts = np.empty(num_pieces, dtype=np.int64)
    stops = np.empty(num_pieces, dtype=np.int64)
    behind = np.empty(num_pieces, dtype=np.int64)
    row_of = np.empty(num_pieces, dtype=np.int64)
    num_nodes = num_rows = num_placed = 0
    for at in range(len(sizes)):
        size, count = sizes[at], counts[at]
        price = size * stride + limited
        key = size * stride
        while count:
            while key <= empty and heads[key] < 0:
                if key % _BLOCK == 0 and in_block[key // _BLOCK] == 0:
                    key += _BLOCK
                else:
                    key += 1
            is_open = key <= empty
            group = key if is_open else empty
            each = group // stride // size
            if limited:
                each = min(each, group % stride)
            num_full = count // each
            if is_open:
                node = heads[group]
            else:
                node = num_nodes
                num_nodes += 1
                starts[node] = num_rows
                num_rows += max(num_full, 1)
                stops[node] = num_rows
            if num_full == 0:  # one row takes the rest, and has room for more
                num_full, each = 1, count
            first = starts[node]
            num_taken = min(num_full, stops[node] - first)
            row_of_part = row_of[num_placed : num_placed + num_taken * each]
            for i in range(num_taken * each):
                row_of_part[i] = first + i // each
            num_placed += num_taken * each
            count -= num_taken * each
            if first + num_taken < stops[node]:
                starts[node] = first + num_taken
                node = num_nodes
                num_nodes += 1
            elif is_open:
                heads[group] = behind[node]
                in_block[group // _BLOCK] -= heads[group] < 0
            starts[node], stops[node] = first, first + num_taken
            new = group - each * price
            if not limited or new % stride:  # without a free slot a row is closed
                in_block[new // _BLOCK] += heads[new] < 0
                behind[node] = heads[new]
                heads[new] = node
    return row_of, num_rows
