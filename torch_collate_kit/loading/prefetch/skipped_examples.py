"""Examples that fail: left out where their batch is built, counted where it is received."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torch.utils.data import get_worker_info

from torch_collate_kit.errors import DataError
from torch_collate_kit.loading.skipping import NEVER_SKIPPED, Skipped, SkipPolicy, failing_alone
from torch_collate_kit.packing import RankPlan

_Outcomes: TypeAlias = tuple[Skipped | None, ...]


class Collated(NamedTuple):
    """A batch, and the outcome of each example that was to be in it."""

    batch: Any
    outcomes: _Outcomes = ()
    """One per example that was to be read, None where it is in the batch. Of a stream, which counts
    them itself, only those that were left out."""


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


def _start_worker(
    dataset: Any, worker_init_fn: Callable[[int], object] | None, worker: int
) -> None:
    """Show the caller's ``worker_init_fn`` the dataset that is read, in worker_info."""
    object.__setattr__(get_worker_info(), "dataset", dataset)  # it is frozen
    if worker_init_fn is not None:
        worker_init_fn(worker)


class _SkippingCollate:
    """A collate function that reads and collates examples by index, but for those that fail."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __call__(self, indices: Any) -> Collated:
        try:
            count = len(indices) if isinstance(indices, Sized) else 1
            return Collated(self._batch(indices), (None,) * count)
        except NEVER_SKIPPED:
            raise
        except Exception as error:
            outcomes = self._outcomes(indices)
            failed = [outcome for outcome in outcomes if outcome]
            if failed and len(failed) == len(outcomes) and not isinstance(indices, RankPlan):
                who = "all examples" if len(failed) > 1 else "the only example"
                raise DataError(
                    f"nothing is left to collate: {who} of a batch of {len(failed)} could not be "
                    f"read or collated; the first is {_named(failed[0], 'of the dataset')}"
                ) from error
            # where none fails alone, the fault may have passed
            gone = [position for position, outcome in enumerate(outcomes) if outcome]
            return Collated(self._batch(_without(indices, gone)), outcomes)

    def _batch(self, indices: Any) -> Any:
        """Return the batch as a DataLoader makes it."""
        if getattr(self._dataset, "__getitems__", None):
            return self._collate(self._dataset.__getitems__(indices))
        return self._collate([self._dataset[i] for i in indices])

    def _outcomes(self, indices: Any) -> _Outcomes:
        """Read and collate each example alone."""
        examples = indices.indices if isinstance(indices, RankPlan) else list(indices)
        positions = range(len(examples))
        outcomes: list[Skipped | None] = [None] * len(examples)

        def collate_one(position: int) -> None:
            self._batch(_without(indices, [i for i in positions if i != position]))

        for position, error in failing_alone(collate_one, positions, Exception):
            example = examples[position]
            if hasattr(example, "__index__"):  # NumPy's and torch's integers are no JSON
                example = operator.index(example)
            trace = "".join(traceback.format_exception(error))
            outcomes[position] = Skipped(example, f"{type(error).__name__}: {error}", trace)
        return tuple(outcomes)


def _without(indices: Any, positions: Sequence[int]) -> Any:
    if not positions:
        return indices
    if isinstance(indices, RankPlan):
        return indices.without(positions)
    gone = set(positions)
    return [example for i, example in enumerate(indices) if i not in gone]


def _named(skipped: Skipped, where: str) -> str:
    return f"example {skipped.example} {where}: {skipped.reason}"


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

    def with_batch(self, epoch: int, step: int, outcomes: _Outcomes) -> SkippedExamples:
        """Return the examples after one more batch, log its skipped ones; DataError if too many."""
        skipped = [of for of in outcomes if of]
        if not skipped and not (self._in_a_row and outcomes):
            return self  # as nearly always
        in_a_row = self._in_a_row
        if self.policy.skips:  # else a stream has counted them
            at = f"in step {step} of epoch {epoch}"
            named = (of and of._replace(reason=_named(of, at)) for of in outcomes)
            _, in_a_row = self.policy.counted(len(self.examples), in_a_row, named)
        found = (SkippedExample(epoch, step, of.example, of.reason or None) for of in skipped)
        return SkippedExamples(self.policy, (*self.examples, *found), in_a_row)

    def state(self) -> dict[str, Any]:
        """Return their state; nothing if there are none, as of any other loader."""
        named = [[one.epoch, one.step, one.example] for one in self.examples]
        return {"skipped": {"examples": named, "in_a_row": self._in_a_row}} if named else {}

    def after(self, state: Mapping[str, Any]) -> SkippedExamples:
        """Return the examples left out in the run that saved ``state``, with the same policy."""
        saved = state.get("skipped", {"examples": [], "in_a_row": 0})
        examples = tuple(SkippedExample(a, b, i, None) for a, b, i in saved["examples"])
        return SkippedExamples(self.policy, examples, saved["in_a_row"])
