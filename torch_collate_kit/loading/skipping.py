"""Examples that fail: an error, or left out of their batch, up to a limit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch

from torch_collate_kit._checks import checked_choice, checked_int
from torch_collate_kit.errors import DataError, StateError

_logger = logging.getLogger("torch_collate_kit.loading")

OnError: TypeAlias = Literal["raise", "skip"]
NEVER_SKIPPED = (MemoryError, StateError, torch.OutOfMemoryError)
"""Errors that no example is to blame for."""


class Skipped(NamedTuple):
    """An example that was left out."""

    example: int
    """Its index in the dataset, or its position in the stream."""
    reason: str
    """Its error, which names it."""
    traceback: str = ""


class SkipPolicy:
    """Whether examples that fail are left out, and how many at most.

    Raises:
        ValueError, TypeError: an option is wrong.
    """

    def __init__(self, on_error: OnError, max_skipped: int, max_skipped_in_a_row: int) -> None:
        checked_choice("on_error", on_error, get_args(OnError))
        self.skips = on_error == "skip"
        self.max_skipped = checked_int("max_skipped", max_skipped)
        self.max_skipped_in_a_row = checked_int("max_skipped_in_a_row", max_skipped_in_a_row)

    def counted(
        self, num_skipped: int, num_in_a_row: int, outcomes: Iterable[Skipped | None]
    ) -> tuple[int, int]:
        """Count and log what was left out, None for each example that was not.

        Returns:
            How many were left out so far, and how many in a row up to the last outcome.

        Raises:
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


def failing_alone(
    collate_one: Callable[[int], object], numbers: Iterable[int], faults: type[Exception]
) -> Iterator[tuple[int, Exception]]:
    """Yield the number and error of each example that cannot be collated alone."""
    for number in numbers:
        try:
            collate_one(number)
        except NEVER_SKIPPED:
            raise
        except faults as error:
            yield number, error
