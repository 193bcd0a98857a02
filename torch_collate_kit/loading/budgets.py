"""Where a step ends: the steps of an order, by examples, or by tokens of documents joined."""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from torch_collate_kit._checks import checked_choice
from torch_collate_kit.loading.checks import MAX_COUNT, Indices, Tail
from torch_collate_kit.loading.mixed_order import AnyOrder, MixedOrder
from torch_collate_kit.loading.orders import Recent
from torch_collate_kit.packing import PackingOptions, PackingPlan
from torch_collate_kit.packing.rows import running_sum
from torch_collate_kit.packing.steps import WindowPlan, plan_wrapped

if TYPE_CHECKING:
    from typing_extensions import Self

_logger = logging.getLogger("torch_collate_kit.loading")


class Step(NamedTuple):
    """The examples of one step over all ranks, and their rows if these are planned already."""

    examples: Indices
    plan: PackingPlan | None = None


class Budget(ABC):
    """The steps of the epochs of an order. ``settings`` are those that a resumed run must share."""

    def __init__(self, order: AnyOrder, tail: Tail, settings: dict[str, Any]) -> None:
        self.order, self.tail, self.settings = order, tail, settings
        checked_choice("tail", tail, get_args(Tail))
        self._forget()

    def over(self, order: AnyOrder) -> Self:
        """Return the budget for another order."""
        other = copy.copy(self)
        other.order = order
        other._forget()
        return other

    def _forget(self) -> None:  # noqa: B027 - a budget may keep nothing
        """Drop what is kept of the order."""

    def adopt(self, state: Mapping[str, Any]) -> Self:
        """Return the budget with the settings that a state may decide."""
        return self

    @abstractmethod
    def num_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch."""

    @abstractmethod
    def step(self, epoch: int, step: int) -> Step | None:
        """Return a step; None if the epoch does not have it."""

    @abstractmethod
    def steps_of(self, epoch: int, example: int) -> list[int]:
        """Return the steps of an epoch that have an example, ascending."""

    @abstractmethod
    def place(self, epoch: int, step: int) -> int:
        """Return the first position that a reshuffle before this step may change."""

    def has_step(self, epoch: int, step: int) -> bool:
        """Return whether an epoch has a step of this number."""
        return step < self.num_steps(epoch)

    def check(self, epoch: int, step: int) -> None:
        """Raise ValueError if an epoch cannot be read from a step on; its length is 0 or more."""
        if not self.has_step(epoch, step) and self.tail == "drop":
            has, most = self._less_than_a_step(epoch)
            raise ValueError(
                f"epoch {epoch} {has} {most}, and tail='drop' leaves no step; lower "
                f"{most.partition('=')[0]}, or use tail='keep' or 'wrap'"
            )

    @abstractmethod
    def _less_than_a_step(self, epoch: int) -> tuple[str, str]:
        """Return what an epoch without a step has, and the option that asks for more."""

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """Return what a state of this position holds besides it."""
        return {}

    def load(self, state: Mapping[str, Any], epoch: int, step: int) -> None:
        """Restore what ``state`` returned into a new budget."""
        return


class RowBudget(Budget):
    """Steps of ``batch_rows`` rows, of which ``window`` steps are planned together.

    Rows come in groups that cost alike, for ranks to compute at the same time.
    """

    def __init__(
        self, order: AnyOrder, tail: Tail, packing: PackingOptions, *, batch_rows: int, window: int
    ) -> None:
        self.batch_rows, self.window, self.group = batch_rows, window, packing.row_multiple
        self._packing = packing
        packed = packing.as_state()
        del packed["dp"]
        super().__init__(
            order,
            tail,
            {
                "batch_rows": batch_rows,
                "window": window,
                **packed,
                "rows_multiple_of": self.group,
                "reserved": packing.reserved,
            },
        )

    def adopt(self, state: Mapping[str, Any]) -> Self:
        """Return the budget with the group of rows of the first start, unless it is given here."""
        group = state.get("rows_multiple_of")
        is_own = self._packing.rows_multiple_of is not None
        if is_own or type(group) is not int or group < 1 or self.batch_rows % group:
            return self
        other = copy.copy(self)
        other.group, other.settings = group, {**self.settings, "rows_multiple_of": group}
        return other

    def _less_than_a_step(self, epoch: int) -> tuple[str, str]:
        return "fills fewer than", f"batch_rows={self.batch_rows} rows"


class ByExamples(Budget):
    """Steps of ``batch_size`` examples; a kept tail has at least ``least``, or an epoch is refused.

    ``tail`` is that of ``PrefetchingSampler``.
    """

    def __init__(self, order: AnyOrder, tail: Tail, batch_size: int, least: int) -> None:
        super().__init__(order, tail, {"batch_size": batch_size})
        self._size, self._least = batch_size, least

    def num_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch."""
        size = self._size
        if self.tail == "wrap":
            return self.order.before(epoch + 1) // size - self.order.before(epoch) // size
        full, rest = divmod(self.order.size(epoch), size)
        if self.tail == "drop":
            return full
        return full + (rest > 0)

    def check(self, epoch: int, step: int) -> None:
        """Raise ValueError also for a kept tail of fewer than ``least``."""
        super().check(epoch, step)
        rest = self.order.size(epoch) % self._size
        if self.tail == "keep" and 0 < rest < self._least:
            raise ValueError(
                f"epoch {epoch} ends with a batch of {rest} examples, fewer than "
                f"dp_size={self._least}: a rank would have none; use tail='drop' or "
                "'wrap', or another batch_size"
            )

    def _less_than_a_step(self, epoch: int) -> tuple[str, str]:
        return f"has {self.order.size(epoch)} examples, fewer than", f"batch_size={self._size}"

    def step(self, epoch: int, step: int) -> Step | None:
        """Return a step; None if the epoch does not have it."""
        if step >= self.num_steps(epoch):
            return None
        start = step * self._size - self._carried(epoch)
        stop = start + self._size
        if self.tail == "keep":
            stop = min(stop, self.order.size(epoch))
        return Step(self.order.take(epoch, start, stop))

    def steps_of(self, epoch: int, example: int) -> list[int]:
        """Return the steps of an epoch that have an example, ascending."""
        carried, num_steps = self._carried(epoch), self.num_steps(epoch)
        found = {(p + carried) // self._size for p in self.order.places(epoch, example)}
        if carried and (self.order.take(epoch, -carried, 0) == example).any():
            found.add(0)
        return sorted(step for step in found if step < num_steps)

    def place(self, epoch: int, step: int) -> int:
        """Return the place of the order from which on a reshuffle may change it."""
        return max(step * self._size - self._carried(epoch), 0)

    def _carried(self, epoch: int) -> int:
        """Return the number of examples of earlier epochs in the first batch of an epoch."""
        return self.order.before(epoch) % self._size if self.tail == "wrap" else 0


class ByTokens(RowBudget):
    """Steps of ``batch_rows`` rows of ``max_tokens`` tokens each, which documents are cut into.

    Step k of an epoch has its tokens from ``k * batch_rows * max_tokens`` on; the rows of a window
    of steps are dealt so that steps cost alike.
    """

    def __init__(
        self, order: AnyOrder, tail: Tail, packing: PackingOptions, *, lengths: Indices, **rows: int
    ) -> None:
        self._lengths = lengths
        super().__init__(order, tail, packing, **rows)
        self._per_step = self.batch_rows * packing.capacity

    def _forget(self) -> None:
        self._sums_of = Recent[int, Indices](3)
        self._totals: dict[int, int] = {}  # tokens of each epoch
        self._plans = Recent[tuple[int, int, int], tuple[Indices, WindowPlan]](1)

    def num_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch."""
        if self.tail == "wrap":
            return self._before(epoch + 1) // self._per_step - self._before(epoch) // self._per_step
        tokens = self._total(epoch)
        return tokens // self._per_step if self.tail == "drop" else -(-tokens // self._per_step)

    def step(self, epoch: int, step: int) -> Step | None:
        """Return a step; None if the epoch does not have it."""
        if step >= self.num_steps(epoch):
            return None
        first, last = self._window_of(epoch, step)
        make = partial(self._plan, epoch, first, last)
        documents, window = self._plans.get((epoch, first, last), make)
        chosen, plan = window.step(step - first, self._packing)
        return Step(documents[chosen], plan)

    def _plan(self, epoch: int, first: int, last: int) -> tuple[Indices, WindowPlan]:
        """Return the documents of a window of steps, and its rows."""
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
        found = ((k, self.step(epoch, k)) for k in steps)
        return sorted(k for k, step in found if step and (step.examples == example).any())

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
        return self._sums_of.get(epoch, partial(self._sums_in, epoch))

    def _sums_in(self, epoch: int) -> Indices:
        return running_sum(self._lengths[self.order.take(epoch, 0, self.order.size(epoch))])

    def _total(self, epoch: int) -> int:
        if epoch not in self._totals:
            if self.order.is_permutation:
                total = int(self._lengths[: self.order.size(epoch)].sum())
            else:
                total = int(self._sums(epoch)[-1])
            self._totals[epoch] = total
        return self._totals[epoch]

    def _before(self, epoch: int) -> int:
        if self.order.is_permutation:
            return epoch * self._total(0)
        return sum(map(self._total, range(epoch)))

    def _carried(self, epoch: int) -> int:
        """Return the number of tokens of earlier epochs in the first step of an epoch."""
        return self._before(epoch) % self._per_step if self.tail == "wrap" else 0

    def _document_at(self, epoch: int, token: int) -> tuple[int, int]:
        """Return the place of the document that has a token, and its tokens before that one.

        Tokens below 0 are of the epochs before; those from the total on, of the next one.
        """
        before = 0  # places of the epochs between
        while token < 0:
            epoch -= 1
            token, before = token + self._total(epoch), before - self.order.size(epoch)
        while token >= self._total(epoch):
            if self.tail != "wrap" or not self._total(epoch + 1):  # or all data have been read
                return before + self.order.size(epoch), 0
            token, before = token - self._total(epoch), before + self.order.size(epoch)
            epoch += 1
        sums = self._sums(epoch)
        place = int(np.searchsorted(sums, token, side="right")) - 1
        return before + place, token - int(sums[place])


class SourceLimits:
    """Logs each source of a mixture once in an epoch, at the step where its ``max_passes`` end."""

    def __init__(self, budget: Budget, epoch: int) -> None:
        self._budget, self._epoch = budget, epoch
        self._logged: set[int] = set()
        self._place = 0  # of the order, before which no other source can end

    def log(self, step: int) -> None:
        """Log the sources that end in a step, by rows in its window."""
        order, epoch = self._budget.order, self._epoch
        assert isinstance(order, MixedOrder)
        place = min(self._budget.place(epoch, step + 1), order.size(epoch))
        if place < self._place:
            return
        remaining = order.remaining(epoch, place)
        for source in [source for source, number in remaining.items() if not number]:
            del remaining[source]
            if source in self._logged:
                continue
            self._logged.add(source)
            _logger.warning(
                "epoch %d, step %d: source %r has been read max_passes=%s times; from here on its "
                "weight goes to the others",
                *(epoch, step, order.mixture.names[source], order.mixture.max_passes[source]),
            )
        self._place = place + min(remaining.values(), default=MAX_COUNT)
