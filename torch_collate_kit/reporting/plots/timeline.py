"""``plot_timeline``: what prefetching hid behind training."""

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
from torch_collate_kit.loading import PrefetchLoader, StepTimes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_timeline"]

_LANES = ("batch is built", "training loop")
_HEIGHT = 0.7
_SPANS: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    # the lane, when it began and ended, and its look
    "collated": (0, "collate_began", "collate_ended", {"facecolor": COLORS["blue"]}),
    "copied": (0, "collate_ended", "copy_ended", {"facecolor": COLORS["orange"], "hatch": "xx"}),
    "waited for": (1, "wait_began", "wait_ended", {"facecolor": "white", "hatch": "////"}),
    "trained on": (1, "wait_ended", "train_ended", {"facecolor": tint(COLORS["green"], 0.45)}),
}


def plot_timeline(
    loader: PrefetchLoader | Sequence[StepTimes], *, num_steps: int = 30, ax: Axes | None = None
) -> Axes:
    """Draw when the last batches were collated, copied, waited for and trained on.

    The title says how much of building them was hidden: the time that it took, less the time that
    the training loop waited for it. The first batch of an epoch is never built ahead.

    Args:
        loader: a PrefetchLoader that was read, or its ``timeline``.
        num_steps: the last steps that are drawn.
        ax: axes to draw on; by default those of a new figure.

    Returns:
        The axes. Nothing is shown: call ``plt.show()``, or ``ax.figure.savefig("timeline.png")``.

    Raises:
        TypeError: neither a PrefetchLoader nor a list of StepTimes.
        ValueError: no steps.
        ImportError: matplotlib is not installed.

    >>> step = StepTimes(0, 0, 1.0, 1.5, 1.6, 1.4, 1.6, 2.0)
    >>> plot_timeline([step]).get_title()
    'waited 0.20 s for batches that took 0.60 s to build: 67% hidden'
    """
    steps = loader.timeline if isinstance(loader, PrefetchLoader) else loader
    if not isinstance(steps, Sequence) or not all(isinstance(s, StepTimes) for s in steps):
        raise TypeError(
            f"plot_timeline draws a PrefetchLoader, got {type(loader).__name__}; pass the loader "
            "after some steps, or its timeline"
        )
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
    """The step's number on both lanes, where there is room."""
    total = max(step.train_ended or step.wait_ended for step in steps) - origin
    ax.set_xlim(0, total or 1.0)
    for step in steps:
        lanes = [(step.collate_began, step.copy_ended), (step.wait_ended, step.train_ended)]
        for lane, (begin, end) in enumerate(lanes):
            if end is None or end - begin < 0.02 * total:
                continue
            boxed_number(ax, (begin + end) / 2 - origin, lane, step.step)


def _title(steps: Sequence[StepTimes]) -> str:
    built = sum(step.build_seconds for step in steps)
    waited = sum(step.wait_seconds for step in steps)
    hidden = max(0.0, 1 - waited / built) if built else 0.0
    return (
        f"waited {_seconds(waited)} for batches that took {_seconds(built)} to build: "
        f"{hidden:.0%} hidden"
    )


def _seconds(number: float) -> str:
    return f"{number:.2f} s" if number >= 0.1 else f"{1000 * number:.1f} ms"
