"""The batches of one shard: read, planned in windows, collated, and without wrong examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.streaming.readers import reader_of
from torch_collate_kit.loading.streaming.shards import Stream
from torch_collate_kit.loading.streaming.skipping import ErrorPolicy, Skipped, WrongExamples
from torch_collate_kit.loading.streaming.states import Place, Position
from torch_collate_kit.loading.streaming.windows import Windows
from torch_collate_kit.packing import PackingPlan, PlannedExamples

__all__ = ["ShardBatches"]

_NUM_BUFFERS = 8  # of a window; 4 lose 0.9% on lengths spread evenly, for half the reading


class ShardBatches:
    """Iterates once over the batches of a shard after ``position``, each with the one after it.

    Raises:
        DataError: an example is wrong, or too many are; the message names its position.
        StateError: the position is not one of this source.
    """

    def __init__(
        self,
        stream: Stream,
        shard: int,
        position: Position,
        *,
        epoch: int | None,
        rows_per_batch: int,
        buffer_size: int,
        policy: ErrorPolicy,
    ) -> None:
        part = stream.part(shard)
        self._collator, self._position, self._policy = stream.collator, position, policy
        self._wrong = WrongExamples(policy, part.name)
        self._reader = reader_of(stream, part, position.place, self._wrong)
        self._shard = None if stream.num_shards is None else shard
        self._epoch = {} if epoch is None else {"epoch": epoch}
        packing = self._collator.packing
        self._windows = Windows(
            self._reader.read,
            packing,
            rows_per_batch=rows_per_batch,
            buffer_size=buffer_size,
            # sequential rows stay in order, so none of them can wait
            num_buffers=1 if packing.strategy == "sequential" else _NUM_BUFFERS,
        )

    def __iter__(self) -> Iterator[tuple[Batch | dict[str, Any], Position]]:
        at = self._position
        outcomes: list[Skipped | None] = []
        for entries, plan, next_window in self._not_given(at):
            batch, became = self._wrong.collated(entries, plan, self._collate)
            outcomes += became
            del entries, plan  # they would be held beside the next buffer
            at = at._replace(num_batches=at.num_batches + 1)
            if next_window is not None:
                at = at._replace(place=next_window, num_batches=0)
            if batch is None:
                continue
            at = self._policy.counted(at._replace(num_given=at.num_given + 1), outcomes)
            if isinstance(batch, Batch):
                self._describe(batch, at, {one.position for one in outcomes if one is not None})
            outcomes, made = [], [batch]
            del batch
            yield made.pop(), at  # nothing here refers to it while other shards make theirs
        self._policy.counted(at, [*outcomes, *self._wrong.taken()])

    def _describe(self, batch: Batch, after: Position, skipped: set[int]) -> None:
        if skipped:
            batch.metadata["skipped"] = sorted(skipped)
        if self._shard is not None:
            batch.metadata |= {"shard": self._shard, "step": after.num_given - 1, **self._epoch}

    def _not_given(self, at: Position) -> Iterator[tuple[np.ndarray, PackingPlan, Place | None]]:
        """The batches of the window that follow, and those of all later windows."""
        batches = iter(self._windows)
        for num_skipped in range(at.num_batches):
            if next(batches, (None, None, at.place))[-1] is not None:  # the window ends
                raise StateError(
                    f"the state is {at.num_batches} batches after example {at.place.num_read} of "
                    f"the stream, where at most {num_skipped + 1} follow now; the source is not "
                    "what it was when the state was saved"
                )
        yield from batches

    def _collate(self, entries: np.ndarray, plan: PackingPlan) -> Batch | dict[str, Any]:
        """DataError: one of the entries is wrong; the message names its position."""
        try:
            examples = self._reader.examples(entries)
            batch: Batch | dict[str, Any] = self._collator(PlannedExamples(plan, examples))
        except DataError as error:
            raise self._wrong.named(error, entries["position"].tolist()) from error
        return batch
