"""Reads and collates a batch without the examples that fail, in a worker or wherever it is built.

A DataLoader reads, then collates, and an error of either is an error of the whole batch. So its
dataset is replaced by one that reads nothing, and its collate function by one that does both.
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Iterator, Sized
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.packing import RankPlan

__all__ = ["Collated", "Failed", "LeftOut", "skip_failing_examples"]

_NEVER_SKIPPED = (MemoryError, StateError, torch.OutOfMemoryError)  # the example is not at fault


class Failed(NamedTuple):
    """An example that was left out of its batch."""

    position: int
    """Its place among the examples that were to be read."""
    example: Any
    """What the sampler calls it: its index in the dataset."""
    error: str
    """The kind of error and its message."""
    traceback: str
    """Its traceback, as text: not every error can be sent by a worker."""


class LeftOut(NamedTuple):
    """How many examples were to be read for a batch, and those that were left out."""

    num_examples: int
    failed: tuple[Failed, ...] = ()


class Collated(NamedTuple):
    """A batch, and what was left out of it."""

    batch: Any
    left_out: LeftOut


def skip_failing_examples(loader: Any) -> None:
    """Makes a DataLoader give out ``Collated``. It must have a ``batch_sampler``."""
    collate = _SkippingCollate(loader.dataset, loader.collate_fn)
    start = partial(_start_worker, loader.dataset, loader.worker_init_fn)
    # not by setattr: a DataLoader forbids it
    vars(loader).update(dataset=_Unread(), collate_fn=collate, worker_init_fn=start)


class _Unread:
    """Stands in for the dataset inside a DataLoader: passes the indices on to be read."""

    def __getitems__(self, indices: Any) -> Any:
        return indices


def _start_worker(
    dataset: Any, worker_init_fn: Callable[[int], object] | None, worker: int
) -> None:
    """The caller's ``worker_init_fn`` finds the dataset that is read in worker_info."""
    object.__setattr__(get_worker_info(), "dataset", dataset)  # it is frozen
    if worker_init_fn is not None:
        worker_init_fn(worker)


class _SkippingCollate:
    """Reads and collates the examples at some indices, or those of them that do not fail."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __call__(self, indices: Any) -> Collated:
        num_examples = len(indices) if isinstance(indices, Sized) else 1
        try:
            return Collated(self._batch(indices), LeftOut(num_examples))
        except _NEVER_SKIPPED:
            raise
        except Exception as error:
            failed = tuple(self._failing(indices))
            return Collated(self._rest(indices, failed, error), LeftOut(num_examples, failed))

    def _batch(self, indices: Any) -> Any:
        """As a DataLoader makes it."""
        if getattr(self._dataset, "__getitems__", None):
            return self._collate(self._dataset.__getitems__(indices))
        return self._collate([self._dataset[i] for i in indices])

    def _failing(self, indices: Any) -> Iterator[Failed]:
        """The examples that fail alone."""
        examples = _examples(indices)
        for position, example in enumerate(examples):
            others = [i for i in range(len(examples)) if i != position]
            try:
                self._batch(_without(indices, others))
            except _NEVER_SKIPPED:
                raise
            except Exception as error:
                kind, text = f"{type(error).__name__}: {error}", traceback.format_exc()
                yield Failed(position, example, kind, text)

    def _rest(self, indices: Any, failed: tuple[Failed, ...], error: Exception) -> Any:
        """The batch without them. None of them failing, perhaps it was a fault that has passed."""
        if not failed:
            try:
                return self._batch(indices)
            except _NEVER_SKIPPED:
                raise
            except Exception:
                raise error from None
        rest = _without(indices, [of.position for of in failed])
        if not isinstance(rest, RankPlan) and not len(rest):
            who = "all examples" if len(failed) > 1 else "the only example"
            raise DataError(
                f"nothing is left to collate: {who} of a batch of {len(failed)} could not be read "
                f"or collated; the first is example {failed[0].example} of the dataset: "
                f"{failed[0].error}"
            ) from error
        return self._batch(rest)


def _examples(indices: Any) -> list[Any]:
    """What the sampler calls the examples of a batch; NumPy's and torch's integers are no JSON."""
    examples = indices.indices if isinstance(indices, RankPlan) else indices
    return [operator.index(i) if hasattr(i, "__index__") else i for i in examples]


def _without(indices: Any, positions: list[int]) -> Any:
    if isinstance(indices, RankPlan):
        return indices.without(positions)
    gone = set(positions)
    return [example for i, example in enumerate(indices) if i not in gone]
