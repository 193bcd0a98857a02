"""What a stream does with an example that is wrong: raise, or leave it out, up to a limit."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import checked_choice, checked_int
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading.streaming.states import Position
from torch_collate_kit.packing import PackingPlan
from torch_collate_kit.packing.planner import part_of
from torch_collate_kit.packing.rows import Rows, running_sum

__all__ = ["ErrorPolicy", "Skipped", "WrongExamples", "plan_without"]

_logger = logging.getLogger("torch_collate_kit.loading")


class Skipped(NamedTuple):
    """An example that was left out."""

    position: int
    reason: str  # the message of its error, which names it


class ErrorPolicy:
    """Whether wrong examples are left out, and how many of a shard at most."""

    def __init__(self, on_error: str, max_skipped: int, max_skipped_in_a_row: int) -> None:
        checked_choice("on_error", on_error, ("raise", "skip"))
        self.skips = on_error == "skip"
        self.max_skipped = checked_int("max_skipped", max_skipped)
        self.max_in_a_row = checked_int("max_skipped_in_a_row", max_skipped_in_a_row)

    def check_in_a_row(self, num_in_a_row: int, last: Skipped) -> None:
        """DataError if so many examples one after the other are too many."""
        if num_in_a_row > self.max_in_a_row:
            raise DataError(
                f"{num_in_a_row} examples in a row are wrong, more than "
                f"max_skipped_in_a_row={self.max_in_a_row}; the last one: {last.reason}"
            )

    def counted(self, position: Position, outcomes: Sequence[Skipped | None]) -> Position:
        """``position`` after these examples, None for each that was given out. Logs the others.

        Raises:
            DataError: more than the limits allow.
        """
        num_skipped, in_a_row = position.num_skipped, position.num_in_a_row
        for skipped in outcomes:
            if skipped is None:
                in_a_row = 0
                continue
            num_skipped, in_a_row = num_skipped + 1, in_a_row + 1
            if num_skipped > self.max_skipped:
                raise DataError(
                    f"{num_skipped} examples are wrong, more than max_skipped={self.max_skipped}; "
                    f"the last one: {skipped.reason}"
                )
            self.check_in_a_row(in_a_row, skipped)
            most = self.max_skipped
            _logger.warning("skipped: %s (%d of at most %d)", skipped.reason, num_skipped, most)
        return position._replace(num_skipped=num_skipped, num_in_a_row=in_a_row)


class WrongExamples:
    """Names the wrong examples of a shard, and keeps those that a reader leaves out.

    ``of`` is where their positions count: "the stream", or "shard 3 of the stream".
    """

    def __init__(self, policy: ErrorPolicy, of: str) -> None:
        self._policy, self._of = policy, of
        self._left_out: list[Skipped] = []

    def leave_out(self, error: DataError, position: int) -> None:
        """The example at ``position``, whose error this is.

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
        """A batch, and what became of its examples and of those that a reader left out before them.

        Nothing is said to have become of them where none may be left out. The batch is None if all
        were wrong. ``collate(entries, plan)`` raises a DataError that names the position.
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
            plan = plan_without(plan, is_wrong)
            if len(plan.example_indices):
                batch = collate(entries[~is_wrong], plan)
        outcomes: list[Skipped | None] = []
        if self._policy.skips:
            for number, before in enumerate(entries["skipped"]):
                outcomes += [*before, wrong.get(number)]
        return batch, outcomes

    def taken(self) -> tuple[Skipped, ...]:
        """Those that were left out since the last call."""
        taken, self._left_out = tuple(self._left_out), []
        return taken

    def named(self, error: DataError, positions: Sequence[int]) -> DataError:
        """The error of a batch, with the position of the one example that it is about.

        >>> wrong = WrongExamples(ErrorPolicy("raise", 1, 1), "the stream")
        >>> wrong.named(DataError("example 1 is empty"), [6, 7])
        DataError('example 7 of the stream is empty')
        """
        message, named = str(error), set(re.findall(r"(example|row) (\d+)", str(error)))
        if len(named) != 1:
            return DataError(f"{message} (a batch of examples {positions} of {self._of})")
        ((kind, number),) = named
        position = int(number) if kind == "row" else positions[int(number)]  # a row is a position
        found = f"{kind} {number}"
        return DataError(message.replace(found, f"example {position} of {self._of}", 1))


def _wrong_alone(
    entries: np.ndarray, plan: PackingPlan, collate: Callable[..., Any]
) -> dict[int, Skipped]:
    """The examples of a batch that cannot be collated alone, by their number in it."""
    wrong = {}
    # those that overflow drops are read, too
    for number in np.union1d(plan.example_indices, plan.dropped).tolist():
        others = np.arange(len(entries)) != number
        try:
            collate(entries[~others], plan_without(plan, others))
        except DataError as error:
            wrong[number] = Skipped(int(entries["position"][number]), str(error))
    return wrong


def plan_without(plan: PackingPlan, is_wrong: npt.NDArray[np.bool_]) -> PackingPlan:
    """The same rows without some examples, bool [N]; the others are numbered anew.

    >>> from torch_collate_kit.packing import pack
    >>> plan = pack([4, 2, 6], 6)
    >>> plan.bins, plan_without(plan, np.array([True, False, True])).bins
    ([[2], [0, 1]], [[], [0]])
    """
    is_left = ~is_wrong[plan.example_indices]
    rows = Rows(np.flatnonzero(is_left), running_sum(is_left)[plan.row_offsets])
    return part_of(plan, rows, np.flatnonzero(~is_wrong))
