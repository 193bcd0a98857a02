"""A stream of entries as lists that make a batch each, through a bounded buffer.

The stream is cut into windows of some buffers. Which entries make a batch follows from their
lengths and the window's first entry alone, so a place and a number of batches say where a pass
stands, and a window that is read again falls into the same batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from torch_collate_kit.loading._buffer import fullest_groups, groups_to_pack
from torch_collate_kit.loading._entries import ENTRY, place_behind
from torch_collate_kit.loading._stream import Place
from torch_collate_kit.packing import PackingPlan

__all__ = ["Windows"]


class Windows:
    """Iterates once: the entries of a batch, and with a window's last one where the next begins.

    At most ``buffer_size`` entries are held. A window reads at most ``num_buffers`` times as many,
    and one buffer more where whole batches did not reach behind the entries that were held back.
    ``read`` gives so many of the next entries, ``plan`` packs lengths into rows.
    """

    def __init__(
        self,
        read: Callable[[int], np.ndarray],
        plan: Callable[[np.ndarray], PackingPlan],
        *,
        rows_per_batch: int,
        buffer_size: int,
        num_buffers: int,
    ) -> None:
        self._read, self._plan, self._rows_per_batch = read, plan, rows_per_batch
        self._buffer_size, self._num_buffers = buffer_size, num_buffers
        self._buffer = np.empty(0, dtype=ENTRY)
        self._num_read = 0  # since the window began
        self._num_broken = 0  # of the buffer: all behind them has waited in one piece
        self._end = Place()  # of what has been read

    def __iter__(self) -> Iterator[tuple[np.ndarray, Place | None]]:
        while self._fill():
            ended = len(self._buffer) < self._buffer_size
            lengths = np.ascontiguousarray(self._buffer["num_tokens"])
            groups, next_window = [], None
            if not ended and self._num_read <= (self._num_buffers - 1) * self._buffer_size:
                groups = fullest_groups(lengths, self._plan, self._rows_per_batch)
                self._num_broken = len(lengths) if groups else self._num_broken
            if not groups:
                groups = groups_to_pack(lengths, self._plan, self._rows_per_batch, ended=ended)
                next_window = self._window_behind(sum(map(len, groups)))
            batches = self._taken_out(groups)
            while len(batches) > 1:
                yield batches.popleft(), None
            yield batches.popleft(), next_window  # nothing here refers to it while the buffer fills

    def _fill(self) -> bool:
        """Read on until the buffer is full; whether there is anything in it."""
        more = self._read(self._buffer_size - len(self._buffer))
        if len(more):
            self._end = place_behind(more[-1])
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
            next_window = place_behind(self._buffer[num_packed - 1])
        else:  # go on: what was held back is at the beginning, so some rounds give it all
            self._num_broken -= num_packed
            return None
        self._num_read, self._num_broken = len(self._buffer) - num_packed, 0
        return next_window

    def _taken_out(self, groups: list[np.ndarray]) -> deque[np.ndarray]:
        """The entries of each group; the others stay, in their order."""
        taken = np.zeros(len(self._buffer), dtype=bool)
        taken[np.concatenate(groups)] = True
        batches = deque(self._buffer[group] for group in groups)
        self._buffer = self._buffer[~taken]
        self._num_broken = min(self._num_broken, len(self._buffer))
        return batches
