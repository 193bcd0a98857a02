"""Steps of full rows: an order cut into windows of steps, which are planned together."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from torch_collate_kit.loading.budgets import RowBudget, Step
from torch_collate_kit.loading.checks import Indices, Tail
from torch_collate_kit.loading.mixed_order import AnyOrder
from torch_collate_kit.loading.orders import Recent
from torch_collate_kit.packing import PackingOptions
from torch_collate_kit.packing.atoms import Atoms
from torch_collate_kit.packing.steps import WindowPlan, num_rows_needed, num_that_fit, plan_window

_LONG_SECONDS = 5  # of counting, after which a line of the log says so
_MOST_EPOCHS = 500  # that a window joins
_logger = logging.getLogger("torch_collate_kit.loading")


class Entries(NamedTuple):
    """What an order by rows counts: examples, or with "split" their pieces."""

    lengths: Indices  # int64 [E] tokens
    atoms: Atoms | None = None
    """What is planned of all of them; None of text, where lengths alone are held."""
    offsets: Indices | None = None
    """int64 [examples + 1], where the pieces of each example begin; None: they are examples."""

    def planned(self, entries: Indices, packing: PackingOptions) -> Atoms:
        """Return what is planned of some entries, as examples of their own."""
        if self.atoms is None:
            return Atoms.of(self.lengths[entries], None, packing)
        return self.atoms.alone(entries)


class _Window(NamedTuple):
    """A window of steps: ``num_steps`` and ``stop`` are 0 until its end is looked for."""

    first: int  # its first step
    start: int  # its first place in the order
    num_steps: int = 0
    stop: int = 0


class ByRows(RowBudget):
    """Steps of ``batch_rows`` rows, planned in windows of steps.

    A window is the next run of the order that fits, so its start is all that has to be known of
    what came before. All windows of an epoch but its last have equally many steps. Which rows make
    a step does not depend on the ranks of ``packing``.
    """

    def __init__(
        self, order: AnyOrder, tail: Tail, packing: PackingOptions, *, entries: Entries, **rows: int
    ) -> None:
        self._entries = entries
        super().__init__(order, tail, packing, **rows)
        self._ahead = 8 * self.batch_rows * self.window  # entries read for a window, to begin with

    def _forget(self) -> None:
        self._windows: dict[int, dict[int, _Window]] = {}  # [epoch][first step]
        self._plans = Recent[tuple[int, _Window], tuple[Indices, WindowPlan]](1)

    def num_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch: 24 s for 100 million examples."""
        began, is_logged = time.monotonic(), False
        first = self._last_known(epoch)
        while (window := self._window(epoch, first)) is not None:
            first += window.num_steps
            if not is_logged and time.monotonic() - began > _LONG_SECONDS:
                _logger.warning(
                    "counting the steps of epoch %d, of %d examples, takes more than %d s; no step "
                    "and no state asks for this number",
                    *(epoch, self.order.size(epoch), _LONG_SECONDS),
                )
                is_logged = True
        return first

    def has_step(self, epoch: int, step: int) -> bool:
        """Return whether an epoch has a step of this number."""
        return self._window_of(epoch, step) is not None

    def step(self, epoch: int, step: int) -> Step | None:
        """Return a step; None if the epoch does not have it."""
        window = self._window_of(epoch, step)
        if window is None:
            return None
        make = partial(self._plan, epoch, window)
        entries, planned = self._plans.get((epoch, window), make)
        numbers, plan = planned.step(step - window.first, self._packing)
        chosen, pieces = entries[numbers], self._entries.atoms
        if pieces is None or self._entries.offsets is None:
            return Step(chosen, plan)
        following = pieces.starts[np.minimum(chosen + 1, len(pieces.starts) - 1)]
        cut = np.flatnonzero((pieces.starts[chosen] > 0) | (following > 0))
        return Step(pieces.examples[chosen], replace(plan, cut=cut))

    def steps_of(self, epoch: int, example: int) -> list[int]:
        """Return the steps of an epoch that have an example, ascending."""
        places, found, first = self.order.places(epoch, example), set(), 0
        self._last_known(epoch, 0)
        while (window := self._window(epoch, first)) is not None:
            is_in = any(window.start <= place < window.stop for place in places)
            if is_in or window.stop > self.order.size(epoch):  # of the next epoch's, or this one's
                steps = ((first + k, self.step(epoch, first + k)) for k in range(window.num_steps))
                found |= {k for k, step in steps if step and (step.examples == example).any()}
            first += window.num_steps
        return sorted(found)

    def place(self, epoch: int, step: int) -> int:
        """Return the first position that a reshuffle before this step may change."""
        window, size = self._window_of(epoch, step), self.order.size(epoch)
        if window is not None and step == window.first:
            return window.start
        if window is None or window.num_steps < self.window:  # what the last one leaves is dropped
            return size
        return min(window.stop, size)

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """Return what a state of this position holds besides it."""
        window = self._window_of(epoch, step) if step else None  # an epoch without a step has a 0
        if window is None:
            first = self._last_known(epoch, 0)
            window = self._windows[epoch][first]
        return {"window_start": [window.first, window.start]}

    def load(self, state: Mapping[str, Any], epoch: int, step: int) -> None:
        """Restore what ``state`` returned."""
        first, place = state["window_start"]
        self._windows = {epoch: {first: _Window(first, place)}}

    # ---- windows ----

    def _plan(self, epoch: int, window: _Window) -> tuple[Indices, WindowPlan]:
        entries = self.order.take(epoch, window.start, window.stop)
        planned = plan_window(
            self._entries.planned(entries, self._packing),
            self._packing,
            num_steps=window.num_steps,
            batch_rows=self.batch_rows,
            group=self.group,
        )
        return entries, planned

    def _window_of(self, epoch: int, step: int) -> _Window | None:
        """Return the window that has a step; None if the epoch has no such step."""
        first = step // self.window * self.window
        if first not in self._windows.get(epoch, {}):
            first = self._last_known(epoch, step)
        while (window := self._window(epoch, first)) is not None:
            if step < first + window.num_steps:
                return window
            first += window.num_steps
        return None

    def _last_known(self, epoch: int, step: int | None = None) -> int:
        """Return the first step of the last window known, that begins at or before ``step``."""
        known = self._windows.setdefault(epoch, {})
        firsts = [first for first in list(known) if step is None or first <= step]
        if firsts:
            return max(firsts)
        known[0] = _Window(0, self._start(epoch) if self.tail == "wrap" else 0)
        return 0

    def _start(self, epoch: int) -> int:
        """Return the place at which an epoch that goes on from the one before it begins."""
        begun = [at for at, known in list(self._windows.items()) if at < epoch and known]
        last, start, passed = max(begun, default=0), 0, copy.copy(self)  # one epoch at a time
        passed._windows = {last: dict(self._windows.get(last) or {0: _Window(0, 0)})}
        for at in range(last, epoch):
            end = passed.num_steps(at)
            start = max(0, passed._windows[at][end].start - self.order.size(at))
            passed._windows = {at + 1: {0: _Window(0, start)}}
        return start

    def _window(self, epoch: int, first: int) -> _Window | None:
        """Return the window that begins with a step, whose place is known; None after the last."""
        known = self._windows[epoch]
        window = known[first]
        if window.num_steps:
            return window
        if window.start >= self.order.size(epoch):
            return None
        num_steps, stop = self.window, self._stop_before_reshuffle(epoch, first)
        if stop is None:
            num_steps, stop = self._end(epoch, window.start)
        if not num_steps:
            return None
        known.setdefault(first + num_steps, _Window(first + num_steps, stop))
        known[first] = window = _Window(first, window.start, num_steps, stop)
        return window

    def _stop_before_reshuffle(self, epoch: int, first: int) -> int | None:
        """Return where a window ended before a reshuffle changed what follows it.

        Planning looks ahead, so planning again would read the new order and end elsewhere.
        """
        for reshuffled, step, place in getattr(self.order, "reshuffles", ()):
            is_inside = reshuffled == epoch and first < step <= first + self.window
            if is_inside and place < self.order.size(epoch):
                return int(place)
        return None

    def _end(self, epoch: int, start: int) -> tuple[int, int]:
        """Return the number of steps of a window, 0 for a dropped tail, and where it ends."""
        rows, packing = self.batch_rows * self.window, self._packing
        atoms, number, more_follow = self._that_fit(epoch, start)
        if more_follow:
            return self.window, start + number
        cells = atoms.cells if atoms.are_lists else atoms.tokens  # or fewer: not aligned
        needed = rows + 1
        if number == len(cells) or int(cells.sum()) <= rows * packing.max_tokens:
            needed = num_rows_needed(atoms, packing)
        if needed > rows:
            return self.window, start + number
        if self.tail == "keep":
            return max(1, -(-needed // self.batch_rows)), start + len(cells)
        num_steps = needed // self.batch_rows
        if not num_steps:
            return 0, start
        rows = num_steps * self.batch_rows
        return num_steps, start + (num_that_fit(atoms, packing, rows, more_follow=False) or 0)

    def _that_fit(self, epoch: int, start: int) -> tuple[Atoms, int, bool]:
        """Return atoms from a place on, how many fit in a window, and whether more follow them."""
        size, rows, ahead = self.order.size(epoch), self.batch_rows * self.window, self._ahead
        most = size * (_MOST_EPOCHS if self.tail == "wrap" else 1) - start
        while True:  # how many are read only matters for speed
            num_read = min(ahead, most)
            entries = self.order.take(epoch, start, start + num_read)
            atoms = self._entries.planned(entries, self._packing)
            more_follow = self.tail == "wrap" or num_read < most
            if len(entries) < num_read:  # a Mixture with max_passes ends: its last steps are full
                most, more_follow = len(entries), False
            number = num_that_fit(atoms, self._packing, rows, more_follow=more_follow)
            if number is not None:
                self._ahead = number + number // 8 + rows
                return atoms, number, more_follow
            ahead *= 4
            if num_read == most:
                raise ValueError(
                    f"tail='wrap' joins epochs, and {_MOST_EPOCHS} of {size} examples do not fill "
                    f"{self.window} steps of batch_rows={self.batch_rows} rows of max_tokens="
                    f"{self._packing.max_tokens}; lower max_tokens, or use tail='keep'"
                )
