"""The batches of a stream's shards, in rounds: a batch of every shard, then the next of every one.

A round is the same for any number of ranks and workers: what a shard yields depends on nothing
else, and which shards have a turn on their numbers of batches alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import get_worker_info

from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.counts import OF_A_STEP
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.skipping import Skipped, SkipPolicy
from torch_collate_kit.loading.streaming.joined import JoinedDocuments
from torch_collate_kit.loading.streaming.mixed_streams import MixedStream, open_shard
from torch_collate_kit.loading.streaming.shards import Stream
from torch_collate_kit.loading.streaming.stages import ShardStages
from torch_collate_kit.loading.streaming.states import Place, Position, positions_in, state_of
from torch_collate_kit.loading.streaming.windows import Windows
from torch_collate_kit.packing import PackingPlan
from torch_collate_kit.packing.rank_plan import PlannedExamples

_NUM_BUFFERS = 8  # of a window; 4 lose 0.9% on lengths spread evenly, for half the reading


class _Made(NamedTuple):
    batch: Batch | dict[str, Any]
    after: Position  # but for what was left out
    outcomes: list[Skipped | None]  # of its examples, and of those that were left out before them


class ShardBatches:
    """Iterates once over the batches of a shard after ``position``, each with the one after it.

    Raises:
        DataError: an example is wrong, or too many are; the message names its position.
        StateError: the position is not one of this source.
    """

    def __init__(
        self,
        stream: Stream | MixedStream,
        shard: int,
        position: Position,
        *,
        epoch: int | None,
        rows_per_batch: int,
        buffer_size: int,
        policy: SkipPolicy,
        num_shards: int,
    ) -> None:
        self._call, self._position, self._policy = stream.collate, position, policy
        packing, place, rows = stream.collator.packing, position.place, stream.stage_rows
        stages = ShardStages(rows, position, packing, rows_per_batch, num_shards=num_shards)
        options: dict[str, Any] = {"epoch": epoch, "policy": policy, "block_size": buffer_size}
        self._reader, self._wrong, self._name = open_shard(stream, shard, place, stages, **options)
        self._mixture = stream.source if isinstance(stream, MixedStream) else None
        self._shard = None if stream.num_shards is None else shard
        self._epoch = {} if epoch is None else {"epoch": epoch}
        if packing.strategy == "wrapped":
            self._windows: Windows | JoinedDocuments = JoinedDocuments(
                self._reader.read, packing, rows_per_batch=rows_per_batch, place=place
            )
            return
        self._windows = Windows(
            self._reader.read,
            packing,
            rows_per_batch=rows_per_batch,
            buffer_size=buffer_size,
            # sequential rows stay in order, so none of them can wait
            num_buffers=1 if packing.strategy == "sequential" else _NUM_BUFFERS,
            stages=stages,
        )

    def __iter__(self) -> Iterator[tuple[Batch | dict[str, Any] | None, Position]]:
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
            at = at._replace(num_given=at.num_given + 1)
            of_batch, outcomes, made = outcomes, [], [batch]
            del batch
            yield _Made(made.pop(), at, of_batch)  # nothing here refers to it any more
        return [*filter(None, outcomes), *self._wrong.taken()]

    def _given(
        self, made: _Made, rest: list[Skipped] | None = None
    ) -> tuple[Batch | dict[str, Any], Position]:
        """Return a batch and the position after it: the end, if only ``rest`` follows."""
        outcomes = [*made.outcomes, *(rest or [])]
        at = self._counted(made.after, outcomes, has_ended=rest is not None)
        if isinstance(made.batch, Batch):
            self._describe(made.batch, at, {one.example for one in outcomes if one is not None})
        return made.batch, at

    def _nothing_left(self, rest: list[Skipped]) -> tuple[None, Position]:
        """Return the end of a shard that has no batch to name what was left out."""
        is_whole = self._position == Position()
        at = self._counted(self._position, rest, has_ended=True)
        if is_whole:
            raise DataError(
                f"nothing is left of {self._name}: all of its {len(rest)} examples are wrong; the "
                f"last one: {rest[-1].reason}"
            )
        return None, at

    def _counted(
        self, after: Position, outcomes: Sequence[Skipped | None], *, has_ended: bool
    ) -> Position:
        before = self._position
        counts = self._policy.counted(before.num_skipped, before.num_in_a_row, outcomes)
        at = after._replace(num_skipped=counts[0], num_in_a_row=counts[1])
        if has_ended:  # read on from here, nothing would be counted again
            at = at._replace(place=self._reader.place, num_batches=0, has_ended=True)
        self._position = at
        return at

    def _describe(self, batch: Batch, after: Position, skipped: set[int]) -> None:
        if skipped:
            batch.metadata["skipped"] = sorted(skipped)
        if self._shard is not None:
            batch.metadata |= {"shard": self._shard, "step": after.num_given - 1, **self._epoch}

    def _not_given(self, at: Position) -> Iterator[tuple[np.ndarray, PackingPlan, Place | None]]:
        """Yield the batches after the position, of its window and of all later ones."""
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
        """Collate entries. Raises DataError, naming the position, if one is wrong."""
        try:
            examples = self._reader.examples(entries)
            batch: Batch | dict[str, Any] = self._call(PlannedExamples(plan, examples))
        except DataError as error:
            positions, sources = entries["position"].tolist(), entries["of"].tolist()
            raise self._wrong.named(error, positions, sources) from error
        if isinstance(batch, Batch):  # other ranks have rows of the step
            batch.metadata = {k: v for k, v in batch.metadata.items() if k not in OF_A_STEP}
            if self._mixture is not None:
                batch.metadata |= self._mixture.counts_in(entries["of"], plan)
        return batch


class Turn(NamedTuple):
    """A shard's turn in a round. With workers a turn without a batch keeps their places."""

    shard: int | None = None
    batch: Any = None
    after: Position | None = None  # of the shard; None if it has not changed
    has_batch: bool = False  # a loader's ``collate_fn`` may return None


_NO_TURN = Turn()


@dataclass(frozen=True)
class DividedStream:
    """The shards of one process, or those of a rank over the workers of a DataLoader.

    It does not move. Who reads keeps the position of each shard: the dataset, or a loader whose
    workers have copies, which are sent where to begin and return where a shard is with every batch.
    """

    stream: Stream | MixedStream
    read: Callable[..., Iterable[tuple[Any, Position]]]
    """``read(shard, position, epoch=...)`` yields batches, each with the position after it."""
    settings: Mapping[str, Any]
    """All that shapes batches besides the division; a state must have the same."""
    num_workers: int
    worker: int | None
    """None: the shards of all workers."""
    saved: Mapping[str, Any] | None
    """The state that the dataset has loaded for its next pass."""
    next_pass: int = 0
    """The number of that pass otherwise, of a shuffled stream."""

    @property
    def epoch(self) -> int | None:
        """The source's own epoch, if it has one."""
        return self.stream.epoch

    @property
    def _shards(self) -> range:
        shards = self.stream.shards(self.num_workers)
        return shards if self.worker is None else shards[self.worker :: max(1, self.num_workers)]

    def beginning(self) -> dict[int, Position]:
        """Return the positions at the beginning of a pass.

        Raises:
            ValueError: more workers than shards.
        """
        return dict.fromkeys(self._shards, Position())

    def start(self) -> dict[int, Position]:
        """Return the positions of the state that the dataset has loaded, or the beginning.

        Raises:
            StateError: the state does not have these shards.
        """
        return self.beginning() if self.saved is None else self.positions_in(self.saved)

    def first_pass(self) -> int:
        """Return the number of the pass that ``start`` begins; 0 of a stream without shuffle."""
        return self.next_pass if self.saved is None else self.pass_in(self.saved)

    def pass_in(self, state: Mapping[str, Any], default: int = 0) -> int:
        """Return the number of the pass of a state; the default of a stream without shuffle."""
        number: int = default if self.stream.seed is None else state["pass"]
        return number

    def turns(self, positions: Mapping[int, Position], epoch: int | None) -> Iterator[Turn]:
        """Return the turns of this process's shards in pass ``epoch``."""
        read = partial(self.read, epoch=epoch)
        worker = get_worker_info()
        if worker is None or self.worker is not None:
            return in_rounds(self._shards, positions, read)
        of_worker = {"worker": worker.id, "num_workers": worker.num_workers}
        return in_rounds(self._shards, positions, read, **of_worker)

    def state_at(
        self, positions: Mapping[int, Position], number: int | None, epoch: int | None
    ) -> dict[str, Any]:
        """Return the state of these shards in pass ``number``; ``epoch`` is the source's."""
        of_pass = {} if self.stream.seed is None else {"pass": number}
        return state_of(self._all_settings() | of_pass | {"epoch": epoch}, positions)

    def positions_in(self, state: Mapping[str, Any]) -> dict[int, Position]:
        """Return the positions of these shards.

        Raises:
            StateError: the state does not fit, or is damaged.
        """
        return positions_in(state, self._all_settings(), self._shards)

    def _all_settings(self) -> dict[str, Any]:
        stream = self.stream
        division: dict[str, Any] = {"num_shards": stream.num_shards}
        if stream.num_shards is None:
            division |= {"dp_size": stream.node[1], "num_workers": self.num_workers}
        if isinstance(stream, MixedStream):
            division["stages"] = stream.stages()
        return {
            **division,
            **self.settings,
            "seed": stream.seed,
            "presharded": stream.presharded,
            "epoch": stream.epoch,
            "fingerprint": stream.fingerprint(),
        }


def in_rounds(
    shards: range,
    positions: Mapping[int, Position],
    read: Callable[[int, Position], Iterable[tuple[Any, Position]]],
    *,
    worker: int = 0,
    num_workers: int = 1,
) -> Iterator[Turn]:
    """Yield the turns of a worker's shards, from ``positions`` until all have ended.

    Every worker has equally many turns in a round. So the workers' turns, one of each in rotation
    as a DataLoader draws them, are those of a single process: the shards in order, round by round.
    """
    mine = shards[worker::num_workers]
    num_turns = -(-len(shards) // num_workers)
    live = {shard: positions[shard] for shard in mine if not positions[shard].has_ended}
    batches: dict[int, Iterator[tuple[Any, Position]]] = {}
    counts = [at.num_given for at in positions.values() if not at.has_ended]
    step = min(counts, default=0)
    while live:
        if num_workers == 1:  # with more, others may have a turn in the rounds between
            step = max(step, min(at.num_given for at in live.values()))
        for i in range(num_turns):
            shard = mine[i] if i < len(mine) else None
            if shard is None or shard not in live or live[shard].num_given > step:
                turn = _NO_TURN
            else:
                if shard not in batches:
                    batches[shard] = iter(read(shard, live[shard]))
                turn = _next_turn(shard, live, batches[shard])
            if turn.after is not None or num_workers > 1:
                yield turn
            del turn  # its batch would be held beside the next
        step += 1


def _next_turn(
    shard: int, live: dict[int, Position], batches: Iterator[tuple[Any, Position]]
) -> Turn:
    batch, after = next(batches, (None, live[shard]._replace(has_ended=True)))
    live[shard] = after
    if after.has_ended:
        del live[shard]
    return Turn(shard, batch, after, batch is not None)
