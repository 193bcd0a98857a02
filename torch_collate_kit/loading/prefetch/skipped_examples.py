"""The examples that a loader has left out so far, and how many it may."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.prefetch.skipping import Failed, LeftOut

__all__ = ["SkippedExample", "SkippedExamples"]

_logger = logging.getLogger("torch_collate_kit.loading")
_MOST_NAMED = 20  # in a message
_DEFAULTS = {"max_skipped": 100, "max_skipped_in_a_row": 10}


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
    """What was left out of the batches that the consumer has received.

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

    def add(self, epoch: int, step: int, left_out: LeftOut) -> None:
        """Counts and logs what a batch is without; nothing is changed if it is too much."""
        longest, in_a_row = _runs(self._in_a_row, left_out)
        failed = left_out.failed
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
        self.examples, self._in_a_row = examples, in_a_row

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
        loaded = SkippedExamples(self.max_skipped, self.max_in_a_row)
        loaded.examples = [
            SkippedExample(epoch, step, example, None) for epoch, step, example in named
        ]
        loaded._in_a_row = in_a_row
        return loaded


def _runs(in_a_row: int, left_out: LeftOut) -> tuple[int, int]:
    """The longest run of examples left out, and the one that the batch ends with."""
    failed = {of.position for of in left_out.failed}
    if not failed:  # as nearly always: without a loop
        return 0, 0 if left_out.num_examples else in_a_row
    longest = 0
    for position in range(left_out.num_examples):
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
