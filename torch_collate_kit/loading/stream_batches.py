"""The batches of a shard of a stream: windows of its entries, planned and collated."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from itertools import compress, islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.counts import OF_A_STEP
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.mixed_streams import MixedStream, open_shard
from torch_collate_kit.loading.shards import Stream
from torch_collate_kit.loading.skipping import Skipped, SkipPolicy, collated, named
from torch_collate_kit.loading.states import Place, ShardPosition
from torch_collate_kit.loading.stream_entries import Entry, LeftOut, atoms_of, check_start
from torch_collate_kit.packing import PackingOptions, PackingPlan
from torch_collate_kit.packing.planner import part_of, plan_rows
from torch_collate_kit.packing.rank_plan import PlannedExamples
from torch_collate_kit.packing.rows import Rows, running_sum
from torch_collate_kit.packing.steps import num_rows_needed, num_that_fit, plan_window

_Outcomes: TypeAlias = list[Skipped | None]
Planned: TypeAlias = tuple[list[Entry], PackingPlan, Place | None]
"""Entries of a batch, their plan, and after the last batch of a window the place of the next."""


def windows_of(
    entries: Iterator[Entry], packing: PackingOptions, *, batch_rows: int, buffer_size: int
) -> Iterator[Planned]:
    """Yield the batches of all entries, at most ``buffer_size`` of which are held.

    The buffer is a window of steps: as many of its first entries as fill whole batches are planned
    together, as the steps of a sampler are, and the others begin the next window. So a place and a
    number of batches are the position of a pass, and a window that is read again has the same
    batches.
    """
    buffer: list[Entry] = []
    while True:
        buffer += islice(entries, buffer_size - len(buffer))
        if not buffer:
            return
        atoms = atoms_of(buffer, packing)
        num_steps, number = num_rows_needed(atoms, packing) // batch_rows, len(buffer)
        # the last batch, or a buffer that is small for the rows
        if not num_steps and packing.max_sequences_per_row is None:
            after, plan = buffer[-1].place, _of_pieces(buffer, plan_rows(atoms, packing))
            window, buffer = buffer, []
            yield _taken(window), plan, after
            continue
        if num_steps:
            rows = num_steps * batch_rows
            number = num_that_fit(atoms, packing, rows, more_follow=False) or 0
        num_steps = max(1, num_steps)  # filled up to as many rows where shapes are to stay
        planned = plan_window(
            atoms.take(np.arange(number)),
            packing,
            num_steps=num_steps,
            batch_rows=batch_rows,
            group=packing.row_multiple,
        )
        after, window, buffer = buffer[number - 1].place, buffer[:number], buffer[number:]
        for step in range(num_steps):
            numbers, plan = planned.step(step, packing)
            chosen = [window[i] for i in numbers.tolist()]
            plan = _of_pieces(chosen, plan)
            if step + 1 == num_steps:
                window = []
            yield _taken(chosen), plan, after if step + 1 == num_steps else None


def _taken(entries: list[Entry]) -> list[Entry]:
    """Return a copy of a list and empty it: a generator would hold the entries that it yielded."""
    taken, entries[:] = entries[:], []
    return taken


def _of_pieces(entries: Sequence[Entry], plan: PackingPlan) -> PackingPlan:
    """Return the plan of entries, of which some are pieces of examples that were cut."""
    cut = np.flatnonzero([entry.is_piece for entry in entries])
    return replace(plan, cut=cut) if len(cut) else plan


def joined_batches(
    entries: Iterator[Entry], packing: PackingOptions, *, batch_rows: int, place: Place
) -> Iterator[Planned]:
    """Yield batches of full rows of documents joined end to end, from ``place`` on.

    A batch ends with its last row, mostly within a document, whose rest begins the next one. So
    every batch is a window of its own, and ``start`` of its place are the tokens of the next
    document that have been given out. The last batch may have fewer rows.
    """
    num_tokens = batch_rows * packing.capacity
    documents: list[Entry] = []
    waiting = -place.start
    while True:
        while waiting < num_tokens and (following := [*islice(entries, 1)]):
            documents += following
            waiting += following[0].num_tokens
        if not documents:
            return
        check_start(place, documents[0].position, documents[0].num_tokens)
        atoms = atoms_of(documents, packing)  # examples of segments are refused
        waiting, lengths = max(0, waiting - num_tokens), atoms.tokens.copy()
        lengths[0] -= place.start
        lengths[-1] -= waiting
        starts = np.where(atoms.examples == 0, place.start, 0)
        plan = plan_rows(replace(atoms, tokens=lengths, starts=starts), packing)
        if not waiting:
            place = documents[-1].place
        elif len(documents) == 1:
            place = place._replace(start=place.start + int(lengths[-1]))
        else:
            place = documents[-2].place._replace(start=int(lengths[-1]))
        rest, following = documents[-1:] if waiting else [], []
        yield _taken(documents), plan, place
        documents = rest


class _Made(NamedTuple):
    batch: Batch | dict[str, Any]
    after: ShardPosition  # but for what was left out
    outcomes: _Outcomes  # of its examples, and of those that were left out before them


class ShardBatches:
    """Iterates once over the batches of a shard after ``position``, each with the one after it."""

    def __init__(
        self,
        stream: Stream | MixedStream,
        shard: int,
        position: ShardPosition,
        *,
        epoch: int | None,
        batch_rows: int,
        buffer_size: int,
        policy: SkipPolicy,
    ) -> None:
        self._stream, self._shard, self._epoch = stream, shard, epoch
        if not position.num_batches:
            position = position._replace(place=stream.renewed(position.place))
        self._position, self._policy = position, policy
        self._batch_rows, self._buffer_size = batch_rows, buffer_size
        self._left_out = LeftOut(policy, "the stream")

    def __iter__(self) -> Iterator[tuple[Batch | dict[str, Any] | None, ShardPosition]]:
        # without a batch: the rest of a shard, after a resume, is wrong
        made = self._made()
        held: deque[_Made] = deque()
        num_held = int(self._policy.skips)  # the last batch names what is left out after it
        while True:
            rest: list[Skipped] | None = None
            try:
                held.append(next(made))
            except StopIteration as end:
                rest = end.value
            except Exception:
                if held:  # the error is not of this batch
                    yield self._given(held.popleft())
                raise
            if held and (rest is not None or len(held) > num_held):
                yield self._given(held.popleft(), rest)
            elif rest:
                yield self._nothing_left(rest)
            if rest is not None:
                return

    def _made(self) -> Generator[_Made, None, list[Skipped]]:
        """Yield the batches that are not empty; return what was left out after the last."""
        after = self._position
        outcomes: _Outcomes = []
        for entries, plan, next_window in self._not_given(after):
            batch, found = self._collated(entries, plan)
            outcomes += found
            del entries, plan  # they would be held beside the next buffer
            after = after._replace(num_batches=after.num_batches + 1)
            if next_window is not None:
                after = after._replace(place=next_window, num_batches=0)
            if batch is None:
                continue
            after = after._replace(num_given=after.num_given + 1)
            of_batch, outcomes, made = outcomes, [], [batch]
            del batch
            yield _Made(made.pop(), after, of_batch)  # nothing here refers to it any more
        return [*filter(None, outcomes), *self._left_out.take()]

    def _given(
        self, made: _Made, rest: list[Skipped] | None = None
    ) -> tuple[Batch | dict[str, Any], ShardPosition]:
        """Return a batch and the position after it: the end, if only ``rest`` follows."""
        outcomes = [*made.outcomes, *(rest or [])]
        after = self._counted(made.after, outcomes, has_ended=rest is not None)
        if isinstance(batch := made.batch, Batch):
            if skipped := {one.example for one in outcomes if one is not None}:
                batch.metadata["skipped"] = sorted(skipped)
            if self._stream.num_shards is not None:
                batch.metadata |= {"shard": self._shard, "step": after.num_given - 1}
                batch.metadata |= {} if self._epoch is None else {"epoch": self._epoch}
        return batch, after

    def _nothing_left(self, rest: list[Skipped]) -> tuple[None, ShardPosition]:
        """Return the end of a shard that has no batch to name what was left out."""
        is_whole = self._position == ShardPosition()
        after = self._counted(self._position, rest, has_ended=True)
        if is_whole:
            raise DataError(
                f"nothing is left of {self._left_out.shard}: all of its {len(rest)} examples are "
                f"wrong; the last one: {rest[-1].reason}"
            )
        return None, after

    def _counted(
        self, after: ShardPosition, outcomes: Sequence[Skipped | None], *, has_ended: bool
    ) -> ShardPosition:
        before = self._position
        num, in_a_row = self._policy.counted(before.num_skipped, before.num_in_a_row, outcomes)
        self._position = after._replace(num_skipped=num, num_in_a_row=in_a_row, has_ended=has_ended)
        return self._position

    def _not_given(self, position: ShardPosition) -> Iterator[Planned]:
        """Yield the batches after the position, of its window and of all later ones."""
        batches = self._planned(position)
        for number in range(position.num_batches):
            if next(batches, (None, None, position.place))[-1] is not None:  # the window ends
                raise StateError(
                    f"the state is {position.num_batches} batches after example "
                    f"{position.place.num_read} of the stream, where at most {number + 1} follow "
                    "now; the source is not what it was when the state was saved"
                )
        yield from batches

    def _planned(self, position: ShardPosition) -> Iterator[Planned]:
        """Yield all batches of the window of a position, and of all later ones."""
        place = position.place
        if position.num_batches and self._stream.renewed(place) != place:
            for entries, plan, next_window in self._windows(place):
                if next_window is None:
                    yield entries, plan, None
                    continue
                place = self._stream.renewed(next_window)
                yield entries, plan, place
                break
        yield from self._windows(place)

    def _windows(self, place: Place) -> Iterator[Planned]:
        """Yield all batches from ``place`` on; of a mixture with the weights of the place."""
        packing = self._stream.collator.packing
        entries, self._left_out = open_shard(
            self._stream,
            self._shard,
            place,
            policy=self._policy,
            epoch=self._epoch,
            block_size=self._buffer_size,
        )
        if packing.strategy == "wrapped":
            return joined_batches(entries, packing, batch_rows=self._batch_rows, place=place)
        return windows_of(
            entries, packing, batch_rows=self._batch_rows, buffer_size=self._buffer_size
        )

    def _collated(self, entries: list[Entry], plan: PackingPlan) -> tuple[Any, _Outcomes]:
        """Collate a batch without its wrong examples; None if all are wrong.

        Also returns the outcome of each of its examples and of those left out before them, None if
        it is in the batch; nothing where none may be left out.
        """
        if not self._policy.skips:
            return self._collate(entries, plan), []
        everything = np.arange(len(entries))

        def collate_part(numbers: Sequence[int]) -> Any:
            is_left = np.isin(everything, numbers)
            part = plan if is_left.all() else _plan_of(plan, is_left)
            return self._collate(list(compress(entries, is_left)), part)

        batch, failing = collated(collate_part, everything.tolist(), DataError)
        if failing and set(plan.example_indices.tolist()) <= failing.keys():
            batch = None  # what is left was dropped
        outcomes: _Outcomes = []
        for number, entry in enumerate(entries):
            error = failing.get(number)
            skipped = None if error is None else Skipped(entry.position, str(error))
            outcomes += [*entry.skipped, skipped]
        return batch, outcomes

    def _collate(self, entries: Sequence[Entry], plan: PackingPlan) -> Batch | dict[str, Any]:
        """Collate entries. Raises DataError, naming the position, if one is wrong."""
        stream, examples = self._stream, [entry.example for entry in entries]
        try:
            batch: Batch | dict[str, Any] = stream.collate(PlannedExamples(plan, examples))
        except DataError as error:
            raise named(error, [(entry.position, entry.where) for entry in entries]) from error
        if isinstance(batch, Batch):  # other ranks have rows of the step
            batch.metadata = {k: v for k, v in batch.metadata.items() if k not in OF_A_STEP}
            if isinstance(stream, MixedStream):
                sources = np.array([entry.source for entry in entries])
                batch.metadata |= stream.source.counts_in(sources, plan)
        return batch


def _plan_of(plan: PackingPlan, is_left: np.ndarray) -> PackingPlan:
    """Return the same rows with some of the examples, bool [N], numbered anew."""
    is_placed = is_left[plan.example_indices]
    rows = Rows(np.flatnonzero(is_placed), running_sum(is_placed)[plan.row_offsets])
    return part_of(plan, rows, np.flatnonzero(is_left))
