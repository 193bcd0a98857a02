"""A DataLoader whose ``batch_sampler`` knows the state of any position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from torch.utils.data import DataLoader

from torch_collate_kit._reprs import Shown, call_repr
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
from torch_collate_kit.loading.sampler.resumable import ResumableSampler

__all__ = ["ResumableLoader", "resumable_loader"]


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
        super().__init__(changed_copy(loader, batch_sampler=self._steps))
        self.plans_rows = isinstance(sampler, PackedBatchSampler)

    def position(self) -> LoaderPosition:
        state = self._sampler.state_dict()
        return LoaderPosition(state["epoch"], state["step"], state)

    def num_steps(self) -> int:
        return len(self._sampler)

    def described(self) -> str:
        sampler = repr(self._sampler).partition(" [next iter(): ")[0]  # the reader knows better
        return call_repr(self._loader, repr(Shown(self._dataset)), f"batch_sampler={sampler}")

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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(part_of_state(state, "sampler"))


ResumableLoader: TypeAlias = _SampledLoader | StreamLoader


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
    if isinstance(loader, DataLoader) and is_stream_of_shards(loader.dataset):
        return StreamLoader(loader)
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
