"""Steps of full rows: an order cut into windows of steps, which are planned together."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from torch_collate_kit.loading.orders.checks import Indices
from torch_collate_kit.loading.orders.order import Order
from torch_collate_kit.loading.sampler import long_epochs
from torch_collate_kit.loading.sampler.budgets import Budget, Step, Windows
from torch_collate_kit.packing import PackingOptions
from torch_collate_kit.packing.atoms import Atoms
from torch_collate_kit.packing.steps import WindowPlan, num_rows_needed, num_that_fit, plan_window

_MOST_EPOCHS = 500  # that a window joins
_NUM_SAMPLED = 20  # windows from which the length of a very long epoch is estimated


class Entries(NamedTuple):
    """What an order by rows counts: examples, or with "split" their pieces."""

    lengths: Indices
    """int64 [E] tokens."""
    atoms: Atoms | None = None
    """What is planned of all of them; None of text, where lengths alone are held."""
    are_pieces: bool = False

    def planned(self, entries: Indices, packing: PackingOptions) -> Atoms:
        """Return what is planned of some entries, as examples of their own."""
        if self.atoms is None:
            return Atoms.of(self.lengths[entries], None, packing)
        return self.atoms.alone(entries)


def _least_cells(atoms: Atoms) -> Indices:
    """Return the cells of atoms, or a lower bound: their tokens, not aligned."""
    return atoms.cells if atoms.are_lists else atoms.tokens


class _Window(NamedTuple):
    first: int  # step
    num_steps: int
    start: int  # places in the order
    stop: int


class ByRows(Budget):
    """Steps of ``batch_rows`` rows, planned in windows of steps.

    A window is the next run of the order that fits, so its start is all that has to be known of
    what came before. Which rows make a step does not depend on the ranks of ``packing``.
    """

    def __init__(
        self,
        order: Order,
        tail: str,
        entries: Entries,
        packing: PackingOptions,
        windows: Windows,
    ) -> None:
        super().__init__(order, tail)
        self.batch_rows, self.window, self.group = windows
        self._entries, self._packing = entries, packing
        self._ahead = 8 * self.batch_rows * self.window  # entries read for a window, to begin with
        self._starts: dict[int, dict[int, int]] = {}  # [epoch][first step of a window]: its place
        self._windows: dict[tuple[int, int], _Window] = {}
        self._planned: tuple[int, _Window, Indices, WindowPlan] | None = None
        self._recent = -1, 0  # epoch and first step of the window that was asked for last
        self._counted: set[int] = set()  # epochs of which a thread has found all windows

    def num_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch."""
        long_epochs.wait(self, epoch)
        for _ in self.windows(epoch):
            pass
        return max(list(self._starts[epoch]))

    def windows(self, epoch: int) -> Iterator[_Window]:
        """Yield the windows of an epoch from the last known one on."""
        self._start_before(epoch, 0)
        first = max(list(self._starts[epoch]))
        while (window := self._window(epoch, first)) is not None:
            yield window
            first += window.num_steps

    def is_counted(self, epoch: int) -> bool:
        """Return whether ``length`` is exact."""
        is_short = self.order.size(epoch) <= long_epochs.MOST_COUNTED_AT_ONCE
        return is_short or epoch in self._counted

    def length(self, epoch: int) -> int:
        """Return the number of steps, or an estimate until a very long epoch is counted."""
        if self.is_counted(epoch):
            return self.num_steps(epoch)
        return long_epochs.estimated(self, epoch)

    def estimate(self, epoch: int) -> int:
        """Return about the number of steps, from some windows at even distances."""
        size, shares = self.order.size(epoch), []
        has_all = self.order.is_permutation  # then the number of tokens is known, too
        for start in range(0, size, -(-size // _NUM_SAMPLED)):
            stop, num_steps = self._end(epoch, start, self.window)
            tokens = self._entries.lengths[self.order.take(epoch, start, stop)].sum()
            shares.append(num_steps / max(1, tokens if has_all else stop - start))
        number = int(self._entries.lengths[:size].sum()) if has_all else size
        return max(1, round(number * float(np.mean(shares))))

    def apart(self) -> ByRows:
        """Return a copy for another thread."""
        other = copy.copy(self)
        other.order = self.order.apart()
        other._starts = {of: dict(known) for of, known in self._starts.items()}
        other._windows = dict(self._windows)
        return other

    def learn(self, other: ByRows, epoch: int) -> None:
        """Take over the windows of an epoch, all of which ``other`` has found."""
        self._starts.setdefault(epoch, {}).update(other._starts[epoch])
        self._windows.update(other._windows)
        self._counted.add(epoch)

    def has_step(self, epoch: int, step: int) -> bool:
        """Return whether an epoch has a step of this number."""
        return self._window_of(epoch, step) is not None

    def step(self, epoch: int, step: int) -> Step:
        """Return a step that the epoch has."""
        window = self._window_of(epoch, step)
        assert window is not None, "no such step"
        entries, planned = self._plan(epoch, window)
        numbers, plan = planned.step(step - window.first, self._packing)
        chosen, pieces = entries[numbers], self._entries.atoms
        if pieces is None or not self._entries.are_pieces:
            return Step(chosen, plan)
        following = pieces.starts[np.minimum(chosen + 1, len(pieces.starts) - 1)]
        cut = np.flatnonzero((pieces.starts[chosen] > 0) | (following > 0))
        return Step(pieces.examples[chosen], replace(plan, cut=cut))

    def steps_of(self, epoch: int, example: int) -> list[int]:
        """Return the steps of an epoch that have an example, ascending."""
        places, found, first = self.order.places(epoch, example), set(), 0
        self._start_before(epoch, 0)
        while (window := self._window(epoch, first)) is not None:
            is_in = any(window.start <= place < window.stop for place in places)
            if is_in or window.stop > self.order.size(epoch):  # of the next epoch's, or this one's
                steps = range(first, first + window.num_steps)
                found |= {k for k in steps if (self.step(epoch, k).examples == example).any()}
            first += window.num_steps
        return sorted(found)

    def place(self, epoch: int, step: int) -> int:
        """Return the place of the order from which on a reshuffle may change it."""
        window, size = self._window_of(epoch, step), self.order.size(epoch)
        if window is not None and step == window.first:
            return window.start
        if window is None or window.num_steps < self.window:  # what the last one leaves is dropped
            return size
        return min(window.stop, size)

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """Return what a state of this position holds besides it."""
        window = self._window_of(epoch, step) if step else None  # an epoch without a step has a 0
        first = self._start_before(epoch, 0) if window is None else window.first
        return {"window_start": [first, self._starts[epoch][first]]}

    def load(self, state: Mapping[str, Any], epoch: int, step: int) -> None:
        """Restore what ``state`` returned."""
        first, place = state["window_start"]
        self._starts, self._recent = {epoch: {first: place}}, (-1, 0)

    def _plan(self, epoch: int, window: _Window) -> tuple[Indices, WindowPlan]:
        kept = self._planned  # one read: another thread may be at another window
        if kept is not None and kept[:2] == (epoch, window):
            return kept[2:]
        entries = self.order.take(epoch, window.start, window.stop)
        planned = plan_window(
            self._entries.planned(entries, self._packing),
            self._packing,
            num_steps=window.num_steps,
            batch_rows=self.batch_rows,
            group=self.group,
        )
        self._planned = epoch, window, entries, planned
        return entries, planned

    def _window_of(self, epoch: int, step: int) -> _Window | None:
        """Return the window that has a step; None if the epoch has no such step."""
        of, first = self._recent  # one read: another thread may be at another window
        if of != epoch or first > step:
            first = self._start_before(epoch, step)  # takes longer, the more windows are known
        while (window := self._window(epoch, first)) is not None:
            if step < first + window.num_steps:
                self._recent = epoch, first
                return window
            first += window.num_steps
        return None

    def _start_before(self, epoch: int, step: int) -> int:
        """Return the first step of the last known window that begins at or before a step."""
        known = self._starts.setdefault(epoch, {})
        firsts = [first for first in list(known) if first <= step]
        if firsts:
            return max(firsts)
        known[0] = 0
        if self.tail == "wrap" and epoch:
            first = self.num_steps(epoch - 1)
            known[0] = max(0, self._starts[epoch - 1][first] - self.order.size(epoch - 1))
        return 0

    def _window(self, epoch: int, first: int) -> _Window | None:
        """Return the window that begins with a step, whose place is known; None after the last."""
        if (epoch, first) not in self._windows:
            start = self._starts[epoch][first]
            if start >= self.order.size(epoch):
                return None
            num_steps, stop = self.window, self._known_stop(epoch, first)
            if stop is None:
                stop, num_steps = self._end(epoch, start, self.window)
            if not num_steps:
                return None
            self._starts[epoch][first + num_steps] = stop
            self._windows[epoch, first] = _Window(first, num_steps, start, stop)
        return self._windows[epoch, first]

    def _known_stop(self, epoch: int, first: int) -> int | None:
        """Return where a window ended before a reshuffle changed what follows it.

        Planning looks ahead, so planning again would read the new order and end elsewhere.
        """
        last, made = first + self.window, getattr(self.order, "reshuffles", ())
        places = [place for of, step, place in made if of == epoch and first < step <= last]
        return next((place for place in places if place < self.order.size(epoch)), None)

    def _end(self, epoch: int, start: int, most_steps: int) -> tuple[int, int]:
        """Return the place where a window ends, and its number of steps; 0 for a dropped tail."""
        size, rows, ahead = self.order.size(epoch), self.batch_rows * most_steps, self._ahead
        most = size * (_MOST_EPOCHS if self.tail == "wrap" else 1) - start
        number = None
        while number is None:  # how many are read only matters for speed
            num_read = min(ahead, most)
            entries = self.order.take(epoch, start, start + num_read)
            atoms = self._entries.planned(entries, self._packing)
            more_follow = self.tail == "wrap" or num_read < most
            if len(entries) < num_read:  # a Mixture with max_passes ends: its last steps are full
                most, more_follow = len(entries), False
            number = num_that_fit(atoms, self._packing, rows, more_follow=more_follow)
            ahead *= 4
            if number is None and num_read == most:
                raise ValueError(
                    f"tail='wrap' joins epochs, and {_MOST_EPOCHS} of {size} examples do not fill "
                    f"{most_steps} steps of batch_rows={self.batch_rows} rows of max_tokens="
                    f"{self._packing.max_tokens}; lower max_tokens, or use tail='keep'"
                )
        self._ahead = number + number // 8 + rows
        if more_follow:
            return start + number, most_steps
        capacity = rows * self._packing.max_tokens
        needed = rows + 1
        if number == most or int(_least_cells(atoms).sum()) <= capacity:
            needed = num_rows_needed(atoms, self._packing)
        if needed > rows:
            return start + number, most_steps
        if self.tail == "keep":
            return start + most, max(1, -(-needed // self.batch_rows))
        num_steps = needed // self.batch_rows
        if not num_steps:
            return start, 0
        rows = num_steps * self.batch_rows
        number = num_that_fit(atoms, self._packing, rows, more_follow=False)
        return start + (number or 0), num_steps
