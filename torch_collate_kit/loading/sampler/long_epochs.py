"""Epochs that are too long to count before ``len()`` returns: a thread counts their steps."""

from __future__ import annotations

import logging
import weakref
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch_collate_kit.loading.sampler.by_rows import ByRows

MOST_COUNTED_AT_ONCE = 10_000_000
"""Examples of an epoch by rows up to which ``len()`` counts the steps itself: 3 s for so many."""

_logger = logging.getLogger("torch_collate_kit.loading")


class _Count(NamedTuple):
    estimate: int
    thread: Thread


_running: weakref.WeakKeyDictionary[ByRows, dict[int, _Count]] = weakref.WeakKeyDictionary()
"""Counts by epoch; a copy of a budget has none, so samplers can be pickled meanwhile."""


def estimated(budget: ByRows, epoch: int) -> int:
    """Return about the number of steps of an epoch; a thread counts them from the first call on."""
    counts = _running.setdefault(budget, {})
    if epoch not in counts:
        estimate = budget.apart().estimate(epoch)
        if not counts:
            _logger.warning(
                "epoch %d has about %d steps: its %d examples are counted beside training, and "
                "until then len() is an estimate; count_steps() waits for the exact number",
                *(epoch, estimate, budget.order.size(epoch)),
            )
        arguments = weakref.ref(budget), budget.apart(), epoch
        counts[epoch] = _Count(estimate, Thread(target=_count, args=arguments, daemon=True))
        counts[epoch].thread.start()
    return counts[epoch].estimate


def wait(budget: ByRows, epoch: int) -> None:
    """Wait for the thread that counts an epoch, if there is one."""
    if epoch in (counts := _running.get(budget, {})):
        counts[epoch].thread.join()


def _count(reference: weakref.ref[ByRows], own: ByRows, epoch: int) -> None:
    """Find all windows of an epoch in an own copy, as long as somebody has the budget."""
    for _ in own.windows(epoch):
        if reference() is None:
            return
    if (budget := reference()) is not None:
        budget.learn(own, epoch)
