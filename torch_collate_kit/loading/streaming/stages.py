"""Where the stages of a mixture begin in a shard of a stream.

A stage begins at a step, so at a batch of each shard; what is read is in a batch that is not packed
yet. It will be about as many batches after those packed so far as its tokens fill at their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from torch_collate_kit.loading.streaming.states import Place, Position
from torch_collate_kit.packing import PackingOptions


class ShardStages:
    """The stage of the next entry of a shard: a function of what was read and packed before it.

    ``stage_rows`` are the rows of the pass, over all shards, before each later stage. Without
    ``pack`` all batches are taken to be full, as joined documents fill them.

    A window that is read again must have the stages it had, but when it begins for the first time,
    entries of it wait in the buffer that were read when fewer batches were packed. So its state has
    their number, and where stages began among them.
    """

    def __init__(
        self,
        stage_rows: Sequence[int],
        position: Position,
        packing: PackingOptions,
        rows_per_batch: int,
        *,
        num_shards: int,
    ) -> None:
        self._starts = [Fraction(rows, rows_per_batch * num_shards) for rows in stage_rows]
        self._full = rows_per_batch * packing.capacity
        self._is_joined = packing.strategy == "wrapped"
        self._num_batches = position.num_given - position.num_batches  # packed so far
        self._mean: Fraction | None = None  # tokens of one
        self.number = 0
        self.num_read = 0  # tokens, before the next entry
        self.has_ended = False  # no entry follows
        self._num_known, self._known = 0, list[int]()  # entries read before, stages among them
        self._begun: dict[int, int] = {}  # tokens before the stages that have begun

    def pack(self, num_batches: int, waiting: np.ndarray) -> None:
        """Record that so many more batches were packed; ``waiting`` is in the buffer, ENTRY [N]."""
        if self._starts:
            self._num_batches += num_batches
            self._set_mean(self.num_read - int(waiting["num_tokens"].sum()))

    def _set_mean(self, num_packed: int) -> None:
        if self._num_batches and num_packed and not self._is_joined:
            self._mean = Fraction(num_packed, self._num_batches)

    def begins(self) -> bool:
        """Return whether the next stage begins at the next entry, and begin it."""
        if self.has_ended or self.number == len(self._starts):
            return False
        if self._num_known:
            if not self._known or self.num_read < self._known[0]:
                return False
            del self._known[0]
        elif self.num_read < self._starts[self.number] * (self._mean or self._full):
            return False
        self.number += 1
        self._begun[self.number] = self.num_read
        return True

    def read(self, num_tokens: int) -> None:
        """Record that the next entry was read."""
        self.num_read += num_tokens
        self._num_known = max(0, self._num_known - 1)

    def state(self) -> list[int]:
        """Return the stage and the tokens before it, for the place after the last entry."""
        return [self.number, self.num_read, 0]

    def window_at(self, place: Place, num_waiting: int) -> Place:
        """Return the place of a window of which so many entries were read before it began."""
        if not self._starts:
            return place
        *sources, (number, num_read, _) = place.source
        later = [at for stage, at in self._begun.items() if stage > number]
        num_waiting += self.has_ended  # no stage begins at the end when it is read again
        return place._replace(source=[*sources, [number, num_read, num_waiting, *later]])

    def restore(self, state: list[int]) -> None:
        """Move to where a state is."""
        self.number, self.num_read, self._num_known, *self._known = state
        self._set_mean(self.num_read)
