"""A plain DataLoader of a stream of shards, and the position of each shard after what was received.

In the workers of a DataLoader are copies of the stream. So a batch comes with the shard that it is
of, and the position of the shard after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.collate import default_convert

from torch_collate_kit._reprs import Shown, call_repr
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.prefetch.positioned import (
    LoaderPosition,
    PositionedLoader,
    changed_copy,
    part_of_state,
)
from torch_collate_kit.loading.prefetch.skipped_examples import Collated, Failed
from torch_collate_kit.loading.sampler.checks import checked_word

__all__ = ["StreamLoader", "is_stream_of_shards"]

# By shard: a position, which has num_given (batches). Only the stream knows what else is in it.
Positions: TypeAlias = dict[int, Any]


class _Mark(NamedTuple):
    """Where the shards are after what was received, and the epoch that their source was in."""

    positions: Positions
    source_epoch: int | None


class _DividedStream(Protocol):
    """A rank's part of a stream, as ``PackedIterableDataset._divided`` gives it."""

    @property
    def epoch(self) -> int | None: ...
    def beginning(self) -> Positions: ...
    def start(self) -> Positions: ...
    def turns(self, positions: Positions, epoch: int) -> Iterator[Any]: ...
    def state_at(self, positions: Positions, epoch: int | None) -> dict[str, Any]: ...
    def positions_in(self, state: Mapping[str, Any]) -> Positions: ...


def is_stream_of_shards(dataset: Any) -> bool:
    """Whether a plain DataLoader of it can be resumed."""
    return hasattr(dataset, "_divided")


class StreamLoader(PositionedLoader):
    """A DataLoader of a stream that says with every batch where its shard is.

    The mark after a batch is the positions of all shards of this rank, whichever worker reads them.

    Raises:
        ValueError: a DataLoader that makes batches of batches, or does not keep their order.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        stream: Any = loader.dataset
        if loader.batch_size is not None:
            raise ValueError(
                f"the DataLoader has batch_size={loader.batch_size}, but a "
                f"{type(stream).__name__} gives whole batches; build it with batch_size=None"
            )
        if not getattr(loader, "in_order", True):
            raise ValueError(
                "the DataLoader has in_order=False, so the order of batches depends on the speed "
                "of its workers and cannot be resumed; leave it out"
            )
        self._stream: _DividedStream = stream._divided(loader.num_workers)
        self._name = repr(Shown(stream))
        self._passes = _Passes(self._stream)
        collate = partial(_collate_turn, loader.collate_fn)
        super().__init__(changed_copy(loader, dataset=self._passes, collate_fn=collate))
        self._position = self._at(0, self._stream.start(), self._stream.epoch)
        self._received = self._position.mark  # of the pass that is being read

    def described(self) -> str:
        return call_repr(self._loader, self._name)

    def _at(self, epoch: int, positions: Positions, source_epoch: int | None) -> LoaderPosition:
        num_given = sum(at.num_given for at in positions.values())
        return LoaderPosition(epoch, num_given, _Mark(positions, source_epoch))

    def position(self) -> LoaderPosition:
        return self._position

    def begin(self) -> tuple[int | None, Iterator[Any]]:
        epoch, _, (positions, source_epoch) = self._position
        if positions == self._stream.beginning():
            source_epoch = self._stream.epoch
        if not self._passes.is_next(epoch, positions):
            self.close()  # persistent workers would read on elsewhere
        self._passes.move_to(epoch, positions)
        self._received = _Mark(dict(positions), source_epoch)
        turns = self._begun()
        self._passes.move_to(epoch + 1, self._stream.beginning())
        return None, self._received_from(turns)

    def _received_from(self, turns: Iterator[tuple[Any, tuple[int, ...]]]) -> Iterator[Any]:
        received = self._received.positions
        for turn, skipped in turns:
            if turn.after is not None:
                received[turn.shard] = turn.after
            if turn.has_batch:
                collated = Collated(turn.batch, tuple(Failed(example) for example in skipped))
                del turn
                yield collated
                del collated  # it would be held beside the next

    def mark(self) -> _Mark:
        positions, source_epoch = self._received
        return _Mark(dict(positions), source_epoch)

    def end_epoch(self, epoch: int) -> None:
        self.set_epoch(epoch + 1)

    def move_to(self, position: LoaderPosition) -> None:
        self._position = position

    def set_epoch(self, epoch: int) -> None:
        source_epoch = self._position.mark.source_epoch
        epoch = checked_word("epoch", epoch)
        self._position = self._at(epoch, self._stream.beginning(), source_epoch)

    def reshuffle(self) -> None:
        raise TypeError(
            "reshuffle(): the order of a stream is its source's own; use "
            "batch_sampler=PrefetchingSampler(...) with data that can be indexed"
        )

    def state_at(self, position: LoaderPosition) -> dict[str, Any]:
        positions, source_epoch = position.mark
        if positions == self._stream.beginning():
            source_epoch = self._stream.epoch
        stream = self._stream.state_at(positions, source_epoch)
        return {"epoch": position.epoch, "stream": stream}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        epoch, stream = state.get("epoch"), part_of_state(state, "stream")
        if type(epoch) is not int or not 0 <= epoch < 2**32:
            raise StateError(f"the state has epoch={epoch!r}; pass what state_dict() gave")
        positions = self._stream.positions_in(stream)
        self._position = self._at(epoch, positions, self._stream.epoch)


class _Passes(IterableDataset[Any]):
    """Stands in for the stream inside a DataLoader: each ``iter()`` is the next pass.

    A persistent worker keeps its copy, and reads pass after pass.
    """

    def __init__(self, stream: _DividedStream) -> None:
        self._stream = stream
        self._epoch, self._positions = 0, stream.beginning()

    def move_to(self, epoch: int, positions: Positions) -> None:
        """The next ``iter()`` begins there."""
        self._epoch, self._positions = epoch, positions

    def is_next(self, epoch: int, positions: Positions) -> bool:
        """Whether a worker that has read to the end would begin there."""
        return (epoch, positions) == (self._epoch, self._positions)

    def __iter__(self) -> Iterator[Any]:
        turns = self._stream.turns(self._positions, self._epoch)
        self.move_to(self._epoch + 1, self._stream.beginning())
        return turns


def _collate_turn(collate: Callable[[Any], Any], turn: Any) -> tuple[Any, tuple[int, ...]]:
    """Return a turn after ``collate_fn`` of the DataLoader, and what its batch is without."""
    batch = turn.batch
    skipped = batch.metadata.get("skipped", ()) if isinstance(batch, Batch) else ()
    # torch's own, which is there if none was given, would rebuild a Batch without metadata
    if collate is not default_convert and turn.has_batch:
        turn = turn._replace(batch=collate(batch))
    return turn, tuple(skipped)
