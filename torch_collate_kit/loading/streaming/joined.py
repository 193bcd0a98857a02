"""Divides a stream of documents, joined end to end, into batches of full rows.

A batch ends with its last row, mostly within a document, of which the rest begins the next one. So
every batch is a window of its own: its position is a place, with the tokens of the next document
that have been given out as the ``start`` of the place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from torch_collate_kit.loading.streaming.entries import ENTRY, atoms_of, place_after
from torch_collate_kit.loading.streaming.readers import check_start
from torch_collate_kit.loading.streaming.states import Place
from torch_collate_kit.packing import PackingOptions, PackingPlan
from torch_collate_kit.packing.planner import plan_rows

_READ_AT_ONCE = 64


class JoinedDocuments:
    """Iterates once over batches: documents, their plan, and the place of the next batch.

    ``read(n)`` returns the next n documents after ``place``, whose ``start`` are the tokens of the
    first one to leave out. The last batch may have fewer rows.
    """

    def __init__(
        self,
        read: Callable[[int], np.ndarray],
        packing: PackingOptions,
        *,
        rows_per_batch: int,
        place: Place,
    ) -> None:
        self._read, self._packing = read, packing
        self._num_tokens = rows_per_batch * packing.capacity
        self._place = place
        self._buffer = np.empty(0, dtype=ENTRY)

    def __iter__(self) -> Iterator[tuple[np.ndarray, PackingPlan, Place]]:
        while (ends := self._read_on()).size:
            number = int(np.searchsorted(ends, self._num_tokens)) + 1
            batch, skipped = self._buffer[:number], self._place.start
            first = batch[0]
            check_start(self._place, int(first["position"]), int(first["num_tokens"]))
            atoms = atoms_of(batch, self._packing)  # examples of segments are refused
            left = batch["num_tokens"].copy()
            left[0] -= skipped
            unread = max(0, int(ends[len(batch) - 1]) - self._num_tokens)
            left[-1] -= unread
            atoms = replace(atoms, tokens=left, starts=np.where(atoms.examples == 0, skipped, 0))
            plan = plan_rows(atoms, self._packing)
            self._place = self._place_before(len(batch) - 1, int(left[-1]), unread)
            self._buffer = self._buffer[len(batch) - (unread > 0) :].copy()
            yield batch, plan, self._place

    def _read_on(self) -> np.ndarray:
        """Read until there is a batch, and return where documents end in tokens, from its start."""
        while True:
            ends = np.cumsum(self._buffer["num_tokens"]) - self._place.start
            if len(ends) and ends[-1] >= self._num_tokens:
                return ends
            more = self._read(_READ_AT_ONCE)
            if not len(more):
                return ends
            self._buffer = np.concatenate([self._buffer, more])

    def _place_before(self, last: int, given: int, unread: int) -> Place:
        """Return the place within the last document of a batch, or after it if none is unread."""
        if not unread:
            return place_after(self._buffer[last])
        if last == 0:
            return self._place._replace(start=self._place.start + given)
        return place_after(self._buffer[last - 1])._replace(start=given)
