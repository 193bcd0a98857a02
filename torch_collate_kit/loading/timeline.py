"""When each batch was collated, copied, waited for and trained on; and the plot of these times."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_collate_kit._checks import checked_int, plural
from torch_collate_kit.batch.showing.style import (
    COLORS,
    axes_for,
    boxed_number,
    legend_below,
    matplotlib_module,
    tint,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class StepTimes(NamedTuple):
    """The times of one batch, in seconds of ``time.perf_counter()``.

    A batch that was built ahead began before it was asked for; otherwise the consumer waited for
    all of it.

    >>> step = StepTimes(0, 3, 1.0, 1.5, 1.6, 1.4, 1.6, 2.0)
    >>> step.was_ahead, round(step.build_seconds, 1), round(step.wait_seconds, 1)
    (True, 0.6, 0.2)
    """

    epoch: int
    step: int
    collate_began: float
    """Time at which the DataLoader was asked for it: collation, or waiting for a worker."""
    collate_ended: float
    copy_ended: float
    """Time at which it had been sent to the device; without one, at which it was collated. On CUDA
    the copy itself may end later, without anybody waiting for it here."""
    wait_began: float
    """Time at which the consumer asked for it."""
    wait_ended: float
    train_ended: float | None
    """Time at which the consumer asked for the next one, or left its loop; None until then."""

    @property
    def build_seconds(self) -> float:
        """Seconds of collation and copy."""
        return self.copy_ended - self.collate_began

    @property
    def wait_seconds(self) -> float:
        """Seconds that the consumer waited for it."""
        return self.wait_ended - self.wait_began

    @property
    def was_ahead(self) -> bool:
        """Whether building began before the consumer asked for it."""
        return self.collate_began < self.wait_began


class Timeline:
    """The times of the last 1,000 steps. Written by the consumer's thread, read by any.

    A step is a list until somebody asks: making a StepTimes twice would cost more than all else.
    """

    def __init__(self) -> None:
        self._steps: deque[list[Any]] = deque(maxlen=1000)
        self._last: list[Any] | None = None  # that is being trained on

    def received(self, epoch: int, step: int, *times: float) -> None:
        """Record that the consumer received a batch; ``times`` are those of its StepTimes."""
        self._last = [epoch, step, *times, None]
        self._steps.append(self._last)

    def trained(self) -> None:
        """Record that the consumer is done with the batch received last."""
        if self._last is not None:
            self._last[-1] = time.perf_counter()
            self._last = None

    def steps(self) -> list[StepTimes]:
        """Return the steps, oldest first. No append interrupts the copy of a deque."""
        return [StepTimes._make(step) for step in self._steps.copy()]


_HEIGHT = 0.7  # of a bar
_SPANS: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    # the lane, when it began and ended, and its look
    "collated": (0, "collate_began", "collate_ended", {"facecolor": COLORS["blue"]}),
    "copied": (0, "collate_ended", "copy_ended", {"facecolor": COLORS["orange"], "hatch": "xx"}),
    "waited for": (1, "wait_began", "wait_ended", {"facecolor": "white", "hatch": "////"}),
    "trained on": (1, "wait_ended", "train_ended", {"facecolor": tint(COLORS["green"], 0.45)}),
}


def draw_timeline(steps: Sequence[StepTimes], num_steps: int, ax: Axes | None) -> Axes:
    """Draw the last ``num_steps`` steps. The numbers of steps are on both lanes, if they fit."""
    if not steps:
        raise ValueError("the timeline is empty (0 steps); read batches from the loader first")
    steps = steps[-checked_int("num_steps", num_steps) :]
    ax = axes_for(ax, 10.0, 3.0)
    origin = min(min(step.collate_began, step.wait_began) for step in steps)
    total = max(step.train_ended or step.wait_ended for step in steps) - origin
    patch = matplotlib_module("patches").Patch
    handles = []
    for name, (lane, began, ended, look) in _SPANS.items():
        times = [(getattr(step, began), getattr(step, ended)) for step in steps]
        spans = [(a - origin, b - a) for a, b in times if b is not None and b > a]
        if spans:
            look = {"label": name, "edgecolor": "black", **look}
            handles.append(patch(**look))
            ax.broken_barh(spans, (lane - _HEIGHT / 2, _HEIGHT), linewidth=0.6, **look)
    for step in steps:
        lanes = [(step.collate_began, step.copy_ended), (step.wait_ended, step.train_ended)]
        for lane, (begin, end) in enumerate(lanes):
            if end is not None and end - begin >= 0.02 * total:
                boxed_number(ax, (begin + end) / 2 - origin, lane, step.step)
    ax.set(
        yticks=(0, 1),
        yticklabels=("batch is built", "training loop"),
        xlim=(0, total or 1.0),
        ylim=(1.5, -0.5),
        xlabel=f"time (seconds); the last {plural(len(steps), 'step')}",
        title=_title(steps),
    )
    legend_below(ax, handles)
    return ax


def _title(steps: Sequence[StepTimes]) -> str:
    built = sum(step.build_seconds for step in steps)
    waited = sum(step.wait_seconds for step in steps)
    hidden = max(0.0, 1 - waited / built) if built else 0.0
    texts = [f"{s:.2f} s" if s >= 0.1 else f"{1000 * s:.1f} ms" for s in (waited, built)]
    return f"waited {texts[0]} for batches that took {texts[1]} to build: {hidden:.0%} hidden"
