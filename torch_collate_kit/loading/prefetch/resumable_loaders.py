"""The DataLoaders that can be resumed: those of a resumable sampler, and those of a stream."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.collate import default_convert

from torch_collate_kit._reprs import KindAndSize, call_repr
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.orders.checks import checked_word
from torch_collate_kit.loading.prefetch.positioned import (
    LoaderPosition,
    PositionedLoader,
    changed_copy,
    part_of_state,
)
from torch_collate_kit.loading.prefetch.skipped_examples import (
    Collated,
    Failed,
    skip_failing_examples,
)
from torch_collate_kit.loading.sampler import PackedBatchSampler
from torch_collate_kit.loading.sampler.resumable import ResumableSampler

__all__ = ["ResumableLoader", "resumable_loader"]

_logger = logging.getLogger("torch_collate_kit.loading")
_Positions: TypeAlias = dict[int, Any]  # by shard; each has num_given, the rest is the stream's


class _Steps:
    """A stand-in for the sampler inside a DataLoader: an epoch that was begun before.

    A DataLoader with workers calls ``iter(batch_sampler)`` twice for its first epoch.
    """

    current: Iterator[Any]

    def __iter__(self) -> Iterator[Any]:
        return self.current


class _SampledLoader(PositionedLoader):
    """A DataLoader with a resumable ``batch_sampler``. Its mark is the sampler's state, or None."""

    has_sampler = True

    def __init__(self, loader: DataLoader[Any], sampler: ResumableSampler) -> None:
        _check_lengths(loader, sampler)
        self._sampler, self._dataset = sampler, loader.dataset
        self._steps = _Steps()
        packing = getattr(loader.collate_fn, "packing", None)
        self._max_tokens: int | None = getattr(packing, "max_tokens", None)
        super().__init__(changed_copy(loader, batch_sampler=self._steps))

    def position(self) -> LoaderPosition:
        state = self._sampler.state_dict()
        return LoaderPosition(state["epoch"], state["step"], state)

    def num_steps(self) -> int:
        return len(self._sampler)

    def described(self) -> str:
        sampler = repr(self._sampler).partition(" [next iter(): ")[0]  # the reader knows better
        return call_repr(self._loader, repr(KindAndSize(self._dataset)), f"batch_sampler={sampler}")

    def skip_failing_examples(self) -> None:
        skip_failing_examples(self._loader)

    def begin(self) -> tuple[int | None, Iterator[Any]]:
        epoch, step, _ = self.position()
        if self._sampler.epoch != epoch:  # somebody called iter() and drew nothing
            self._sampler.set_epoch(epoch, step=step)
        num_steps = self.num_steps()
        self._steps.current = iter(self._sampler)
        return num_steps, self._begun()

    def check(self, epoch: int) -> None:
        if self._sampler.epoch != epoch + 1:  # it is, as soon as iter() was called
            raise StateError(
                f"the sampler was moved to epoch {self._sampler.epoch} while the loader read epoch "
                f"{epoch}; call set_epoch, reshuffle and load_state_dict of the loader, which then "
                "drops what is in flight"
            )

    def pinned(self, position: LoaderPosition | None) -> LoaderPosition:
        position = self.position() if position is None else position
        return position._replace(mark=self._sampler_state(position))

    def move_to(self, position: LoaderPosition) -> None:
        self._sampler.load_state_dict(self._sampler_state(position))

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)

    def reshuffle(self) -> None:
        if not hasattr(self._sampler, "reshuffle"):
            raise TypeError(f"a {type(self._sampler).__name__} cannot reshuffle")
        self._sampler.reshuffle()

    def _sampler_state(self, position: LoaderPosition) -> Any:
        epoch, step, state = position
        return self._sampler.state_at(epoch, step) if state is None else state

    def state_at(self, position: LoaderPosition) -> dict[str, Any]:
        return {"max_tokens": self._max_tokens, "sampler": self._sampler_state(position)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(part_of_state(state, "sampler"))
        saved, mine = state.get("max_tokens"), self._max_tokens
        if saved != mine and not isinstance(self._sampler, PackedBatchSampler):  # it logs more
            _logger.warning(
                "the state is of a run with max_tokens=%s, this collator has %s: the same examples "
                "per step, in other rows",
                *(saved, mine),
            )


class _Mark(NamedTuple):
    """The positions of the shards after the batches received, and the epoch of their source."""

    positions: _Positions
    source_epoch: int | None


class _StreamLoader(PositionedLoader):
    """A DataLoader of a stream; its mark has the positions of all shards of this rank.

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
        self._stream = stream._divided(loader.num_workers)
        self._name = repr(KindAndSize(stream))
        self._passes = _Passes(self._stream)
        collate = partial(_collate_turn, loader.collate_fn)
        super().__init__(changed_copy(loader, dataset=self._passes, collate_fn=collate))
        self._position = self._at(0, self._stream.start(), self._stream.epoch)
        self._received = self._position.mark  # of the pass that is being read

    def described(self) -> str:
        return call_repr(self._loader, self._name)

    def _at(self, epoch: int, positions: _Positions, source_epoch: int | None) -> LoaderPosition:
        num_given = sum(at.num_given for at in positions.values())
        return LoaderPosition(epoch, num_given, _Mark(positions, source_epoch))

    def position(self) -> LoaderPosition:
        return self._position

    def begin(self) -> tuple[int | None, Iterator[Any]]:
        epoch, _, (positions, source_epoch) = self._position
        if positions == self._stream.beginning():
            source_epoch = self._stream.epoch
        if self._passes.following != (epoch, positions):
            self.close()  # persistent workers would read on elsewhere
        self._passes.following = (epoch, positions)
        self._received = _Mark(dict(positions), source_epoch)
        turns = self._begun()
        self._passes.following = (epoch + 1, self._stream.beginning())
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
            raise StateError(f"the state has epoch={epoch!r}; pass what state_dict() returned")
        positions = self._stream.positions_in(stream)
        self._position = self._at(epoch, positions, self._stream.epoch)


class _Passes(IterableDataset[Any]):
    """A stand-in for the stream inside a DataLoader: each ``iter()`` is the next pass.

    A persistent worker keeps its copy, and reads pass after pass.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.following: tuple[int, _Positions] = (0, stream.beginning())

    def __iter__(self) -> Iterator[Any]:
        epoch, positions = self.following
        turns = self._stream.turns(positions, epoch)
        self.following = (epoch + 1, self._stream.beginning())
        return turns


def _collate_turn(collate: Callable[[Any], Any], turn: Any) -> tuple[Any, tuple[int, ...]]:
    """Return a turn after ``collate_fn`` of the DataLoader, and what its batch is without."""
    batch = turn.batch
    skipped = batch.metadata.get("skipped", ()) if isinstance(batch, Batch) else ()
    # torch's own, which is there if none was given, would rebuild a Batch without metadata
    if collate is not default_convert and turn.has_batch:
        turn = turn._replace(batch=collate(batch))
    return turn, tuple(skipped)


ResumableLoader: TypeAlias = _SampledLoader | _StreamLoader


def resumable_loader(loader: Any) -> ResumableLoader:
    """Return the loader to read: of a resumable sampler, or of a stream of shards."""
    kind = type(loader).__name__
    if hasattr(loader, "state_dict"):
        raise TypeError(
            f"a {kind} keeps a position of its own, and PrefetchLoader another; pass a "
            f"torch.utils.data.DataLoader with the same arguments, or use the {kind} alone: "
            "samplers and streams of torch_collate_kit resume inside it"
        )
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(loader, DataLoader) and isinstance(sampler, ResumableSampler):
        return _SampledLoader(loader, sampler)
    if isinstance(loader, DataLoader) and hasattr(loader.dataset, "_divided"):
        return _StreamLoader(loader)
    raise TypeError(
        f"a {kind} with batch_sampler={type(sampler).__name__} cannot be resumed; pass a "
        "DataLoader with batch_sampler=PrefetchingSampler(data, batch_size=...), or one of a "
        "PackedIterableDataset with batch_size=None"
    )


def _check_lengths(loader: DataLoader[Any], sampler: ResumableSampler) -> None:
    """Raise ValueError for a sampler of another number of examples: some would never be read."""
    num_examples = getattr(sampler, "num_examples", None)
    length = len(loader.dataset) if hasattr(loader.dataset, "__len__") else num_examples
    if type(num_examples) is int and num_examples != length:
        raise ValueError(
            f"the sampler was built for {num_examples} examples, the dataset has {length}; build "
            "it with the dataset that is read (one over a part of the data takes order= or torch's "
            "Subset)"
        )
