"""The batches of one shard: read, planned in windows, collated, and without wrong examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.streaming.readers import reader_of
from torch_collate_kit.loading.streaming.shards import Stream
from torch_collate_kit.loading.streaming.skipping import (
    ErrorPolicy,
    Skipped,
    WrongExamples,
    plan_without,
)
from torch_collate_kit.loading.streaming.states import Position
from torch_collate_kit.loading.streaming.windows import PlannedEntries, Windows
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
        for planned, next_window in self._not_given(at):
            batch, wrong = self._collated(planned)
            if self._policy.skips:
                outcomes += _outcomes(planned.entries, wrong)
            del planned  # its entries would be held beside the next buffer
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

    def _not_given(self, at: Position) -> Iterator[tuple[PlannedEntries, Any]]:
        """The batches of the window that follow, and those of all later windows."""
        batches = iter(self._windows)
        for num_skipped in range(at.num_batches):
            if next(batches, (None, at.place))[1] is not None:  # the window ends
                raise StateError(
                    f"the state is {at.num_batches} batches after example {at.place.num_read} of "
                    f"the stream, where at most {num_skipped + 1} follow now; the source is not "
                    "what it was when the state was saved"
                )
        yield from batches

    def _collated(
        self, planned: PlannedEntries
    ) -> tuple[Batch | dict[str, Any] | None, dict[int, Skipped]]:
        """The batch, or None if nothing is left of it, and what was left out, by its number."""
        entries, wrong = planned.entries, dict[int, Skipped]()
        try:
            return self._collate(entries, planned.plan), wrong
        except DataError as error:
            if self._policy.skips:
                wrong = self._wrong_alone(planned)
            if not wrong:
                raise self._wrong.named(error, entries["position"].tolist()) from error
        is_wrong = np.zeros(len(entries), dtype=bool)
        is_wrong[list(wrong)] = True
        plan = plan_without(planned.plan, is_wrong)
        if not len(plan.example_indices):
            return None, wrong
        entries = entries[~is_wrong]
        try:
            return self._collate(entries, plan), wrong
        except DataError as error:
            raise self._wrong.named(error, entries["position"].tolist()) from error

    def _wrong_alone(self, planned: PlannedEntries) -> dict[int, Skipped]:
        """The examples of a batch that cannot be collated alone, by their number in it."""
        wrong = {}
        plan = planned.plan
        # those that overflow drops are read, too
        for number in np.union1d(plan.example_indices, plan.dropped).tolist():
            others = np.arange(len(planned.entries)) != number
            entry = planned.entries[~others]
            try:
                self._collate(entry, plan_without(plan, others))
            except DataError as error:
                position = int(entry["position"][0])
                wrong[number] = Skipped(position, str(self._wrong.named(error, [position])))
        return wrong

    def _collate(self, entries: npt.NDArray[np.void], plan: PackingPlan) -> Batch | dict[str, Any]:
        examples = self._reader.examples(entries)
        batch: Batch | dict[str, Any] = self._collator(PlannedExamples(plan, examples))
        return batch


def _outcomes(entries: npt.NDArray[np.void], wrong: dict[int, Skipped]) -> list[Skipped | None]:
    """What became of the examples of a batch, and of those before them that could not be packed."""
    outcomes: list[Skipped | None] = []
    for number, before in enumerate(entries["skipped"]):
        outcomes += [*before, wrong.get(number)]
    return outcomes
