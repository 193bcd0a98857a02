"""Examples that fail: left out where their batch is built, counted where it is received.

A DataLoader reads, then collates, and an error of either is an error of the whole batch. So its
dataset is replaced by one that reads nothing, and its collate function by one that does both. What
a batch is without travels with it, from a worker or the prefetch thread to the consumer.
"""

from __future__ import annotations

import logging
import operator
import traceback
from collections.abc import Callable, Iterator, Mapping, Sized
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.packing import RankPlan

__all__ = [
    "Collated",
    "Failed",
    "SkippedExample",
    "SkippedExamples",
    "skip_failing_examples",
]

_logger = logging.getLogger("torch_collate_kit.loading")
_NEVER_SKIPPED = (MemoryError, StateError, torch.OutOfMemoryError)  # the example is not at fault
_MOST_NAMED = 20  # in a message
_DEFAULTS = {"max_skipped": 100, "max_skipped_in_a_row": 10}


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


class Collated(NamedTuple):
    """A batch, how many examples were to be read for it, and those that were left out."""

    batch: Any
    num_examples: int = 0  # where none is left out, nobody counts them
    failed: tuple[Failed, ...] = ()


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
            return Collated(self._batch(indices), num_examples)
        except _NEVER_SKIPPED:
            raise
        except Exception as error:
            failed = tuple(self._failing(indices))
            return Collated(self._rest(indices, failed, error), num_examples, failed)

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


class SkippedExample(NamedTuple):
    """An example that ``PrefetchLoader(on_error="skip")`` has left out of a step.

    >>> SkippedExample(0, 12, 345, "OSError: no such file").example
    345
    """

    epoch: int
    step: int
    example: Any
    """Its index in the dataset."""
    error: str | None
    """The kind of error and its message; None of what a loaded state says was left out."""


class SkippedExamples:
    """What was left out of the batches that the consumer has received. It never changes.

    Raises:
        DataError: more than ``max_skipped``, or more than ``max_in_a_row`` one after the other in
            the order in which examples are read.
    """

    def __init__(self, max_skipped: int, max_in_a_row: int) -> None:
        self.max_skipped, self.max_in_a_row = max_skipped, max_in_a_row
        self.examples: list[SkippedExample] = []
        self._in_a_row = 0  # up to the last example read

    @property
    def limits(self) -> dict[str, int]:
        """Those that are not the default of ``PrefetchLoader``, by its names for them."""
        limits = {"max_skipped": self.max_skipped, "max_skipped_in_a_row": self.max_in_a_row}
        return {name: limit for name, limit in limits.items() if limit != _DEFAULTS[name]}

    def with_batch(self, epoch: int, step: int, collated: Collated) -> SkippedExamples:
        """Count and log what a batch is without. Returns the new counts; these stay as they are."""
        longest, in_a_row = _runs(self._in_a_row, collated)
        failed = collated.failed
        if not failed and in_a_row == self._in_a_row:
            return self
        found = [SkippedExample(epoch, step, of.example, of.error) for of in failed]
        examples = [*self.examples, *found]
        if found and len(examples) > self.max_skipped:
            raise _too_many(examples, failed, f"max_skipped={self.max_skipped}")
        if found and longest > self.max_in_a_row:
            limit = f"max_skipped_in_a_row={self.max_in_a_row}"
            raise _too_many(examples[-longest:], failed, f"{limit}, in a row")
        for number, one in enumerate(found, start=len(self.examples) + 1):
            _logger.warning(
                "left example %s out of step %d of epoch %d, %d of at most %d so far: %s",
                *(one.example, step, epoch, number, self.max_skipped, one.error),
            )
        return self._with(examples, in_a_row)

    def _with(self, examples: list[SkippedExample], in_a_row: int) -> SkippedExamples:
        changed = SkippedExamples(self.max_skipped, self.max_in_a_row)
        changed.examples, changed._in_a_row = examples, in_a_row
        return changed

    def state(self) -> dict[str, Any]:
        """Nothing if nothing was left out, so that the state is that of any other loader."""
        if not self.examples:
            return {}
        named = [[one.epoch, one.step, one.example] for one in self.examples]
        return {"skipped": named, "skipped_in_a_row": self._in_a_row}

    def after(self, state: Mapping[str, Any]) -> SkippedExamples:
        """With the same limits, what was left out in the run that saved ``state``."""
        named, in_a_row = state.get("skipped", []), state.get("skipped_in_a_row", 0)
        if not isinstance(named, list) or not all(_is_named(one) for one in named):
            raise StateError(
                "the state has skipped that is not a list of [epoch, step, example]; pass what "
                "state_dict() gave"
            )
        if type(in_a_row) is not int or not 0 <= in_a_row <= len(named):
            raise StateError(
                f"the state has skipped_in_a_row={in_a_row!r} of {len(named)} that were skipped; "
                "pass what state_dict() gave"
            )
        if ("skipped" in state) != ("skipped_in_a_row" in state):
            raise StateError(
                "the state has only one of skipped and skipped_in_a_row, which are saved together; "
                "pass what state_dict() gave"
            )
        examples = [SkippedExample(epoch, step, example, None) for epoch, step, example in named]
        return self._with(examples, in_a_row)


def _runs(in_a_row: int, collated: Collated) -> tuple[int, int]:
    """The longest run of examples left out, and the one that the batch ends with."""
    failed = {of.position for of in collated.failed}
    if not failed:  # as nearly always: without a loop
        return 0, 0 if collated.num_examples else in_a_row
    longest = 0
    for position in range(collated.num_examples):
        in_a_row = in_a_row + 1 if position in failed else 0
        longest = max(longest, in_a_row)
    return longest, in_a_row


def _too_many(examples: list[SkippedExample], failed: tuple[Failed, ...], limit: str) -> DataError:
    named = ", ".join(str(one.example) for one in examples[-_MOST_NAMED:])
    more = "" if len(examples) <= _MOST_NAMED else f"the last {_MOST_NAMED} of them "
    return DataError(
        f"{len(examples)} examples fail, more than {limit}: {more}{named}; repair or leave out "
        f"these, or raise the limit if so many may be lost. The last, example "
        f"{failed[-1].example}:\n{failed[-1].traceback}"
    )


def _is_named(one: Any) -> bool:
    if not isinstance(one, list) or len(one) != 3:
        return False
    return all(type(number) is int and number >= 0 for number in one[:2])
