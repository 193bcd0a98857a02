"""A source of a mixture in one shard: what was read of it, and when its next entry is due."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torch_collate_kit.errors import DataError
from torch_collate_kit.loading.streaming.entries import ENTRY
from torch_collate_kit.loading.streaming.readers import Reader
from torch_collate_kit.loading.streaming.states import Place

_BEGIN = Place()
_READ_AHEAD = 32  # entries


@dataclass(eq=False)
class MixedSource:
    """A source in one shard: what was read of it, and what comes next."""

    number: int
    name: str
    open: Callable[[Place, int], Reader]  # of pass ``turn`` from a place on
    by_tokens: bool
    most_passes: int | None
    period: int = 0  # inverse of its weight in the stage; 0: it has none
    place: Place = _BEGIN  # after the last entry given out
    units: int = 0  # examples or tokens given out in the stage
    turn: int = 0  # passes before this one
    end: int = -1  # units at the end of the first pass, 0 if before the stage; -1: not yet
    ahead: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=ENTRY))
    places: list[Place] = field(default_factory=list)  # after each entry of ``ahead``
    tokens: list[int] = field(default_factory=list)  # of each entry of ``ahead``
    next: int = 0  # the first entry of ``ahead`` that was not given out
    reader: Reader | None = None
    has_ended: bool = False  # it is not read again

    def opened(self) -> Reader:
        """Return the reader of the pass."""
        self.reader = self.reader or self.open(self.place, self.turn)
        return self.reader

    def has_next(self) -> bool:
        """Return whether an entry is ready, after reading on if necessary."""
        if self.next == len(self.places) and not self.has_ended:
            ahead = self.ahead = self.opened().read(_READ_AHEAD)
            names = ("num_read", "next_start", "source", "taken")
            self.places = list(map(Place, *(ahead[name].tolist() for name in names)))
            self.tokens, self.next = ahead["num_tokens"].tolist(), 0
        return self.next < len(self.places)

    def due(self) -> int:
        """Return twice the virtual time at which the next entry is due."""
        return (2 * self.units + self._next_units()) * self.period

    def given(self) -> np.ndarray:
        """Return the next entry, ENTRY [1], and move after it."""
        entry = self.ahead[self.next : self.next + 1]
        self.place, self.units = self.places[self.next], self.units + self._next_units()
        self.next += 1
        return entry

    def end_pass(self, *, is_read_again: bool) -> bool:
        """Record the end of a pass, and return whether ``max_passes`` is why it was the last one.

        Raises:
            DataError: the pass had no examples.
        """
        if self.place == _BEGIN:
            raise DataError(
                f"{self.name} has no examples; leave it out of the mixture, or use fewer "
                "shards or workers than it has files and examples"
            )
        self.end = self.units if self.end < 0 else self.end
        is_at_most = self.turn + 1 == self.most_passes
        if is_read_again and not is_at_most:
            self.place, self.turn, self.reader = _BEGIN, self.turn + 1, None
        else:
            self.has_ended = True
        return is_at_most and is_read_again

    def begin_stage(self, period: int) -> None:
        """Let the count of what was read, and the virtual time, begin anew."""
        self.period, self.units, self.end = period, 0, min(self.end, 0)

    def state(self) -> list[Any]:
        """Return the place as JSON."""
        place = self.place
        state = [place.num_read, place.start, place.taken, self.units, self.turn, self.end]
        return state if place.source is None else [*state, place.source]

    def _next_units(self) -> int:
        return self.tokens[self.next] if self.by_tokens else 1
