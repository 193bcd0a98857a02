"""Examples that fail: left out where their batch is built, counted where it is received."""

from __future__ import annotations

import copy
import logging
import operator
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import torch
from torch.utils.data import get_worker_info

from torch_collate_kit._checks import checked_choice, checked_int
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.packing import RankPlan

_logger = logging.getLogger("torch_collate_kit.loading")

T = TypeVar("T")
OnError: TypeAlias = Literal["raise", "skip"]
NEVER_SKIPPED = (MemoryError, StateError, torch.OutOfMemoryError)
"""Errors that no example is to blame for."""


class Skipped(NamedTuple):
    """An example that was left out."""

    example: int  # its index in the dataset, or its position in the stream
    reason: str  # its error, which names it
    traceback: str = ""


class SkipPolicy:
    """Whether examples that fail are left out, and how many at most."""

    def __init__(self, on_error: OnError, max_skipped: int, max_skipped_in_a_row: int) -> None:
        checked_choice("on_error", on_error, get_args(OnError))
        self.skips = on_error == "skip"
        self.max_skipped = checked_int("max_skipped", max_skipped)
        self.max_skipped_in_a_row = checked_int("max_skipped_in_a_row", max_skipped_in_a_row)

    def counted(
        self, num_skipped: int, num_in_a_row: int, outcomes: Iterable[Skipped | None]
    ) -> tuple[int, int]:
        """Count and log what was left out, None for each example that was not.

        Returns how many were left out so far, and how many in a row up to the last outcome;
        DataError: more than the limits allow.
        """
        for skipped in outcomes:
            if skipped is None:
                num_in_a_row = 0
                continue
            num_skipped, num_in_a_row = num_skipped + 1, num_in_a_row + 1
            if num_skipped > self.max_skipped:
                raise _too_many(f"{num_skipped} examples", "max_skipped", self.max_skipped, skipped)
            self.check_in_a_row(num_in_a_row, skipped)
            most = self.max_skipped
            _logger.warning("skipped: %s (%d of at most %d)", skipped.reason, num_skipped, most)
        return num_skipped, num_in_a_row

    def check_in_a_row(self, num_in_a_row: int, last: Skipped) -> None:
        """Raise DataError if so many examples one after the other are too many."""
        if num_in_a_row > (most := self.max_skipped_in_a_row):
            raise _too_many(f"{num_in_a_row} examples in a row", "max_skipped_in_a_row", most, last)


def _too_many(count: str, option: str, most: int, last: Skipped) -> DataError:
    trace = f"\n{last.traceback}" if last.traceback else ""
    return DataError(
        f"{count} are wrong, more than {option}={most}; the last one: {last.reason}{trace}"
    )


def collated(
    collate: Callable[[Sequence[int]], T], numbers: Sequence[int], faults: type[Exception]
) -> tuple[T | None, dict[int, Exception]]:
    """Collate a batch without the examples that cannot be collated alone.

    ``collate`` receives the numbers of those to collate, ascending. Where none fails alone, all are
    collated again: the error may be transient. Returns the batch, None if all examples fail, and
    the errors by number.
    """
    try:
        return collate(numbers), {}
    except NEVER_SKIPPED:
        raise
    except faults:
        failing: dict[int, Exception] = {}
        for number in numbers:
            try:
                collate([number])
            except NEVER_SKIPPED:
                raise
            except faults as error:
                failing[number] = error
        rest = [number for number in numbers if number not in failing]
        return collate(rest) if rest else None, failing


def named(error: DataError, examples: Sequence[tuple[Any, str]]) -> DataError:
    """Return the error of a batch, naming its example by index or position, and by source.

    >>> named(DataError("example 1 is empty"), [(6, "the stream"), (7, "the stream")])
    DataError('example 7 of the stream is empty')
    """
    message, found = str(error), set(re.findall(r"(example|row) (\d+)", str(error)))
    if any(re.search(rf"example \d+ of {re.escape(source)}", message) for _, source in examples):
        return error  # PackedRows have named it
    if len(found) != 1:
        numbers, (_, source) = [number for number, _ in examples], examples[0]
        if len({source for _, source in examples}) > 1:
            source = "the mixture"
        return DataError(f"{message} (a batch of examples {numbers} of {source})")
    ((kind, number),) = found
    example, source = examples[0 if kind == "row" else int(number)]
    example = number if kind == "row" else example  # a row is numbered in its source
    return DataError(message.replace(f"{kind} {number}", f"example {example} of {source}", 1))


# ---- with a sampler ----

_Outcomes: TypeAlias = tuple[Skipped | None, ...]


class Collated(NamedTuple):
    """A batch, and the outcome of each example that was to be in it."""

    batch: Any
    outcomes: _Outcomes = ()
    """One per example that was to be read, None where it is in the batch. Of a stream, which counts
    them itself, only those that were left out."""
    mark: Any = None
    """Loader-specific resume data after the batch: of a stream, the places of its shards."""


def skipping_parts(loader: Any) -> dict[str, Any]:
    """Return parts with which a DataLoader with a ``batch_sampler`` yields ``Collated``.

    A DataLoader reads, then collates, and an error of either is one of the whole batch. So its
    dataset becomes one that reads nothing, and its collate function one that does both.
    """
    return {
        "dataset": _Unread(),
        "collate_fn": _SkippingCollate(loader.dataset, loader.collate_fn),
        "worker_init_fn": partial(_start_worker, loader.dataset, loader.worker_init_fn),
    }


class _Unread:
    """A stand-in for the dataset inside a DataLoader: passes the indices on to be read."""

    def __getitems__(self, indices: Any) -> Any:
        return indices


def _start_worker(dataset: Any, worker_init_fn: Callable[[int], Any] | None, worker: int) -> None:
    """Show the caller's ``worker_init_fn`` the dataset that is read, in worker_info."""
    object.__setattr__(get_worker_info(), "dataset", dataset)  # it is frozen
    if worker_init_fn is not None:
        worker_init_fn(worker)


class _SkippingCollate:
    """A collate function that reads and collates examples by index, but for those that fail."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __call__(self, indices: Any) -> Collated:
        count = len(indices) if isinstance(indices, Sized) else 1
        collate_part = partial(self._part, indices, count)
        batch, failing = collated(collate_part, range(count), Exception)
        if not failing:
            return Collated(batch, (None,) * count)
        outcomes = self._outcomes(indices, failing)
        if len(failing) == count:
            batch = self._all_failed(indices, outcomes, failing[0])
        return Collated(batch, outcomes)

    def _part(self, indices: Any, count: int, numbers: Sequence[int]) -> Any:
        """Return the batch of some examples of a step, as a DataLoader makes it."""
        if len(numbers) < count and isinstance(indices, RankPlan):
            indices = indices.without(sorted(set(range(count)) - set(numbers)))
        elif len(numbers) < count:
            every = [*indices]
            indices = copy.copy(indices) if isinstance(indices, list) else []  # with its epoch
            indices[:] = [every[number] for number in numbers]
        if getattr(self._dataset, "__getitems__", None):
            return self._collate(self._dataset.__getitems__(indices))
        return self._collate([self._dataset[i] for i in indices])

    def _all_failed(self, indices: Any, outcomes: _Outcomes, first: Exception) -> Any:
        """Return the rows of pads that other ranks expect. Raises DataError without a plan."""
        if isinstance(indices, RankPlan):
            return self._part(indices, len(outcomes), [])
        who = "all examples" if len(outcomes) > 1 else "the only example"
        reason = outcomes[0] and outcomes[0].reason
        raise DataError(
            f"nothing is left to collate: {who} of a batch of {len(outcomes)} could not be read or "
            f"collated; the first one: {reason}"
        ) from first

    def _outcomes(self, indices: Any, failing: Mapping[int, Exception]) -> _Outcomes:
        """Return what became of each example."""
        examples = indices.indices if isinstance(indices, RankPlan) else list(indices)
        outcomes: list[Skipped | None] = [None] * len(examples)
        for number, error in failing.items():
            example = examples[number]
            if hasattr(example, "__index__"):  # NumPy's and torch's integers are no JSON
                example = operator.index(example)
            reason = f"example {example} of the dataset: {type(error).__name__}: {error}"
            if isinstance(error, DataError):
                reason = str(named(error, [(example, "the dataset")]))
            trace = "".join(traceback.format_exception(error))
            outcomes[number] = Skipped(example, reason, trace)
        return tuple(outcomes)


class SkippedExample(NamedTuple):
    """An example that was left out of the batch of a step.

    >>> SkippedExample(0, 12, 345, "example 345 of the dataset: OSError: no such file").example
    345
    """

    epoch: int
    step: int
    example: Any  # its index in the dataset, or its position in the stream
    error: str | None
    """Its error, which names it; None after a resume, and for streams, which log it."""


class SkippedExamples(NamedTuple):
    """The examples left out of the batches that the consumer has received."""

    policy: SkipPolicy
    examples: tuple[SkippedExample, ...] = ()
    in_a_row: int = 0  # up to the last example read

    def with_batch(self, epoch: int, step: int, outcomes: _Outcomes) -> SkippedExamples:
        """Return the examples after one more batch, log its skipped ones; DataError if too many."""
        if not outcomes:
            return self
        skipped = [one for one in outcomes if one]
        if not skipped and not self.in_a_row:
            return self  # as nearly always
        in_a_row = self.in_a_row
        if self.policy.skips:  # else a stream has counted them
            at_step = f"in step {step} of epoch {epoch}, "
            located = (one and one._replace(reason=at_step + one.reason) for one in outcomes)
            _, in_a_row = self.policy.counted(len(self.examples), in_a_row, located)
        found = (SkippedExample(epoch, step, one.example, one.reason or None) for one in skipped)
        return SkippedExamples(self.policy, (*self.examples, *found), in_a_row)

    def state(self) -> dict[str, Any]:
        """Return their state; nothing if there are none, as of any other loader."""
        named = [[one.epoch, one.step, one.example] for one in self.examples]
        return {"skipped": {"examples": named, "in_a_row": self.in_a_row}} if named else {}

    def after(self, state: Mapping[str, Any]) -> SkippedExamples:
        """Return the examples left out in the run that saved ``state``, with the same policy."""
        saved = state.get("skipped", {"examples": [], "in_a_row": 0})
        examples = tuple(SkippedExample(a, b, i, None) for a, b, i in saved["examples"])
        return SkippedExamples(self.policy, examples, saved["in_a_row"])
