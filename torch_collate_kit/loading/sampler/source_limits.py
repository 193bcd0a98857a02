"""Log lines about sources of a mixture that have been read ``max_passes`` times."""

from __future__ import annotations

import logging

from torch_collate_kit.loading.orders.checks import MAX_COUNT
from torch_collate_kit.loading.orders.mixed_order import MixedOrder
from torch_collate_kit.loading.sampler.budgets import Budget

_logger = logging.getLogger("torch_collate_kit.loading")


class SourceLimits:
    """Logs every source once in an epoch, at the step from which on its weight is the others'."""

    def __init__(self, budget: Budget, epoch: int) -> None:
        self._budget, self._epoch = budget, epoch
        self._logged: set[int] = set()
        self._place = 0  # of the order, before which no other source can end

    def log(self, step: int) -> None:
        """Log the sources that end in a step, by rows in its window."""
        order, epoch = self._budget.order, self._epoch
        if not isinstance(order, MixedOrder) or not any(order.mixture.max_passes):
            return
        place = min(self._budget.place(epoch, step + 1), order.size(epoch))
        if place < self._place:
            return
        left = {k: n for k, n in order.left(epoch, place).items() if k not in self._logged}
        for source in [source for source, number in left.items() if not number]:
            self._logged.add(source)
            del left[source]
            _logger.warning(
                "epoch %d, step %d: source %r has been read max_passes=%s times; from here on its "
                "weight goes to the others",
                *(epoch, step, order.mixture.names[source], order.mixture.max_passes[source]),
            )
        self._place = place + min(left.values(), default=MAX_COUNT)
