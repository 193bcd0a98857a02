"""Steps of rows of documents joined end to end: every place follows from sums of lengths."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.loading.orders.checks import Indices
from torch_collate_kit.loading.orders.order import Order
from torch_collate_kit.loading.sampler.budgets import Budget, Step, Windows
from torch_collate_kit.packing import PackingOptions
from torch_collate_kit.packing.rows import running_sum
from torch_collate_kit.packing.steps import WindowPlan, plan_wrapped


class ByTokens(Budget):
    """Steps of ``batch_rows`` rows of ``max_tokens`` tokens each, which documents are cut into.

    Step k of an epoch has its tokens from ``k * batch_rows * max_tokens`` on; the rows of a window
    of steps are dealt so that steps cost alike.
    """

    def __init__(
        self,
        order: Order,
        tail: str,
        lengths: Indices,
        packing: PackingOptions,
        windows: Windows,
    ) -> None:
        super().__init__(order, tail)
        self.batch_rows, self.window, self.group = windows
        self._lengths, self._packing = lengths, packing
        self._per_step = self.batch_rows * packing.capacity
        self._kept_sums: dict[int, Indices] = {}
        self._totals: dict[int, int] = {}  # tokens of each epoch
        self._planned: tuple[tuple[int, int, int], Indices, WindowPlan] | None = None

    def num_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch."""
        if self.tail == "wrap":
            return self._before(epoch + 1) // self._per_step - self._before(epoch) // self._per_step
        tokens = self._total(epoch)
        return tokens // self._per_step if self.tail == "drop" else -(-tokens // self._per_step)

    def step(self, epoch: int, step: int) -> Step:
        """Return a step that the epoch has."""
        first, last = self._window_of(epoch, step)
        documents, window = self._plan(epoch, first, last)
        chosen, plan = window.step(step - first, self._packing)
        return Step(documents[chosen], plan)

    def _plan(self, epoch: int, first: int, last: int) -> tuple[Indices, WindowPlan]:
        """Return the documents of a window of steps, and its rows."""
        kept = self._planned  # one read: another thread may be at another window
        if kept is not None and kept[0] == (epoch, first, last):
            return kept[1:]
        start, stop = (k * self._per_step - self._carried(epoch) for k in (first, last))
        if self.tail == "keep":
            stop = min(stop, self._total(epoch))
        place, skipped = self._document_at(epoch, start)
        end, used = self._document_at(epoch, stop)
        documents = self.order.take(epoch, place, end + (used > 0))
        lengths = self._lengths[documents].astype(np.int64)
        lengths[len(lengths) - 1 :] = used or lengths[-1]
        window = plan_wrapped(
            lengths,
            self._packing,
            skipped=skipped,
            num_steps=last - first,
            batch_rows=self.batch_rows,
            group=self.group,
        )
        self._planned = (epoch, first, last), documents, window
        return documents, window

    def steps_of(self, epoch: int, example: int) -> list[int]:
        """Return the steps of an epoch that have an example, ascending."""
        num_steps, carried = self.num_steps(epoch), self._carried(epoch)
        tokens = [(-carried, -1)] if carried else []
        for place in self.order.places(epoch, example):
            start = int(self._sums(epoch)[place])
            tokens.append((start, start + int(self._lengths[example]) - 1))
        steps: set[int] = set()
        for ends in tokens:
            first, last = ((token + carried) // self._per_step for token in ends)
            if first < num_steps:
                windows = (self._window_of(epoch, min(k, num_steps - 1)) for k in (first, last))
                (begin, _), (_, stop) = windows
                steps |= set(range(begin, stop))
        return sorted(k for k in steps if (self.step(epoch, k).examples == example).any())

    def place(self, epoch: int, step: int) -> int:
        """Return the place of the order from which on a reshuffle may change it."""
        if not step:
            return 0
        stop = self._window_of(epoch, step - 1)[1] * self._per_step - self._carried(epoch)
        place, used = self._document_at(epoch, min(stop, self._total(epoch)))
        return place + (used > 0)

    def _window_of(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the first step of the window that has a step, and the one after its last."""
        first = step // self.window * self.window
        return first, min(first + self.window, self.num_steps(epoch))

    def _sums(self, epoch: int) -> Indices:
        """Return the tokens before each place of an epoch, and all: int64, 8 bytes per document."""
        kept = self._kept_sums  # one read: another thread may be at another epoch
        if epoch not in kept:
            order = self.order.take(epoch, 0, self.order.size(epoch))
            kept = {**dict(list(kept.items())[-2:]), epoch: running_sum(self._lengths[order])}
            self._kept_sums = kept
        return kept[epoch]

    def _total(self, epoch: int) -> int:
        if epoch not in self._totals:
            if self.order.is_permutation:
                total = int(self._lengths[: self.order.size(epoch)].sum())
            else:
                total = int(self._sums(epoch)[-1])
            self._totals[epoch] = total
        return self._totals[epoch]

    def _before(self, epoch: int) -> int:
        return sum(map(self._total, range(epoch)))

    def _carried(self, epoch: int) -> int:
        """Return the number of tokens of earlier epochs in the first step of an epoch."""
        return self._before(epoch) % self._per_step if self.tail == "wrap" else 0

    def _document_at(self, epoch: int, token: int) -> tuple[int, int]:
        """Return the place of the document that has a token, and its tokens before that one.

        Tokens below 0 are of the epochs before; those from the total on, of the next one.
        """
        if token < 0:
            place, used = self._document_at(epoch - 1, token + self._total(epoch - 1))
            return place - self.order.size(epoch - 1), used
        if token >= self._total(epoch):
            if self.tail != "wrap" or not self._total(epoch + 1):  # or all data have been read
                return self.order.size(epoch), 0
            place, used = self._document_at(epoch + 1, token - self._total(epoch))
            return place + self.order.size(epoch), used
        sums = self._sums(epoch)
        place = int(np.searchsorted(sums, token, side="right")) - 1
        return place, token - int(sums[place])
