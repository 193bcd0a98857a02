"""The DataLoaders that can be resumed: those of a resumable sampler, and those of a stream."""

from __future__ import annotations

import copy
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
from torch_collate_kit.loading.prefetch.skipped_examples import Collated, skipping_parts
from torch_collate_kit.loading.prefetch.workers import PATIENCE, end_workers
from torch_collate_kit.loading.sampler import PackedBatchSampler
from torch_collate_kit.loading.sampler.resumable import ResumableSampler
from torch_collate_kit.loading.skipping import Skipped

_logger = logging.getLogger("torch_collate_kit.loading")
_Positions: TypeAlias = dict[int, Any]  # by shard; each has num_given, the rest is the stream's


class LoaderPosition(NamedTuple):
    """The position after ``step`` batches of ``epoch``."""

    epoch: int
    step: int
    mark: Any  # all else that the loader must know to go on from there


class _Loader:
    """A DataLoader and its position. While an epoch is being read, the reader counts the steps.

    ``begin()`` returns ``num_steps()``, and the batches of the epoch from the position on.
    ``load_state_dict`` leaves an iterator that was made before as it is.
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

    def num_steps(self) -> int | None:
        """Return the number of steps in the epoch; None where only its end will tell."""
        return None

    def pinned(self, position: LoaderPosition) -> LoaderPosition:
        """Return the position with all that is needed to go on from it once the loader is moved."""
        return position

    def check(self, epoch: int) -> None:
        """Raise StateError if anything but the reader has moved the position meanwhile."""

    def mark(self) -> Any:
        """Return the mark of the position after the last batch drawn."""

    def end_epoch(self, epoch: int) -> None:
        """Move to the beginning of the epoch after the one that was read."""

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
    """A DataLoader with a resumable ``batch_sampler``. Its mark is the sampler's state, or None."""

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
        self.carries_over = getattr(sampler, "_tail", None) == "wrap"
        packing = getattr(loader.collate_fn, "packing", None)
        self._max_tokens: int | None = getattr(packing, "max_tokens", None)
        parts = skipping_parts(loader) if skips else {}
        super().__init__(loader, batch_sampler=self._steps, **parts)

    @property
    def described(self) -> str:
        sampler = repr(self._sampler).partition(" [next iter(): ")[0]  # the reader knows better
        return call_repr(self._loader, repr(KindAndSize(self._dataset)), f"batch_sampler={sampler}")

    def position(self) -> LoaderPosition:
        state = self._sampler.state_dict()
        return LoaderPosition(state["epoch"], state["step"], state)

    def num_steps(self) -> int:
        return len(self._sampler)

    def begin(self) -> tuple[int | None, Iterator[Any]]:
        epoch, step, _ = self.position()
        if self._sampler.epoch != epoch:  # somebody called iter() and drew nothing
            self._sampler.set_epoch(epoch, step=step)
        is_exact = getattr(self._sampler, "is_length_exact", True)  # else the end will tell
        num_steps = self.num_steps() if is_exact else None
        self._steps.current = iter(self._sampler)
        return num_steps, self._begun()

    def check(self, epoch: int) -> None:
        if self._sampler.epoch != epoch + 1:  # it is, as soon as iter() was called
            raise StateError(
                f"the sampler was moved to epoch {self._sampler.epoch} while the loader read epoch "
                f"{epoch}; call set_epoch, reshuffle and load_state_dict of the loader, which then "
                "drops what is in flight"
            )

    def pinned(self, position: LoaderPosition) -> LoaderPosition:
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
        self._sampler.load_state_dict(_part_of(state, "sampler"))
        saved, mine = state.get("max_tokens"), self._max_tokens
        if saved != mine and not isinstance(self._sampler, PackedBatchSampler):  # it logs more
            _logger.warning(
                "the state is of a run with max_tokens=%s, this collator has %s: the same examples "
                "per step, in other rows",
                *(saved, mine),
            )


class _StreamLoader(_Loader):
    """A DataLoader of a stream.

    Its mark has the positions of all shards of this rank, and the epoch of the source, as it was
    when the pass began; None before.
    """

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
        self._position = self._at(self._stream.first_pass(), self._stream.start())
        self._received, self._source_epoch = self._position.mark  # of the pass that is being read

    def _at(self, epoch: int, positions: _Positions) -> LoaderPosition:
        num_given = sum(at.num_given for at in positions.values())
        source_epoch = None if positions == self._stream.beginning() else self._stream.epoch
        return LoaderPosition(epoch, num_given, (positions, source_epoch))

    def position(self) -> LoaderPosition:
        return self._position

    def begin(self) -> tuple[int | None, Iterator[Any]]:
        epoch, _, (positions, source_epoch) = self._position
        if self._passes.following != (epoch, positions):
            self.close()  # persistent workers would read on elsewhere
        self._passes.following = (epoch, positions)
        self._source_epoch = self._stream.epoch if source_epoch is None else source_epoch
        self._received = dict(positions)
        turns = self._begun()
        self._passes.following = (epoch + 1, self._stream.beginning())
        return None, self._received_from(turns)

    def _received_from(self, turns: Iterator[Any]) -> Iterator[Any]:
        received = self._received
        for turn in turns:
            if turn.after is not None:
                received[turn.shard] = turn.after
            if turn.has_batch:
                collated = turn.batch
                del turn
                yield collated
                del collated  # it would be held beside the next

    def mark(self) -> tuple[_Positions, int | None]:
        return dict(self._received), self._source_epoch

    def move_to(self, position: LoaderPosition) -> None:
        self._position = position

    def end_epoch(self, epoch: int) -> None:
        self.set_epoch(epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        self._position = self._at(checked_word("epoch", epoch), self._stream.beginning())

    def reshuffle(self) -> None:
        raise TypeError(
            "reshuffle(): the order of a stream is its source's own; use "
            "batch_sampler=PrefetchingSampler(...) with data that can be indexed"
        )

    def state_at(self, position: LoaderPosition) -> dict[str, Any]:
        positions, source_epoch = position.mark
        source_epoch = self._stream.epoch if source_epoch is None else source_epoch
        stream = self._stream.state_at(positions, position.epoch, source_epoch)
        return {"epoch": position.epoch, "stream": stream}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        stream = _part_of(state, "stream")
        self._position = self._at(state["epoch"], self._stream.positions_in(stream))


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


def _collate_turn(collate: Callable[[Any], Any], turn: Any) -> Any:
    """Return a turn after ``collate_fn`` of the DataLoader, with a ``Collated`` for its batch."""
    if not turn.has_batch:
        return turn
    batch = turn.batch
    skipped = batch.metadata.get("skipped", ()) if isinstance(batch, Batch) else ()
    # torch's own, which is there if none was given, would rebuild a Batch without metadata
    batch = batch if collate is default_convert else collate(batch)
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
