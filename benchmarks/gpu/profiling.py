"""Where the time of a packed step goes: the longest kernels, and how long none runs."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gpu.speed import VARIANTS, about, prepared
from gpu.training import Runner
from gpu.where import Where

__all__ = ["idle_share", "profiled"]

_TOP = 15


def profiled(
    where: Where, *, size: str, variant: str, max_tokens: int = 8192, steps: int = 2
) -> dict[str, Any]:
    """Top kernels by time, and the share of the steps in which the device did nothing."""
    mix, model, optimizer, setting, too_large = prepared(where, size, max_tokens)
    runner = Runner(VARIANTS[variant], model, optimizer, setting, mix, where)
    runner.warm_up(3)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * where.is_cuda
    with profile(activities=activities) as recorded:
        runner.warm_up(steps)
        where.wait()
    runner.close()
    kind = DeviceType.CUDA if where.is_cuda else DeviceType.CPU
    events = [e for e in recorded.events() if e.device_type == kind and not _is_range(e)]
    if not events:
        raise RuntimeError(f"the profiler recorded nothing on {kind}")
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in events:
        totals[event.name][0] += event.time_range.end - event.time_range.start
        totals[event.name][1] += 1
    busy = sum(seconds for seconds, _ in totals.values())
    top = sorted(totals.items(), key=lambda item: -item[1][0])[:_TOP]
    return {
        **about(size, mix, setting, too_large),
        "variant": variant,
        "steps": steps,
        "kernels": len(events) // steps,
        "idle_share": idle_share(spans),
        "top": [
            {"name": name, "share": took / busy, "calls": calls / steps}
            for name, (took, calls) in top
        ],
    }


def _is_range(event: Any) -> bool:
    """A named range of many kernels, such as the optimizer's step, and not one of them."""
    named = ("Optimizer.", "## ", "Torch-Compiled Region", "ProfilerStep")
    return getattr(event, "is_user_annotation", False) or event.name.startswith(named)


def idle_share(spans: list[tuple[float, float]]) -> float:
    """Of the time from the first begin to the last end, what no span covers.

    >>> idle_share([(0, 4), (2, 5), (7, 8)])
    0.25
    """
    covered, last = 0.0, min(begin for begin, _ in spans)
    first = last
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, last))
        last = max(last, end)
    return 1 - covered / (last - first)
