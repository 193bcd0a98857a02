"""What was promised of a GPU, next to what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness import Report

__all__ = ["add_targets"]

Found = Mapping[str, Any]
# Real tokens per second of full fine-tuning, on an H200 alone.
_H200_RATES = {"0.6B": 80_000, "1.7B": 36_000, "4B": 16_000}
_MFU_FROM = ("1.7B", "4B")


def add_targets(report: Report, found: Mapping[str, Found], device: str) -> None:
    """Targets of all that was measured; what was not has none, nor has the speed of a tiny run."""
    checks = report.data["checks"]
    if checks["passed"] + checks["failed"]:
        report.target("checks of correctness that fail", checks["failed"], "<", 0)
    for name, result in found.items():
        by_name = {v["variant"]: v for v in result.get("variants", []) if not v.get("error")}
        _of_padding(report, result, by_name)
        _of_trainers(report, result, by_name)
        compiled = by_name.get("packed, torch_varlen, compiled")
        if compiled:
            what = f"{name}: graphs compiled after the warm-up"
            report.target(what, compiled["graphs_after_warm_up"], "<", 0)
    for size in _H200_RATES:
        _of_size(report, size, _best(found, size), device)


def _of_padding(report: Report, result: Found, by_name: Mapping[str, Found]) -> None:
    ours, padded = by_name.get("packed, torch_varlen"), by_name.get("padded, sdpa")
    if ours and padded:
        times = ours["tokens_per_second"] / padded["tokens_per_second"]
        what = f"{result['model']}: real tokens per second, packed over padded"
        report.target(what, times, "x", 2.5)


def _of_trainers(report: Report, result: Found, by_name: Mapping[str, Found]) -> None:
    ours = by_name.get("ours: packed, torch_varlen")
    others = [v for name, v in by_name.items() if name.startswith(("Trainer", "TRL"))]
    if not ours or not others:
        return
    for prefix, name in (("Trainer", "transformers.Trainer"), ("TRL", "TRL")):
        rates = [v["tokens_per_second"] for v in others if v["variant"].startswith(prefix)]
        if rates:
            what = f"{result['model']}: tokens per second, ours over the best of {name}"
            report.target(what, ours["tokens_per_second"] / max(rates), "x", 1, aim=1.15)
    for other in others:  # TRL has other examples in its steps
        if other["variant"].startswith("Trainer"):
            apart = abs(other["last_loss"] / ours["last_loss"] - 1)
            what = f"{result['model']}: last loss, {other['variant']}, apart from ours"
            report.target(what, 100 * apart, "<%", 1)


def _best(found: Mapping[str, Found], size: str) -> Found | None:
    """The fastest of our packed variants, of all cells with this model."""
    packed = [
        variant
        for result in found.values()
        if result.get("model") == size and "parameters" in result
        for variant in result["variants"]
        if not variant["error"] and variant["variant"].startswith("packed")
    ]
    return max(packed, key=lambda v: v["tokens_per_second"], default=None)


def _of_size(report: Report, size: str, best: Found | None, device: str) -> None:
    if best is None:
        return
    if "H200" in device:
        rate, limit = best["tokens_per_second"], _H200_RATES[size]
        report.target(f"{size}: real tokens per second ({best['variant']})", rate, "", limit)
    if best["mfu"] is not None and size in _MFU_FROM:
        report.target(f"{size}: MFU ({best['variant']})", 100 * best["mfu"], "%", 38)
    if best["wait_share"] is not None:
        what = f"{size}: share of the time spent waiting for data ({best['variant']})"
        report.target(what, 100 * best["wait_share"], "<%", 0.5)
