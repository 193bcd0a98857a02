"""A stream of examples into packed batches, through a bounded buffer.

The stream is cut into windows, and a window is given out completely before the next begins. So the
state is the place where the window began and the number of batches since: no tokens, no list of
what waits. The cost: a resumed pass reads up to a window again.

Shards are read in rounds: a batch of every shard, then the next of every one. A round is the same
for any number of ranks and workers: what a shard yields depends on nothing else, and which shards
have a turn on their numbers of batches alone.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from torch_collate_kit._checks import (
    KindAndSize,
    call_repr,
    changed_settings,
    checked_bool,
    checked_int,
    checked_optional_int,
)
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators.packed import checked_collator
from torch_collate_kit.loading.checks import checked_word, divided_again, rank_in
from torch_collate_kit.loading.mixed_streams import MixedStream
from torch_collate_kit.loading.mixture import Mixture
from torch_collate_kit.loading.shards import ExampleSource, Stream, node_of
from torch_collate_kit.loading.skipping import OnError, SkipPolicy
from torch_collate_kit.loading.states import ShardPosition, positions_in, state_of
from torch_collate_kit.loading.stream_batches import ShardBatches
from torch_collate_kit.packing import PackingOptions


class PackedIterableDataset(IterableDataset[Batch | dict[str, Any]]):
    """Packs a stream of examples into batches of rows.

    Args:
        stream: an iterable of examples that can be iterated again, or a callable that makes one.
            Or a ``Mixture`` of such streams with ``weights``.
        collate: a ``PackedCollator``, whose ``packing.parallel.dp`` ranks divide the stream, or its
            ``for_trainer()``.
        batch_rows: rows of a step over all ranks, a multiple of ``dp``, of which each rank yields
            its share. The last batch of a pass may have fewer.
        buffer_size: the most examples held at a time, whose rows are planned together. At 1,000,
            98% of the cells or more hold tokens, at 4,000 99%.
        shuffle: read shards in another order in every pass, and shuffle blocks of ``buffer_size``
            examples in themselves. Up to twice as many are then held.
        seed: of the shuffled order.
        dp_rank: the rank whose part of the stream is read, by default ``parallel.place`` of this
            process in ``torch.distributed``. "all" yields the rows of all ranks, shard-major.
        presharded: the source gives every rank and worker different examples; do not split it.
        num_shards: divides the stream into this many shards, a multiple of ``dp``, so that a saved
            run can go on with another number of ranks and workers.
        on_error: "raise", or "skip" to leave out examples that raise a DataError alone. Of a shard
            at most ``max_skipped``, and ``max_skipped_in_a_row`` one after the other, but not all.

    One ``iter()`` is one pass. Load it with
    ``DataLoader(dataset, batch_size=None, collate_fn=dataset.as_is)``. More: docs/loading.md.

    Raises:
        DataError: an example is wrong or too long; the message names its position in the stream.
        TypeError, ValueError: a setting is wrong.

    >>> from torch_collate_kit import PackedCollator
    >>> examples = [{"input_ids": [7] * n} for n in (3, 2, 4, 1, 5)]
    >>> dataset = PackedIterableDataset(examples, PackedCollator(0, max_tokens=6), buffer_size=5)
    >>> [batch["sub_seq_lengths"].tolist() for batch in dataset]
    [[[5]], [[2, 3]], [[1, 4]]]
    """

    def __init__(
        self,
        stream: ExampleSource | Mixture,
        collate: Any,
        *,
        batch_rows: int | None = None,
        buffer_size: int = 1000,
        shuffle: bool = False,
        seed: int = 0,
        dp_rank: int | Literal["all"] | None = None,
        num_shards: int | None = None,
        presharded: bool = False,
        on_error: OnError = "raise",
        max_skipped: int = 100,
        max_skipped_in_a_row: int = 10,
    ) -> None:
        self.collate = collate
        parallel = checked_collator(collate).packing.parallel
        self.dp_size = 1 if dp_rank == "all" else parallel.dp
        hint = 'dp_rank="all" yields the rows of all ranks'
        if dp_rank is None and parallel.dp == 1 and (presharded or node_of(stream)):
            dp_rank = 0 if num_shards is None else None  # the source divides itself
        self.dp_rank = "all" if dp_rank == "all" else rank_in(parallel, dp_rank, hint=hint)
        self.buffer_size = checked_int("buffer_size", buffer_size, hint="1000 packs well")
        self.batch_rows = checked_int(
            "batch_rows", parallel.dp if batch_rows is None else batch_rows
        )
        self._rows = self.batch_rows // self.dp_size
        self._check_rows(checked_collator(collate).packing)
        self.shuffle, self.seed = checked_bool("shuffle", shuffle), checked_word("seed", seed)
        self.presharded = checked_bool("presharded", presharded)
        self.on_error, self.max_skipped = on_error, max_skipped
        self.max_skipped_in_a_row = max_skipped_in_a_row
        self._policy = SkipPolicy(on_error, max_skipped, max_skipped_in_a_row)
        hint = "None makes every worker of every rank a shard"
        self.num_shards = checked_optional_int("num_shards", num_shards, hint=hint)
        self._stream = self._divisible(stream)
        self._saved: Mapping[str, Any] | None = None
        self._pass: tuple[dict[int, ShardPosition], int, int | None] | None = None  # see state_at
        self._next_pass = 0  # its number, if shuffled

    def __iter__(self) -> Iterator[Batch | dict[str, Any]]:
        if sys._getframe(1).f_locals.get("auto_collation"):  # of the DataLoader
            raise TypeError(
                "a PackedIterableDataset yields whole batches, and the DataLoader has a "
                "batch_size; pass DataLoader(dataset, batch_size=None, collate_fn=dataset.as_is)"
            )
        own = self._own_shards()
        positions, number, epoch = own.start(), own.first_pass(), self._stream.epoch
        self._saved, self._pass = None, (positions, number, epoch)
        if self.shuffle:
            epoch, self._next_pass = number, number + 1
        return own.given_out(own.turns(positions, epoch), positions)

    def __repr__(self) -> str:
        known = [("collate", self.collate), ("dp_rank", 0)]
        own = {k: v for k, v in changed_settings(self).items() if (k, v) not in known}
        return call_repr(self, repr(KindAndSize(self._stream.source)), repr(self.collate), **own)

    @staticmethod
    def as_is(batch: Any) -> Any:
        """Return the batch: torch's own ``collate_fn`` would rebuild it without metadata."""
        return batch

    @property
    def set_epoch(self) -> Any:
        """Return ``set_epoch(epoch)``: the next ``iter()`` is that pass. Only with shuffle.

        Without it the order is the source's. A state that was loaded for the same pass is kept. In
        DataLoader workers ``iter()`` counts passes by itself only if they are persistent, so call
        it before every pass, or wrap the loader in a ``PrefetchLoader``.
        """
        # Accelerate's loaders look for it before each pass
        caller = sys._getframe(1).f_locals.get("self")
        if type(caller).__name__ in ("DataLoaderDispatcher", "IterableDatasetShard"):
            raise divided_again(self, "batch_size=None, collate_fn=dataset.as_is")
        if self.shuffle:
            return self._set_epoch
        raise AttributeError(
            "a PackedIterableDataset without shuffle=True has no set_epoch; its order is the "
            "source's: call set_epoch there"
        )

    def _set_epoch(self, epoch: int) -> None:
        self._next_pass = checked_word("epoch", epoch)
        if self._saved is not None and self._saved["pass"] != self._next_pass:
            self._saved = None
        self._pass = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the newest pass, after the last batch that it has yielded.

        ``shards`` has one record for each shard of this process: ``num_read`` examples of the
        source before the window, ``num_batches`` since, ``num_given`` since the pass began, and
        what else is not 0. ``sources`` has the sources' own states, if they have one. The rest is
        ``version``, the settings that must be the same, a ``fingerprint`` of data that can be read
        without consuming them, and a ``checksum``.
        """
        own = self._own_shards()
        if self._saved is None and self._pass is not None:
            return own.state_at(*self._pass)
        return own.state_at(own.start(), own.first_pass(), self._stream.epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter()`` go on where ``state`` was taken.

        A state has all shards that this rank reads: it is that of the same rank, or with
        ``num_shards`` what ``merge_states`` made of the states of all ranks.

        Raises:
            StateError: the state does not fit; the message says what differs, nothing has changed.
        """
        self._own_shards().positions_in(state)
        self._saved = copy.deepcopy(dict(state))

    def _check_rows(self, packing: PackingOptions) -> None:
        dp = packing.parallel.dp
        if packing.share_prefixes == "auto":
            raise ValueError(
                'share_prefixes="auto" weighs all examples, which a stream does not know; pass '
                "True or False: TokenizedDataset(...).shared_lengths tells what is saved"
            )
        if self.batch_rows % dp:
            raise ValueError(
                f"batch_rows must be a multiple of parallel.dp={dp}, got {self.batch_rows}; it "
                "counts the rows of a step over all ranks"
            )
        if self.dp_size > 1 and packing.row_multiple != dp:
            raise ValueError(
                f"rows_multiple_of={packing.row_multiple} levels rows that ranks plan together, "
                'and each rank of a stream plans its own; leave it out, or pass dp_rank="all"'
            )
        if self.buffer_size < self._rows:
            raise ValueError(
                f"buffer_size must be at least {self._rows}, the rows of a batch, got "
                f"{self.buffer_size}; a row holds one example or more"
            )

    def _divisible(self, stream: Any) -> Stream | MixedStream:
        """Return a stream or a mixture so that ranks and workers can divide it."""
        if isinstance(stream, Mixture) and self._policy.skips:
            raise ValueError(
                "on_error='skip' names examples by their position in the stream, and each source "
                "of a mixture has its own; use on_error='raise', or filter the sources"
            )
        kind: Any = MixedStream if isinstance(stream, Mixture) else Stream
        divided: Stream | MixedStream = kind(
            stream,
            self.dp_rank if isinstance(self.dp_rank, int) else 0,
            self.dp_size,
            presharded=self.presharded,
            collate=self.collate if self.dp_size == 1 else _for_one_rank(self.collate),
            num_shards=self.num_shards,
            seed=self.seed if self.shuffle else None,
        )
        return divided

    def _own_shards(self) -> DividedStream:
        """Return the shards of this process: of a rank, or of one of its workers."""
        worker = get_worker_info()
        return self._divided(0) if worker is None else self._divided(worker.num_workers, worker.id)

    def _divided(self, num_workers: int, worker: int | None = None) -> DividedStream:
        """Return this rank's shards over the workers of a DataLoader; for PrefetchLoader."""
        read = partial(
            ShardBatches,
            self._stream,
            batch_rows=self._rows,
            buffer_size=self.buffer_size,
            policy=self._policy,
        )
        settings = self._settings()
        saved, number = self._saved, self._next_pass
        return DividedStream(self._stream, read, settings, num_workers, worker, saved, number)

    def _settings(self) -> dict[str, Any]:
        """Return all that shapes batches, but for how the stream is divided."""
        collator = self._stream.collator
        return {
            "buffer_size": self.buffer_size,
            "rows_per_rank": self._rows,
            **collator.packing.as_state(),
            "fixed_width": collator.fixed_width,
            "pad_token_id": collator.pad_token_id,
            "normalize_loss": collator.normalize_loss,
            "train_all": collator.train_all,
            "targets": None if collator.targets == "next_token" else str(collator.targets),
            "fields": ", ".join(f"{name}: {spec}" for name, spec in collator.fields.items()),
        }


def _for_one_rank(collate: Any) -> Any:
    """Return a copy that packs for one rank, of a collator or of a callable around one."""
    alone = copy.copy(collate)
    for name in ("collate", "collator"):
        if name in vars(alone):
            vars(alone)[name] = _for_one_rank(vars(alone)[name])
            return alone
    parallel = replace(alone.packing.parallel, dp=1)
    alone.packing = replace(alone.packing, parallel=parallel, rows_multiple_of=None)
    return alone


class Turn(NamedTuple):
    """A shard's turn in a round. With workers a turn without a batch keeps their places."""

    shard: int | None = None
    batch: Any = None
    after: ShardPosition | None = None  # of the shard; None if it has not changed
    has_batch: bool = False  # a loader's ``collate_fn`` may return None


_NO_TURN = Turn()


@dataclass(frozen=True)
class DividedStream:
    """The shards of one process, or those of a rank over the workers of a DataLoader.

    It does not move. Who reads keeps the position of each shard: the dataset, or a loader whose
    workers have copies, which are sent where to begin and return where a shard is with every batch.
    """

    stream: Stream | MixedStream
    read: Callable[..., Iterable[tuple[Any, ShardPosition]]]
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

    def beginning(self) -> dict[int, ShardPosition]:
        """Return the positions at the beginning of a pass; ValueError: more workers than shards."""
        return dict.fromkeys(self._shards, ShardPosition(self.stream.beginning))

    def start(self) -> dict[int, ShardPosition]:
        """Return the positions of the state that the dataset has loaded, or the beginning."""
        if self.saved is None:
            return self.beginning()
        return positions_in(self.saved, self._all_settings(), self._shards)

    def first_pass(self) -> int:
        """Return the number of the pass that ``start`` begins; 0 of a stream without shuffle."""
        number: int = self.next_pass if self.saved is None else self.saved.get("pass", 0)
        return number

    def turns(self, positions: Mapping[int, ShardPosition], epoch: int | None) -> Iterator[Turn]:
        """Return the turns of this process's shards in pass ``epoch``."""
        worker = get_worker_info()
        of_worker: dict[str, int] = {}
        if worker is not None and self.worker is None:
            of_worker = {"worker": worker.id, "num_workers": worker.num_workers}
        return in_rounds(self._shards, positions, partial(self.read, epoch=epoch), **of_worker)

    @staticmethod
    def given_out(turns: Iterator[Any], positions: dict[int, ShardPosition]) -> Iterator[Any]:
        """Yield the batches of turns; ``positions`` become those after each."""
        for turn in turns:
            if turn.after is not None:
                positions[turn.shard] = turn.after
            if turn.has_batch:
                batch = [turn.batch]
                del turn
                yield batch.pop()  # when the consumer gets it, nothing here refers to it

    def state_at(
        self, positions: Mapping[int, ShardPosition], number: int | None, epoch: int | None
    ) -> dict[str, Any]:
        """Return the state of these shards in pass ``number``; ``epoch`` is the source's."""
        of_pass = {} if self.stream.seed is None else {"pass": number}
        return state_of(self._all_settings() | of_pass | {"epoch": epoch}, positions)

    def positions_in(self, state: Mapping[str, Any]) -> dict[int, ShardPosition]:
        """Return the positions of these shards; StateError: the state does not fit."""
        positions = positions_in(state, self._all_settings(), self._shards)
        self.stream.check_weights(positions)
        return positions

    def _all_settings(self) -> dict[str, Any]:
        stream = self.stream
        division: dict[str, Any] = {"num_shards": stream.num_shards}
        if stream.num_shards is None:
            division |= {"dp_size": stream.node[1], "num_workers": self.num_workers}
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
    positions: Mapping[int, ShardPosition],
    read: Callable[[int, ShardPosition], Iterable[tuple[Any, ShardPosition]]],
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
    batches: dict[int, Iterator[tuple[Any, ShardPosition]]] = {}
    counts = [one.num_given for one in positions.values() if not one.has_ended]
    step = min(counts, default=0)
    while live:
        if num_workers == 1:  # with more, others may have a turn in the rounds between
            step = max(step, min(one.num_given for one in live.values()))
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


def _next_turn(shard: int, live: dict[int, ShardPosition], batches: Iterator[Any]) -> Turn:
    batch, after = next(batches, (None, live[shard]._replace(has_ended=True)))
    live[shard] = after
    if after.has_ended:
        del live[shard]
    return Turn(shard, batch, after, batch is not None)
