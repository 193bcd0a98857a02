"""Examples that fail: left out where their batch is built, counted where it is received.

A DataLoader reads, then collates, and an error of either is an error of the whole batch. So its
dataset is replaced by one that reads nothing, and its collate function by one that does both. The
examples missing from a batch travel with it, from a worker or the prefetch thread to the consumer.
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Mapping, Sized
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.skipping import NEVER_SKIPPED, Skipped, SkipPolicy, failing_alone
from torch_collate_kit.packing import RankPlan

__all__ = ["Collated", "Failed", "SkippedExample", "SkippedExamples", "skip_failing_examples"]


class Failed(NamedTuple):
    """An example that was left out of its batch."""

    example: Any
    """Its index in the dataset, or its position in the stream."""
    position: int = 0
    """Its place among the examples that were to be read."""
    error: str | None = None
    """The kind of error and its message."""
    traceback: str = ""
    """The traceback as text, since not every error can be sent by a worker."""


class Collated(NamedTuple):
    """A batch, and the examples that were left out of it."""

    batch: Any
    failed: tuple[Failed, ...] = ()
    num_examples: int = 0
    """How many were to be read; 0 where the loader does not count them, or a stream has."""


def skip_failing_examples(loader: Any) -> None:
    """Make a DataLoader with a ``batch_sampler`` yield ``Collated``."""
    collate = _SkippingCollate(loader.dataset, loader.collate_fn)
    start = partial(_start_worker, loader.dataset, loader.worker_init_fn)
    # not by setattr: a DataLoader forbids it
    vars(loader).update(dataset=_Unread(), collate_fn=collate, worker_init_fn=start)


class _Unread:
    """A stand-in for the dataset inside a DataLoader: passes the indices on to be read."""

    def __getitems__(self, indices: Any) -> Any:
        return indices


def _start_worker(
    dataset: Any, worker_init_fn: Callable[[int], object] | None, worker: int
) -> None:
    """Show the caller's ``worker_init_fn`` the dataset that is read, in worker_info."""
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
            return Collated(self._batch(indices), (), num_examples)
        except NEVER_SKIPPED:
            raise
        except Exception as error:
            failed = self._failing(indices)
            return Collated(self._rest(indices, failed, error), failed, num_examples)

    def _batch(self, indices: Any) -> Any:
        """Return the batch as a DataLoader makes it."""
        if getattr(self._dataset, "__getitems__", None):
            return self._collate(self._dataset.__getitems__(indices))
        return self._collate([self._dataset[i] for i in indices])

    def _failing(self, indices: Any) -> tuple[Failed, ...]:
        examples = _examples(indices)

        def collate_one(position: int) -> None:
            self._batch(_without(indices, [i for i in range(len(examples)) if i != position]))

        return tuple(
            Failed(
                examples[position],
                position,
                f"{type(error).__name__}: {error}",
                "".join(traceback.format_exception(error)),
            )
            for position, error in failing_alone(collate_one, range(len(examples)), Exception)
        )

    def _rest(self, indices: Any, failed: tuple[Failed, ...], error: Exception) -> Any:
        """Return the batch without them. If none fails alone, the fault may have passed."""
        if not failed:
            try:
                return self._batch(indices)
            except NEVER_SKIPPED:
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
    """Return the dataset indices of a batch; NumPy's and torch's integers are no JSON."""
    examples = indices.indices if isinstance(indices, RankPlan) else indices
    return [operator.index(i) if hasattr(i, "__index__") else i for i in examples]


def _without(indices: Any, positions: list[int]) -> Any:
    if isinstance(indices, RankPlan):
        return indices.without(positions)
    gone = set(positions)
    return [example for i, example in enumerate(indices) if i not in gone]


class SkippedExample(NamedTuple):
    """An example that was left out of the batch of a step.

    >>> SkippedExample(0, 12, 345, "OSError: no such file").example
    345
    """

    epoch: int
    step: int
    example: Any
    """Its index in the dataset, or its position in the stream."""
    error: str | None
    """The kind of error and its message; None after a resume, and for streams, which log it."""


class SkippedExamples:
    """The examples left out of the batches that the consumer has received. It never changes."""

    def __init__(
        self, policy: SkipPolicy, examples: tuple[SkippedExample, ...] = (), in_a_row: int = 0
    ) -> None:
        self.policy, self.examples = policy, examples
        self._in_a_row = in_a_row  # up to the last example read

    def with_batch(self, epoch: int, step: int, collated: Collated) -> SkippedExamples:
        """Return the examples with those of one more batch, counted and logged.

        Raises:
            DataError: more than the policy allows.
        """
        if not collated.failed and not (self._in_a_row and collated.num_examples):
            return self  # as nearly always
        found = tuple(SkippedExample(epoch, step, of.example, of.error) for of in collated.failed)
        where = f"in step {step} of epoch {epoch}"
        outcomes: list[Skipped | None] = [None] * collated.num_examples
        for of in collated.failed if outcomes else ():
            reason = f"example {of.example} {where}: {of.error}"
            outcomes[of.position] = Skipped(of.example, reason, of.traceback)
        _, in_a_row = self.policy.counted(len(self.examples), self._in_a_row, outcomes)
        return SkippedExamples(self.policy, self.examples + found, in_a_row)

    def state(self) -> dict[str, Any]:
        """Return their state; nothing if there are none, as of any other loader."""
        if not self.examples:
            return {}
        named = [[one.epoch, one.step, one.example] for one in self.examples]
        return {"skipped": named, "skipped_in_a_row": self._in_a_row}

    def after(self, state: Mapping[str, Any]) -> SkippedExamples:
        """Return the examples left out in the run that saved ``state``, with the same policy."""
        named, in_a_row = state.get("skipped", []), state.get("skipped_in_a_row", 0)
        problem = ""
        if not isinstance(named, list) or not all(
            isinstance(one, list)
            and len(one) == 3
            and all(type(number) is int and number >= 0 for number in one[:2])
            for one in named
        ):
            problem = "skipped that is not a list of [epoch, step, example]"
        elif type(in_a_row) is not int or not 0 <= in_a_row <= len(named):
            problem = f"skipped_in_a_row={in_a_row!r} of {len(named)} that were skipped"
        elif ("skipped" in state) != ("skipped_in_a_row" in state):
            problem = "only one of skipped and skipped_in_a_row, which are saved together"
        if problem:
            raise StateError(f"the state has {problem}; pass what state_dict() returned")
        examples = tuple(SkippedExample(one[0], one[1], one[2], None) for one in named)
        return SkippedExamples(self.policy, examples, in_a_row)
