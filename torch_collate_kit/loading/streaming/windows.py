"""Divides a stream of entries into batches, through a bounded buffer.

The stream is cut into windows of several buffers. Which entries make a batch depends only on their
lengths and patches, and on the window's first entry. So a place and a number of batches are the
position of a pass, and a window that is read again has the same batches.

Within a window the fullest rows are given out, and the rest is packed again with what follows. At
the end of a window the longest beginning of the buffer that fills whole batches is given out, so
only the place where it ends has to be saved.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from torch_collate_kit.loading.streaming.entries import ENTRY, atoms_of, place_after
from torch_collate_kit.loading.streaming.stages import ShardStages
from torch_collate_kit.loading.streaming.states import Place
from torch_collate_kit.packing import PackingOptions, PackingPlan
from torch_collate_kit.packing.atoms import NO_ATOMS
from torch_collate_kit.packing.options import MOST_CELLS
from torch_collate_kit.packing.planner import batch_of_rows, fill_rows

# A batch: ascending indices into the buffer, and the plan of these entries.
Group: TypeAlias = tuple[np.ndarray, PackingPlan]


class Windows:
    """Iterates once over batches: entries, their plan, and after a window the place of the next.

    At most ``buffer_size`` entries are held. A window reads at most ``num_buffers`` times as many,
    or one buffer more if whole batches did not reach past the entries that were held back.
    ``read(n)`` returns the next n entries, whose ``stages`` depend on what was packed.
    """

    def __init__(
        self,
        read: Callable[[int], np.ndarray],
        packing: PackingOptions,
        *,
        rows_per_batch: int,
        buffer_size: int,
        num_buffers: int,
        stages: ShardStages,
    ) -> None:
        self._read, self._packing, self._rows_per_batch = read, packing, rows_per_batch
        self._stages = stages
        self._buffer_size, self._num_buffers = buffer_size, num_buffers
        self._buffer = np.empty(0, dtype=ENTRY)
        self._num_read = 0  # since the window began
        self._num_broken = 0  # entries of the buffer after which it is an unbroken piece
        self._end = Place()  # after what has been read

    def __iter__(self) -> Iterator[tuple[np.ndarray, PackingPlan, Place | None]]:
        while self._read_on():
            ended = len(self._buffer) < self._buffer_size
            groups, next_window = [], None
            if not ended and self._num_read <= (self._num_buffers - 1) * self._buffer_size:
                groups = _fullest_groups(self._buffer, self._packing, self._rows_per_batch)
                self._num_broken = len(self._buffer) if groups else self._num_broken
            if not groups:
                groups = _first_groups(
                    self._buffer, self._packing, self._rows_per_batch, ended=ended
                )
                next_window = self._window_after(sum(len(indices) for indices, _ in groups))
            batches = self._taken_out(groups)
            self._stages.pack(len(batches), self._buffer)
            while len(batches) > 1:
                yield *batches.popleft(), None
            yield (
                *batches.popleft(),
                next_window,
            )  # nothing here refers to it while the buffer fills

    def _read_on(self) -> bool:
        """Fill the buffer, and return whether there is anything in it."""
        more = self._read(self._buffer_size - len(self._buffer))
        if len(more):
            self._end = place_after(more[-1])
            self._buffer = np.concatenate([self._buffer, more])
        self._num_read += len(more)
        return len(self._buffer) > 0

    def _window_after(self, num_packed: int) -> Place | None:
        """Return the start of the next window after ``num_packed`` entries; None if not yet.

        It is read from one place on, so what waits must be an unbroken piece of the stream.
        """
        if num_packed == len(self._buffer):
            next_window = self._end
        elif num_packed > self._num_broken:
            next_window = place_after(self._buffer[num_packed - 1])
        else:  # what was held back comes first, so a few rounds yield it
            self._num_broken -= num_packed
            return None
        self._num_read, self._num_broken = len(self._buffer) - num_packed, 0
        return self._stages.window_at(next_window, self._num_read)

    def _taken_out(self, groups: list[Group]) -> deque[tuple[np.ndarray, PackingPlan]]:
        """Take the entries of each group out of the buffer; the others keep their order."""
        taken = np.zeros(len(self._buffer), dtype=bool)
        taken[np.concatenate([indices for indices, _ in groups])] = True
        batches = deque(_planned(self._buffer[indices], plan) for indices, plan in groups)
        self._buffer = self._buffer[~taken]
        self._num_broken = min(self._num_broken, len(self._buffer))
        return batches


def _planned(entries: np.ndarray, plan: PackingPlan) -> tuple[np.ndarray, PackingPlan]:
    """Return a batch of entries whose plan names the pieces of examples."""
    is_piece = entries["is_piece"]
    if is_piece.any():
        plan = replace(plan, cut=np.flatnonzero(is_piece))
    return entries, plan


def _fullest_groups(
    buffer: np.ndarray, packing: PackingOptions, rows_per_batch: int
) -> list[Group]:
    """Return the fullest rows as batches; none if too few rows would remain.

    The batches hold at least a third of the examples, so an example is packed about three times.
    """
    packed = _filled(buffer, packing)
    if packed.num_rows < 2 * rows_per_batch:
        return []
    # Of equally full rows (in percent) those with the oldest longest example go first. Choosing the
    # longest examples would pack uniform lengths 0.1% better, but yield them too early: in the
    # first eighth of a window they would be 1.6 times as long as the mean.
    most = min(packed.max_tokens, MOST_CELLS)
    percent_free = (most - packed.row_cells) * 100 // most
    if packing.max_patches is not None:  # full in one of the two is full
        most = min(packing.max_patches, 1 << 56)  # the product must fit int64
        percent_free = np.minimum(percent_free, (most - packed.row_patches) * 100 // most)
    order = np.lexsort((packed.example_indices[packed.row_offsets[:-1]], percent_free))
    num_examples = np.cumsum(np.diff(packed.row_offsets)[order])
    num_rows = 1 + int(np.searchsorted(num_examples, num_examples[-1] / 3))
    num_rows = -(-num_rows // rows_per_batch) * rows_per_batch
    if num_rows + rows_per_batch > packed.num_rows:  # next time they might not fill a batch
        return []
    return _grouped(packed, order[:num_rows], packing, rows_per_batch)


def _first_groups(
    buffer: np.ndarray, packing: PackingOptions, rows_per_batch: int, *, ended: bool
) -> list[Group]:
    """Return the first entries as batches, or all if the stream has ended."""
    if not ended:
        buffer = buffer[: _num_ready(buffer, packing, rows_per_batch)]
    packed = _filled(buffer, packing)
    return _grouped(packed, np.arange(packed.num_rows), packing, rows_per_batch)


def _grouped(
    packed: PackingPlan, chosen: np.ndarray, packing: PackingOptions, rows_per_batch: int
) -> list[Group]:
    """Return the entries of the rows ``chosen``, ``rows_per_batch`` rows per group."""
    # By the longest example of each row, which is its first. In the order in which they were opened
    # the longest would come first, and by their oldest example those with many short ones.
    if len(packed.lengths):
        chosen = chosen[np.argsort(packed.example_indices[packed.row_offsets[chosen]])]
    left_out = packed.left_out  # counted in the first batch
    groups = []
    for i in range(0, len(chosen), rows_per_batch):
        rows = chosen[i : i + rows_per_batch]
        groups.append(batch_of_rows(packed, rows, left_out, packing))
        left_out = NO_ATOMS
    return groups


def _num_ready(buffer: np.ndarray, packing: PackingOptions, rows_per_batch: int) -> int:
    """Return the most entries that fill whole batches but not the last row, or all."""

    def num_rows(num_entries: int) -> int:
        packed = _filled(buffer[:num_entries], packing)
        return packed.num_rows - packed.num_dummy_rows

    most_rows = (num_rows(len(buffer)) - 1) // rows_per_batch * rows_per_batch
    num_ready = bisect_right(range(1, len(buffer) + 1), most_rows, key=num_rows)
    while num_rows(num_ready) % rows_per_batch:  # rare: one more entry may save a row
        num_ready -= 1
    return num_ready if num_rows(num_ready) else len(buffer)


def _filled(entries: np.ndarray, packing: PackingOptions) -> PackingPlan:
    """Return the rows of entries, as the strategy opens them."""
    return fill_rows(atoms_of(entries, packing), packing)
