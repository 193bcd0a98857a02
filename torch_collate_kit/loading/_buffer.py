"""Which examples of a buffer are packed now, and which of them make a batch: integers only.

Of the examples in the buffer the longest beginning that fills whole batches is packed; what is
behind it waits, and is packed with what comes. So rows are as full as they would be at the end of
a buffer of just the right length, and nothing has to be remembered but where the beginning ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from torch_collate_kit.packing import PackingPlan

__all__ = ["groups_to_pack"]


def groups_to_pack(
    lengths: np.ndarray,
    plan: Callable[[np.ndarray], PackingPlan],
    rows_per_batch: int,
    *,
    ended: bool,
) -> list[np.ndarray]:
    """The indices of each batch's examples, ascending; together they are ``range(num_packed)``.

    ``lengths`` int64 [N] are of the examples in the buffer, ``ended`` says that no more will come.
    Best fit, first fit and sequential packing put the examples of some of their rows into as many
    rows again, so a collator gives ``rows_per_batch`` rows for each group but perhaps the last.

    >>> from torch_collate_kit.packing import pack
    >>> groups = groups_to_pack(np.array([4, 2, 6, 3]), lambda n: pack(n, 6), 1, ended=False)
    >>> [group.tolist() for group in groups]
    [[0, 1], [2]]
    """
    packed = plan(lengths if ended else lengths[: _num_ready(lengths, plan, rows_per_batch)])
    rows = np.split(packed.example_indices, packed.row_offsets[1:-1])
    # A row begins with its longest example. Rows as they were opened would come longest first, and
    # rows by their oldest example those with many short ones first.
    rows.sort(key=lambda row: row[0] if len(row) else 0)
    firsts = range(0, len(rows), rows_per_batch)
    groups = [np.concatenate(rows[i : i + rows_per_batch]) for i in firsts]
    groups[0] = np.append(groups[0], packed.dropped)  # the collator counts them
    return [np.sort(group) for group in groups]


def _num_ready(
    lengths: np.ndarray, plan: Callable[[np.ndarray], PackingPlan], rows_per_batch: int
) -> int:
    """The most examples that fill whole batches and a row less than all do; all, if none do."""

    def num_rows(num_examples: int) -> int:
        packed = plan(lengths[:num_examples])
        return packed.num_rows - packed.num_dummy_rows

    most_rows = (num_rows(len(lengths)) - 1) // rows_per_batch * rows_per_batch
    num_ready = bisect_right(range(1, len(lengths) + 1), most_rows, key=num_rows)
    while num_rows(num_ready) % rows_per_batch:  # seldom: one more example may save a row
        num_ready -= 1
    return num_ready if num_rows(num_ready) else len(lengths)
