"""The wrong examples of a shard: named by their position, and left out of their batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_collate_kit.errors import DataError
from torch_collate_kit.loading.skipping import Skipped, SkipPolicy, failing_alone
from torch_collate_kit.packing import PackingPlan
from torch_collate_kit.packing.planner import part_of
from torch_collate_kit.packing.rows import Rows, running_sum


class WrongExamples:
    """The wrong examples of a shard, and those that a reader has left out.

    ``of`` is where their positions count: "the stream", or "shard 3 of the stream"; in a mixture
    ``names`` of its sources.
    """

    def __init__(self, policy: SkipPolicy, of: str, names: Mapping[int, str] | None = None) -> None:
        self._policy, self._of, self._names = policy, of, names or {}
        self._left_out: list[Skipped] = []

    def leave_out(self, error: DataError, position: int) -> None:
        """Leave out the example at ``position``, whose error this is.

        Raises:
            DataError: it may not be left out, or too many were one after the other.
        """
        skipped = Skipped(position, str(self.named(error, [position])))
        if not self._policy.skips:
            raise DataError(skipped.reason) from error
        self._left_out.append(skipped)
        self._policy.check_in_a_row(len(self._left_out), skipped)

    def collated(
        self, entries: np.ndarray, plan: PackingPlan, collate: Callable[..., Any]
    ) -> tuple[Any, list[Skipped | None]]:
        """Collate a batch without its wrong examples; None if all are wrong.

        Returns:
            The batch, and what became of its examples and of those that a reader left out before
            them: None for each that is in the batch. Nothing is returned of them where none may be
            left out. ``collate(entries, plan)`` raises a DataError that names the position.
        """
        batch, wrong = None, dict[int, Skipped]()
        try:
            batch = collate(entries, plan)
        except DataError:
            wrong = _wrong_alone(entries, plan, collate) if self._policy.skips else {}
            if not wrong:
                raise
        if wrong:
            is_wrong = np.zeros(len(entries), dtype=bool)
            is_wrong[list(wrong)] = True
            plan = _plan_without(plan, is_wrong)
            if len(plan.example_indices):
                batch = collate(entries[~is_wrong], plan)
        outcomes: list[Skipped | None] = []
        if self._policy.skips:
            for number, before in enumerate(entries["skipped"]):
                outcomes += [*before, wrong.get(number)]
        return batch, outcomes

    def taken(self) -> tuple[Skipped, ...]:
        """Return those that were left out since the last call."""
        taken, self._left_out = tuple(self._left_out), []
        return taken

    def named(
        self, error: DataError, positions: Sequence[int], sources: Sequence[int] = ()
    ) -> DataError:
        """Return the error of a batch, with the position of the one example that it is about.

        >>> wrong = WrongExamples(SkipPolicy("raise", 1, 1), "the stream")
        >>> wrong.named(DataError("example 1 is empty"), [6, 7])
        DataError('example 7 of the stream is empty')
        """
        message, named = str(error), set(re.findall(r"(example|row) (\d+)", str(error)))
        if len(named) != 1:
            return DataError(f"{message} (a batch of examples {positions} of {self._of})")
        ((kind, number),) = named
        position = int(number) if kind == "row" else positions[int(number)]  # a row is a position
        found, of = f"{kind} {number}", self._of
        if self._names and kind != "row":
            of = self._names[sources[int(number)]]
        return DataError(message.replace(found, f"example {position} of {of}", 1))


def _wrong_alone(
    entries: np.ndarray, plan: PackingPlan, collate: Callable[..., Any]
) -> dict[int, Skipped]:
    """Return the examples of a batch that cannot be collated alone, by their number in it."""

    def collate_one(number: int) -> None:
        others = np.arange(len(entries)) != number
        collate(entries[~others], _plan_without(plan, others))

    # those that overflow drops are read, too
    numbers = np.union1d(plan.example_indices, plan.dropped).tolist()
    return {
        number: Skipped(int(entries["position"][number]), str(error))
        for number, error in failing_alone(collate_one, numbers, DataError)
    }


def _plan_without(plan: PackingPlan, is_wrong: npt.NDArray[np.bool_]) -> PackingPlan:
    """Return the same rows without some examples, bool [N]; the others are numbered anew."""
    is_left = ~is_wrong[plan.example_indices]
    rows = Rows(np.flatnonzero(is_left), running_sum(is_left)[plan.row_offsets])
    return part_of(plan, rows, np.flatnonzero(~is_wrong))
