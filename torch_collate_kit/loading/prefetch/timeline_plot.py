"""The plot of ``PrefetchLoader.plot_timeline``: what prefetching hid behind training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch_collate_kit._checks import checked_int
from torch_collate_kit._reprs import plural
from torch_collate_kit.batch.showing.style import (
    COLORS,
    axes_for,
    boxed_number,
    legend_below,
    matplotlib_module,
    tint,
)
from torch_collate_kit.loading.prefetch.step_times import StepTimes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_timeline"]

_LANES = ("batch is built", "training loop")
_HEIGHT = 0.7
_SPANS: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    # the lane, when it began and ended, and its look
    "collated": (0, "collate_began", "collate_ended", {"facecolor": COLORS["blue"]}),
    "copied": (0, "collate_ended", "copy_ended", {"facecolor": COLORS["orange"], "hatch": "xx"}),
    "waited for": (1, "wait_began", "wait_ended", {"facecolor": "white", "hatch": "////"}),
    "trained on": (1, "wait_ended", "train_ended", {"facecolor": tint(COLORS["green"], 0.45)}),
}


def draw_timeline(steps: Sequence[StepTimes], num_steps: int, ax: Axes | None) -> Axes:
    """Draw the last ``num_steps`` steps."""
    if not steps:
        raise ValueError("the timeline is empty (0 steps); read batches from the loader first")
    steps = steps[-checked_int("num_steps", num_steps) :]
    ax = axes_for(ax, 10.0, 3.0)
    origin = min(min(step.collate_began, step.wait_began) for step in steps)
    patch = matplotlib_module("patches").Patch
    handles = []
    for name, (lane, began, ended, look) in _SPANS.items():
        times = [(getattr(step, began), getattr(step, ended)) for step in steps]
        spans = [(a - origin, b - a) for a, b in times if b is not None and b > a]
        if not spans:
            continue
        look = {"label": name, "edgecolor": "black", **look}
        handles.append(patch(**look))
        ax.broken_barh(spans, (lane - _HEIGHT / 2, _HEIGHT), linewidth=0.6, **look)
    _number(ax, steps, origin)
    ax.set(
        yticks=range(len(_LANES)),
        yticklabels=_LANES,
        ylim=(len(_LANES) - 0.5, -0.5),
        xlabel=f"time (seconds); the last {plural(len(steps), 'step')}",
        title=_title(steps),
    )
    legend_below(ax, handles)
    return ax


def _number(ax: Any, steps: Sequence[StepTimes], origin: float) -> None:
    """Draw the step's number on both lanes, where there is room."""
    total = max(step.train_ended or step.wait_ended for step in steps) - origin
    ax.set_xlim(0, total or 1.0)
    for step in steps:
        lanes = [(step.collate_began, step.copy_ended), (step.wait_ended, step.train_ended)]
        for lane, (begin, end) in enumerate(lanes):
            if end is not None and end - begin >= 0.02 * total:
                boxed_number(ax, (begin + end) / 2 - origin, lane, step.step)


def _title(steps: Sequence[StepTimes]) -> str:
    built = sum(step.build_seconds for step in steps)
    waited = sum(step.wait_seconds for step in steps)
    hidden = max(0.0, 1 - waited / built) if built else 0.0
    texts = [f"{s:.2f} s" if s >= 0.1 else f"{1000 * s:.1f} ms" for s in (waited, built)]
    return f"waited {texts[0]} for batches that took {texts[1]} to build: {hidden:.0%} hidden"
