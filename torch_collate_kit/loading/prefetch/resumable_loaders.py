"""What PrefetchLoader reads from, and how it knows and keeps its position there."""

from __future__ import annotations

import base64
import copy
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader

from torch_collate_kit._reprs import KindAndSize, call_repr
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.prefetch.positioned import (
    LoaderPosition,
    PositionedLoader,
    changed_copy,
    part_of_state,
)
from torch_collate_kit.loading.prefetch.skipped_examples import skip_failing_examples
from torch_collate_kit.loading.prefetch.stream_loader import StreamLoader, is_stream_of_shards
from torch_collate_kit.loading.sampler import PackedBatchSampler
from torch_collate_kit.loading.sampler.checks import is_same
from torch_collate_kit.loading.sampler.resumable import ResumableSampler

__all__ = ["ResumableLoader", "resumable_loader"]


class _Steps:
    """Stands in for the sampler inside a DataLoader: an epoch that was begun before.

    A DataLoader with workers calls ``iter(batch_sampler)`` twice for its first epoch.
    """

    current: Iterator[Any]

    def __iter__(self) -> Iterator[Any]:
        return self.current


class _SampledLoader(PositionedLoader):
    """A DataLoader whose batch_sampler knows the state of any position."""

    has_sampler = True

    def __init__(self, loader: DataLoader[Any], sampler: ResumableSampler) -> None:
        _check_lengths(loader, sampler)
        self._sampler, self._dataset = sampler, loader.dataset
        self._steps = _Steps()
        super().__init__(changed_copy(loader, batch_sampler=self._steps))
        self.plans_rows = isinstance(sampler, PackedBatchSampler)

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
        return position._replace(mark=self.state_at(position)["sampler"])

    def move_to(self, position: LoaderPosition) -> None:
        self._sampler.load_state_dict(self.state_at(position)["sampler"])

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)

    def reshuffle(self) -> None:
        if not hasattr(self._sampler, "reshuffle"):
            raise TypeError(f"a {type(self._sampler).__name__} cannot reshuffle")
        self._sampler.reshuffle()

    def state_at(self, position: LoaderPosition) -> dict[str, Any]:
        epoch, step, state = position
        return {"sampler": self._sampler.state_at(epoch, step) if state is None else state}

    def load_state_dict(self, state: Mapping[str, Any], stop_reading: Callable[[], None]) -> None:
        self._sampler.load_state_dict(part_of_state(state, "sampler"))
        stop_reading()  # after: an iterator that was made before stays as it is


class _StatefulLoader(PositionedLoader):
    """A loader that has a state of its own, such as torchdata's StatefulDataLoader.

    It runs ahead of the consumer, so its state is kept as a ``mark`` after every batch.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        # asked here: later it might be another thread that starts the workers, by a fork
        self._position = LoaderPosition(0, 0, self.mark())

    def position(self) -> LoaderPosition:
        return self._position

    def begin(self) -> tuple[int | None, Iterator[Any]]:
        return None, self._begun()

    def mark(self) -> dict[str, Any]:
        return copy.deepcopy(self._loader.state_dict())

    def end_epoch(self, epoch: int) -> None:
        self._position = LoaderPosition(epoch + 1, 0, self.mark())

    def move_to(self, position: LoaderPosition) -> None:
        self._position = position
        self._loader.load_state_dict(copy.deepcopy(position.mark))

    def set_epoch(self, epoch: int) -> None:
        raise TypeError(
            f"set_epoch({epoch}): a {type(self._loader).__name__} goes from epoch to epoch by "
            "itself; use batch_sampler=PrefetchingSampler(...), or load_state_dict"
        )

    def reshuffle(self) -> None:
        raise TypeError(
            f"reshuffle(): the order is the {type(self._loader).__name__}'s own; use "
            "batch_sampler=PrefetchingSampler(...)"
        )

    def state_at(self, position: LoaderPosition) -> dict[str, Any]:
        epoch, step, mark = position
        text = _to_text(mark)
        return {
            "loader": text,
            "digest": _digest(text),
            "position": {"epoch": epoch, "step": step},
            "fits": self._fits(),
        }

    def load_state_dict(self, state: Mapping[str, Any], stop_reading: Callable[[], None]) -> None:
        missing = {"loader", "digest", "position", "fits"} - state.keys()
        if missing:
            raise StateError(
                f"the state has {sorted(map(str, state))}, no {', '.join(sorted(missing))}: it is "
                "of another kind of loader, or was saved by an older version; wrap a DataLoader of "
                "the kind that saved it, or start without the state"
            )
        if not is_same(state["fits"], self._fits()):
            raise StateError(
                f"the state is of a loader with {state['fits']}, this one has {self._fits()}; "
                "resume with the same dataset and settings"
            )
        position = state["position"]
        if not _is_position(position):
            raise StateError(
                f"the state has position={position!r}, not an epoch and a step; pass what "
                "state_dict() gave"
            )
        text = state["loader"]
        if not isinstance(text, str) or not is_same(state["digest"], _digest(text)):
            raise StateError(
                "the state's loader does not fit its digest: it was changed or damaged after it "
                "was saved; take an older checkpoint, or start without the state"
            )
        mark = _from_text(text)
        stop_reading()  # before: what is in flight asks the loader for its state
        self.move_to(LoaderPosition(**position, mark=mark))

    def close(self, seconds: float = 0) -> None:
        """The workers that wait for the next epoch are the caller's."""

    def _fits(self) -> dict[str, Any]:
        try:
            length = len(self._loader.dataset)
        except (AttributeError, TypeError):
            length = None
        settings = {k: getattr(self._loader, k, None) for k in ("batch_size", "num_workers")}
        return {"length": length, **settings}


ResumableLoader: TypeAlias = _SampledLoader | _StatefulLoader | StreamLoader


def resumable_loader(loader: Any) -> ResumableLoader:
    """Chosen by what the loader has: a resumable sampler, or a state of its own."""
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(loader, DataLoader) and isinstance(sampler, ResumableSampler):
        return _SampledLoader(loader, sampler)
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return _StatefulLoader(loader)
    if isinstance(loader, DataLoader) and is_stream_of_shards(loader.dataset):
        return StreamLoader(loader)
    raise TypeError(
        f"a {type(loader).__name__} with batch_sampler={type(sampler).__name__} cannot be resumed; "
        "build it with batch_sampler=PrefetchingSampler(data, batch_size=...), or wrap torchdata's "
        "StatefulDataLoader, which is also the way for iterable datasets"
    )


def _check_lengths(loader: DataLoader[Any], sampler: ResumableSampler) -> None:
    """ValueError if the sampler is for another number of examples: some would never be read."""
    num_examples = getattr(sampler, "num_examples", None)
    length = len(loader.dataset) if hasattr(loader.dataset, "__len__") else num_examples
    if type(num_examples) is int and num_examples != length:
        raise ValueError(
            f"the sampler was built for {num_examples} examples, the dataset has {length}; build "
            "it with the dataset that is read (one over a part of the data takes order= or torch's "
            "Subset)"
        )


def _is_position(value: Any) -> bool:
    if not isinstance(value, Mapping) or set(value) != {"epoch", "step"}:
        return False
    return all(type(number) is int and 0 <= number < 2**32 for number in value.values())


def _to_text(mark: dict[str, Any]) -> str:
    """A loader's state as text: JSON has no tensors and tuples."""
    buffer = io.BytesIO()
    torch.save(mark, buffer)
    text = base64.b64encode(buffer.getvalue()).decode("ascii")
    _from_text(text)  # refuses what cannot be loaded while it can still be fixed
    return text


def _digest(text: str) -> str:
    """Needed because torch.load reads many damaged files, and returns other numbers."""
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()


def _from_text(text: str) -> dict[str, Any]:
    try:
        return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    except Exception as error:  # of any kind, if it is not a file of torch.save
        raise StateError(
            f"the loader's state cannot be read: {error}; a dataset's state_dict may hold numbers, "
            "strings, tensors, and lists, tuples and dicts of these"
        ) from error
