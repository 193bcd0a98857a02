"""A stream of entries as lists that make a batch each, through a bounded buffer.

The stream is cut into windows of some buffers. Which entries make a batch follows from their
lengths and the window's first entry alone, so a place and a number of batches say where a pass
stands, and a window that is read again falls into the same batches.

Two answers. Within a window the fullest rows are given out, and what was in poor rows is packed
again with what comes: a long example without a partner waits for one. At the end of a window the
longest beginning of the buffer that fills whole batches is given out, so that nothing has to be
remembered but where the beginning ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np

from torch_collate_kit.loading.streaming.readers import ENTRY, place_after
from torch_collate_kit.loading.streaming.shards import Place
from torch_collate_kit.packing import PackingOptions, PackingPlan
from torch_collate_kit.packing.planner import fill_rows, rows_alone

__all__ = ["PlannedEntries", "Windows", "fullest_groups", "groups_to_pack"]


# What makes a batch: the examples of the buffer by index, ascending, and the plan of them.
Group: TypeAlias = tuple[np.ndarray, PackingPlan]


class PlannedEntries(NamedTuple):
    """The entries of a batch, and the plan of it: the piece of each entry, by its number."""

    entries: np.ndarray
    plan: PackingPlan

    @classmethod
    def of(cls, entries: np.ndarray, plan: PackingPlan) -> PlannedEntries:
        """``plan`` packs the lengths of the entries, each of which may be a piece itself."""
        is_piece = entries["is_piece"]
        if is_piece.any():
            starts = entries["start"][plan.example_indices]
            plan = replace(plan, starts=starts, cut=np.flatnonzero(is_piece))
        return cls(entries, plan)


class Windows:
    """Iterates once: the entries of a batch, and with a window's last one where the next begins.

    At most ``buffer_size`` entries are held. A window reads at most ``num_buffers`` times as many,
    and one buffer more where whole batches did not reach past the entries that were held back.
    ``read`` gives so many of the next entries.
    """

    def __init__(
        self,
        read: Callable[[int], np.ndarray],
        packing: PackingOptions,
        *,
        rows_per_batch: int,
        buffer_size: int,
        num_buffers: int,
    ) -> None:
        self._read, self._packing, self._rows_per_batch = read, packing, rows_per_batch
        self._buffer_size, self._num_buffers = buffer_size, num_buffers
        self._buffer = np.empty(0, dtype=ENTRY)
        self._num_read = 0  # since the window began
        self._num_broken = 0  # of the buffer: all behind them has waited in one piece
        self._end = Place()  # of what has been read

    def __iter__(self) -> Iterator[tuple[PlannedEntries, Place | None]]:
        while self._read_on():
            ended = len(self._buffer) < self._buffer_size
            lengths = np.ascontiguousarray(self._buffer["num_tokens"])
            groups, next_window = [], None
            if not ended and self._num_read <= (self._num_buffers - 1) * self._buffer_size:
                groups = fullest_groups(lengths, self._packing, self._rows_per_batch)
                self._num_broken = len(lengths) if groups else self._num_broken
            if not groups:
                groups = groups_to_pack(lengths, self._packing, self._rows_per_batch, ended=ended)
                next_window = self._window_behind(sum(len(indices) for indices, _ in groups))
            batches = self._taken_out(groups)
            while len(batches) > 1:
                yield batches.popleft(), None
            yield batches.popleft(), next_window  # nothing here refers to it while the buffer fills

    def _read_on(self) -> bool:
        """Read on until the buffer is full; whether there is anything in it."""
        more = self._read(self._buffer_size - len(self._buffer))
        if len(more):
            self._end = place_after(more[-1])
            self._buffer = np.concatenate([self._buffer, more])
        self._num_read += len(more)
        return len(self._buffer) > 0

    def _window_behind(self, num_packed: int) -> Place | None:
        """Where the next window begins if the first ``num_packed`` are given out, if it may.

        It is read from one place on, so what waits must be an unbroken piece of the stream.
        """
        if num_packed == len(self._buffer):
            next_window = self._end
        elif num_packed > self._num_broken:
            next_window = place_after(self._buffer[num_packed - 1])
        else:  # go on: what was held back is at the beginning, so some rounds give it all
            self._num_broken -= num_packed
            return None
        self._num_read, self._num_broken = len(self._buffer) - num_packed, 0
        return next_window

    def _taken_out(self, groups: list[Group]) -> deque[PlannedEntries]:
        """The entries of each group; the others stay, in their order."""
        taken = np.zeros(len(self._buffer), dtype=bool)
        taken[np.concatenate([indices for indices, _ in groups])] = True
        batches = deque(PlannedEntries.of(self._buffer[indices], plan) for indices, plan in groups)
        self._buffer = self._buffer[~taken]
        self._num_broken = min(self._num_broken, len(self._buffer))
        return batches


def fullest_groups(
    lengths: np.ndarray, packing: PackingOptions, rows_per_batch: int
) -> list[Group]:
    """The examples of each batch; none if too few rows would stay behind.

    ``lengths`` int64 [N] are of the examples in the buffer, in the order of the stream. The batches
    hold a third of the examples or more, so an example is packed some three times.

    >>> groups = fullest_groups(np.array([4, 2, 6, 3]), PackingOptions(6), 1)
    >>> [indices.tolist() for indices, plan in groups]  # and 6 and 3 wait
    [[0, 1]]
    """
    packed = fill_rows(lengths, packing)
    if packed.num_rows < 2 * rows_per_batch:
        return []
    # Of rows that are full to the same percent those go first whose longest example is oldest. By
    # the longest examples would pack uniform lengths by 0.1% better, and give out the long examples
    # at the beginning of a window: by 1.6 times the mean length in its first eighth.
    percent_free = (packed.max_tokens - packed.row_cells) * 100 // packed.max_tokens
    order = np.lexsort((packed.example_indices[packed.row_offsets[:-1]], percent_free))
    num_examples = np.cumsum(np.diff(packed.row_offsets)[order])
    num_rows = 1 + int(np.searchsorted(num_examples, num_examples[-1] / 3))
    num_rows = -(-num_rows // rows_per_batch) * rows_per_batch
    if num_rows + rows_per_batch > packed.num_rows:  # next time they might not fill a batch
        return []
    return _grouped(packed, order[:num_rows], packing, rows_per_batch)


def groups_to_pack(
    lengths: np.ndarray,
    packing: PackingOptions,
    rows_per_batch: int,
    *,
    ended: bool,
) -> list[Group]:
    """The examples of each batch; together they are ``range(num_packed)``.

    ``lengths`` int64 [N] are of the examples in the buffer, ``ended`` says that no more will come.

    >>> groups = groups_to_pack(np.array([4, 2, 6, 3]), PackingOptions(6), 1, ended=False)
    >>> [indices.tolist() for indices, plan in groups]
    [[0, 1], [2]]
    """
    num_packed = len(lengths) if ended else _num_ready(lengths, packing, rows_per_batch)
    packed = fill_rows(lengths[:num_packed], packing)
    return _grouped(packed, np.arange(packed.num_rows), packing, rows_per_batch)


def _grouped(
    packed: PackingPlan, chosen: np.ndarray, packing: PackingOptions, rows_per_batch: int
) -> list[Group]:
    """The examples of the rows ``chosen``, ``rows_per_batch`` rows a group."""
    # A row begins with its longest example. Rows as they were opened would come longest first, and
    # rows by their oldest example those with many short ones first.
    if len(packed.lengths):
        chosen = chosen[np.argsort(packed.example_indices[packed.row_offsets[chosen]])]
    dropped = packed.dropped  # they are counted in the first batch
    groups = []
    for i in range(0, len(chosen), rows_per_batch):
        rows = chosen[i : i + rows_per_batch]
        groups.append(rows_alone(packed, rows, dropped, packing))
        dropped = dropped[:0]
    return groups


def _num_ready(lengths: np.ndarray, packing: PackingOptions, rows_per_batch: int) -> int:
    """The most examples that fill whole batches and a row less than all do; all, if none do."""

    def num_rows(num_examples: int) -> int:
        packed = fill_rows(lengths[:num_examples], packing)
        return packed.num_rows - packed.num_dummy_rows

    most_rows = (num_rows(len(lengths)) - 1) // rows_per_batch * rows_per_batch
    num_ready = bisect_right(range(1, len(lengths) + 1), most_rows, key=num_rows)
    while num_rows(num_ready) % rows_per_batch:  # seldom: one more example may save a row
        num_ready -= 1
    return num_ready if num_rows(num_ready) else len(lengths)
