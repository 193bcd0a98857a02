"""The wrong examples of a shard: named by their position, and left out of their batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_collate_kit.errors import DataError
from torch_collate_kit.loading.skipping import Skipped, SkipPolicy, collated, named
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
        everything = np.arange(len(entries))

        def collate_part(numbers: Sequence[int]) -> Any:
            if len(numbers) == len(entries):
                return collate(entries, plan)
            kept = np.isin(everything, numbers)
            return collate(entries[kept], _plan_without(plan, ~kept))

        if not self._policy.skips:
            return collate(entries, plan), []
        batch, failing = collated(collate_part, everything.tolist(), DataError)
        if failing and set(plan.example_indices.tolist()) <= failing.keys():
            batch = None  # what is left was dropped
        wrong = {n: Skipped(int(entries["position"][n]), str(e)) for n, e in failing.items()}
        outcomes: list[Skipped | None] = []
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
        names = self._names
        wheres = [names[source] for source in sources] if names else [self._of] * len(positions)
        return named(error, list(zip(positions, wheres, strict=True)))


def _plan_without(plan: PackingPlan, is_wrong: npt.NDArray[np.bool_]) -> PackingPlan:
    """Return the same rows without some examples, bool [N]; the others are numbered anew."""
    is_left = ~is_wrong[plan.example_indices]
    rows = Rows(np.flatnonzero(is_left), running_sum(is_left)[plan.row_offsets])
    return part_of(plan, rows, np.flatnonzero(~is_wrong))
