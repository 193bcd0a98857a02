"""The DataLoaders that can be resumed: those of a resumable sampler, and those of a stream."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.collate import default_convert

from torch_collate_kit._checks import KindAndSize, call_repr
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.checks import checked_word
from torch_collate_kit.loading.packed_sampler import PackedBatchSampler
from torch_collate_kit.loading.sampler import ResumableSampler, StepSampler
from torch_collate_kit.loading.skipping import Collated, Skipped, SkippedExamples, skipping_parts
from torch_collate_kit.loading.watchdog import PATIENCE, end_workers

_logger = logging.getLogger("torch_collate_kit.loading")
_OURS: Any = object()  # the mark of a sampler's position that the sampler may not have
_Places: TypeAlias = dict[int, Any]  # by shard; each has num_given, the rest is the stream's


class Position(NamedTuple):
    """The consumer's position, from which a state is made.

    It is replaced as a whole, so a signal handler or another thread that reads it sees one moment.
    """

    epoch: int
    step: int
    """Batches received of the epoch."""
    mark: Any
    """Loader-specific resume data. For a stream: the places of all shards of this rank, and the
    epoch of the source when the pass began (None before). For a sampler: None; while it is moved to
    or from here a mark of this module, or its state where that may change its order."""
    skipped: SkippedExamples
    reading: Any = None
    """The ``Reading`` of the epoch, or None. Without it and without a mark the sampler itself holds
    the position, and its owner may move it."""


class _Loader:
    """A DataLoader, opened at a position; it has none itself.

    ``begin(position)`` returns the batches of the epoch from the position on. All that moves the
    loader returns its new position.
    """

    has_sampler: bool  # else a stream names epoch and step, and counts what is left out
    carries_over = False  # examples of an epoch without a step into the next one
    is_closed = False

    def __init__(self, loader: Any, **parts: Any) -> None:
        if not getattr(loader, "in_order", True):  # the only option with which batch k is no step k
            raise ValueError(
                "the DataLoader has in_order=False, so the order of batches depends on the speed "
                "of its workers and cannot be resumed; leave it out"
            )
        # a copy: the caller's keeps its parts and its persistent workers
        self._loader = copy.copy(loader)
        vars(self._loader).update(parts, _iterator=None)  # not by setattr: a DataLoader forbids it
        self._batches: Any = None  # of the epoch that is being read

    def num_steps(self, position: Position) -> int:
        """Return the number of steps in the epoch. TypeError where only its end will tell."""
        raise TypeError("the length of an epoch of this loader is known only at its end")

    def here(self, position: Position) -> Position:
        """Return the position, or the sampler's where only the sampler has it."""
        return position

    def pinned(self, position: Position) -> Position:
        """Return the position with its mark, which outlives a move of the loader."""
        return position

    def released(self, position: Position) -> Position:
        """Return a position whose epoch is no longer read, to which the loader will be moved."""
        return position._replace(reading=None)

    def check(self, epoch: int) -> None:
        """Raise StateError if anything but the reader has moved the position meanwhile."""

    def _begun(self) -> Iterator[Any]:
        """Return the DataLoader's iterator, whose workers end in ``end()``, not at the last batch.

        torch would end them in the thread that draws it, and raise the death of one of them in the
        main thread: in the middle of a training step.
        """
        self._batches = iter(self._loader)
        if hasattr(self._batches, "_persistent_workers"):
            self._batches._persistent_workers = True
        return self._batches

    def end(self, seconds: float = PATIENCE) -> None:
        """End the workers of the last ``begin()``, unless they are persistent."""
        batches, self._batches = self._batches, None
        if not self._loader.persistent_workers:
            end_workers(batches, seconds)

    def close(self, seconds: float = PATIENCE) -> None:
        """End the persistent workers, too. The loader is not read any more."""
        end_workers(vars(self._loader)["_iterator"], seconds)
        vars(self._loader).update(_iterator=None)

    def has_workers(self) -> bool:
        """Return whether worker processes wait for the next epoch."""
        return bool(self._loader.persistent_workers and self._loader._iterator is not None)


class _Steps:
    """A stand-in for the sampler inside a DataLoader: an epoch that was begun before."""

    current: Iterator[Any]

    def __iter__(self) -> Iterator[Any]:
        return self.current  # asked for twice in the first epoch of a DataLoader with workers


class _SampledLoader(_Loader):
    """A DataLoader with a resumable ``batch_sampler``."""

    has_sampler = True

    def __init__(self, loader: DataLoader[Any], sampler: ResumableSampler, skips: bool) -> None:
        num_examples = getattr(sampler, "num_examples", None)
        length = len(loader.dataset) if hasattr(loader.dataset, "__len__") else num_examples
        if type(num_examples) is int and num_examples != length:  # some would never be read
            raise ValueError(
                f"the sampler was built for {num_examples} examples, the dataset has {length}; "
                "build it with the dataset that is read (for a part of the data pass order=, or "
                "read torch's Subset)"
            )
        self._sampler, self._dataset, self._steps = sampler, loader.dataset, _Steps()
        self.carries_over = isinstance(sampler, StepSampler) and sampler._budget.tail == "wrap"
        packing = getattr(loader.collate_fn, "packing", None)
        self._max_tokens: int | None = getattr(packing, "max_tokens", None)
        parts = skipping_parts(loader) if skips else {}
        super().__init__(loader, batch_sampler=self._steps, **parts)

    @property
    def described(self) -> str:
        sampler = repr(self._sampler).partition(" [next iter(): ")[0]  # the loader's own is newer
        return call_repr(self._loader, repr(KindAndSize(self._dataset)), f"batch_sampler={sampler}")

    def start(self, skipped: SkippedExamples) -> Position:
        return Position(0, 0, None, skipped)

    def here(self, position: Position) -> Position:
        if position.reading is not None or position.mark is not None:
            return position
        if isinstance(self._sampler, StepSampler):
            epoch, step = self._sampler._position()
            return position._replace(epoch=epoch, step=step, mark=_OURS)
        state = self._sampler.state_dict()
        return position._replace(epoch=state["epoch"], step=state["step"], mark=state)

    def num_steps(self, position: Position) -> int:
        if position.reading is None or not isinstance(self._sampler, StepSampler):
            return len(self._sampler)
        return self._sampler.count_steps(position.epoch)

    def begin(self, position: Position) -> Iterator[Any]:
        if self._sampler.epoch != position.epoch:  # somebody called iter() and drew nothing
            self._sampler.set_epoch(position.epoch, step=position.step)
        self._steps.current = iter(self._sampler)
        return self._begun()

    def check(self, epoch: int) -> None:
        if self._sampler.epoch != epoch + 1:  # it is, as soon as iter() was called
            raise StateError(
                f"the sampler was moved to epoch {self._sampler.epoch} while the loader read epoch "
                f"{epoch}; call set_epoch, reshuffle and load_state_dict of the loader, which then "
                "drops what is in flight"
            )

    def pinned(self, position: Position) -> Position:
        if position.mark is not None and position.mark is not _OURS:
            return position
        state = self._sampler.state_at(position.epoch, position.step)
        return position._replace(mark=state)

    def released(self, position: Position) -> Position:
        return position._replace(reading=None, mark=_OURS)

    def move_to(self, position: Position) -> Position:
        if position.mark is _OURS:
            self._sampler.set_epoch(position.epoch, step=position.step)
        elif position.mark is not None:
            self._sampler.load_state_dict(position.mark)
        return self.start(position.skipped)

    def end_epoch(self, position: Position) -> Position:
        return self.start(position.skipped)  # the sampler is there since iter()

    def set_epoch(self, epoch: int, position: Position) -> Position:
        self._sampler.set_epoch(epoch)
        return self.start(position.skipped)

    def reshuffle(self, position: Position) -> Position:
        if not hasattr(self._sampler, "reshuffle"):
            raise TypeError(f"a {type(self._sampler).__name__} cannot reshuffle")
        self._sampler.reshuffle()
        return self.start(position.skipped)

    def state_at(self, position: Position) -> dict[str, Any]:
        state = {"max_tokens": self._max_tokens, "sampler": self.pinned(position).mark}
        return state | position.skipped.state()

    def load_state_dict(
        self, state: Mapping[str, Any], skipped: SkippedExamples, position: Position
    ) -> Position:
        self._sampler.load_state_dict(_part_of(state, "sampler"))
        saved, mine = state.get("max_tokens"), self._max_tokens
        if saved != mine and not isinstance(self._sampler, PackedBatchSampler):  # it logs more
            _logger.warning(
                "the state is of a run with max_tokens=%s, this collator has %s: the same examples "
                "per step, in other rows",
                *(saved, mine),
            )
        return self.start(skipped)


class _StreamLoader(_Loader):
    """A DataLoader of a stream."""

    has_sampler = False

    def __init__(self, loader: DataLoader[Any]) -> None:
        stream: Any = loader.dataset
        if loader.batch_size is not None:
            raise ValueError(
                f"the DataLoader has batch_size={loader.batch_size}, but a "
                f"{type(stream).__name__} yields whole batches; build it with batch_size=None"
            )
        self._stream = stream._divided(loader.num_workers)
        self.described = call_repr(loader, repr(KindAndSize(stream)))
        self._passes = _Passes(self._stream)
        collate = partial(_collate_turn, loader.collate_fn)
        super().__init__(loader, dataset=self._passes, collate_fn=collate)

    def start(self, skipped: SkippedExamples) -> Position:
        return self._at(self._stream.first_pass(), self._stream.start(), skipped)

    def _at(self, epoch: int, places: _Places, skipped: SkippedExamples) -> Position:
        num_given = sum(place.num_given for place in places.values())
        source_epoch = None if places == self._stream.beginning() else self._stream.epoch
        return Position(epoch, num_given, (places, source_epoch), skipped)

    def begin(self, position: Position) -> Iterator[Any]:
        epoch, (places, source_epoch) = position.epoch, position.mark
        if self._passes.following != (epoch, places):
            self.close()  # persistent workers would read on elsewhere
        self._passes.following = (epoch, places)
        source_epoch = self._stream.epoch if source_epoch is None else source_epoch
        turns = self._begun()
        self._passes.following = (epoch + 1, self._stream.beginning())
        return self._marked(turns, dict(places), source_epoch)

    def _marked(self, turns: Any, places: _Places, source_epoch: int) -> Iterator[Collated]:
        """Yield the batches of a pass, each marked with the places of all shards after it."""
        for collated in self._stream.given_out(turns, places):
            marked = [collated._replace(mark=(dict(places), source_epoch))]
            del collated
            yield marked.pop()

    def move_to(self, position: Position) -> Position:
        return position

    def end_epoch(self, position: Position) -> Position:
        return self.set_epoch(position.epoch + 1, position)

    def set_epoch(self, epoch: int, position: Position) -> Position:
        return self._at(checked_word("epoch", epoch), self._stream.beginning(), position.skipped)

    def reshuffle(self, position: Position) -> Position:
        raise TypeError(
            "reshuffle(): the order of a stream is its source's own; use "
            "batch_sampler=PrefetchingSampler(...) with data that can be indexed"
        )

    def state_at(self, position: Position) -> dict[str, Any]:
        places, source_epoch = position.mark
        source_epoch = self._stream.epoch if source_epoch is None else source_epoch
        stream = self._stream.state_at(places, position.epoch, source_epoch)
        return {"epoch": position.epoch, "stream": stream}

    def load_state_dict(
        self, state: Mapping[str, Any], skipped: SkippedExamples, position: Position
    ) -> Position:
        places = self._stream.positions_in(_part_of(state, "stream"))
        return self._at(state["epoch"], places, skipped)


class _Passes(IterableDataset[Any]):
    """A stand-in for the stream inside a DataLoader: each ``iter()`` is the next pass.

    A persistent worker keeps its copy, and reads pass after pass.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.following: tuple[int, _Places] = (0, stream.beginning())

    def __iter__(self) -> Iterator[Any]:
        epoch, places = self.following
        turns = self._stream.turns(places, epoch)
        self.following = (epoch + 1, self._stream.beginning())
        return turns


def _collate_turn(collate: Callable[[Any], Any], turn: Any) -> Any:
    """Return a turn after ``collate_fn`` of the DataLoader, with a ``Collated`` for its batch."""
    if not turn.has_batch:
        return turn
    batch = turn.batch
    skipped = batch.metadata.get("skipped", ()) if isinstance(batch, Batch) else ()
    # torch's own, which is there if none was given, would rebuild a Batch without metadata
    try:
        batch = batch if collate is default_convert else collate(batch)
    except StopIteration as error:  # it would end the pass in silence
        raise RuntimeError("collate_fn raised StopIteration") from error
    return turn._replace(batch=Collated(batch, tuple(Skipped(of, "") for of in skipped)))


ResumableLoader: TypeAlias = _SampledLoader | _StreamLoader


def resumable_loader(loader: Any, *, skips: bool) -> ResumableLoader:
    """Return the loader to read; with ``skips`` it leaves out examples that fail."""
    kind = type(loader).__name__
    if hasattr(loader, "state_dict"):
        raise TypeError(
            f"a {kind} keeps a position of its own, and PrefetchLoader another; pass a "
            f"torch.utils.data.DataLoader with the same arguments, or use the {kind} alone: "
            "samplers and streams of torch_collate_kit resume inside it"
        )
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(loader, DataLoader) and isinstance(sampler, ResumableSampler):
        return _SampledLoader(loader, sampler, skips)
    if not isinstance(loader, DataLoader) or not hasattr(loader.dataset, "_divided"):
        raise TypeError(
            f"a {kind} with batch_sampler={type(sampler).__name__} cannot be resumed; pass a "
            "DataLoader with batch_sampler=PrefetchingSampler(data, batch_size=...), or one of a "
            "PackedIterableDataset with batch_size=None"
        )
    if skips:
        raise TypeError(
            "on_error='skip' of a PrefetchLoader leaves out the examples that a sampler names, and "
            "a stream has no sampler; pass it to the stream: PackedIterableDataset(..., "
            "on_error='skip')"
        )
    return _StreamLoader(loader)


def _part_of(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = state.get(name)
    if not isinstance(part, Mapping):
        raise StateError(
            f"the state has {sorted(map(str, state))}, no {name}; it is of another kind of "
            "loader: wrap a DataLoader of the kind that saved it"
        )
    return part
