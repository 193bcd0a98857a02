"""How fast the packing plan is, against other packers, and how it grows.

Claimed: a plan of 300,000 lengths at least 50 times faster than TRL's best fit and 3 times faster
than axolotl's numba first fit, with no more rows; 10,000,000 lengths on one core in less than
4 seconds and 1 GB.

    python benchmarks/bench_packing.py

Lengths in, rows out, no tokens; one thread. TRL plans by packing a table, so it is given tokens of
one byte, and moves those too. Each plan of ours is checked: every example
once, no row over the limit. Memory is the peak of a process of its own, over what it held with the
package imported, so the lengths themselves (8 bytes each) are counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch
from harness import Report, Times, alternate, arguments, timed
from row_by_row import best_fit, first_fit
from samples import long_tail, real_mix

from torch_collate_kit import ParallelLayout, pack
from torch_collate_kit.packing import PackingPlan

NOT_INSTALLED = "not installed"


def check(plan: PackingPlan, lengths: np.ndarray) -> None:
    """Raises unless every example is in one row, and no row is over the limit."""
    if not np.array_equal(np.sort(plan.example_indices), np.arange(len(lengths))):
        raise AssertionError("the plan is not a partition of the examples")
    if plan.row_tokens.max() > plan.max_tokens:
        raise AssertionError(f"a row has {plan.row_tokens.max()} tokens")


def packers(count: int) -> dict[str, Callable[[np.ndarray, int], int] | None]:
    """Name -> function of lengths and row size that returns the number of rows."""

    def ours(strategy: str, **options: Any) -> Callable[[np.ndarray, int], int]:
        return lambda lengths, n: pack(lengths, n, strategy=strategy, **options).num_rows

    found: dict[str, Callable[[np.ndarray, int], int] | None] = {
        "pack, best fit": ours("best_fit_decreasing"),
        "pack, best fit, 8 ranks": ours("best_fit_decreasing", parallel=ParallelLayout(dp=8)),
        "pack, first fit": ours("first_fit_decreasing"),
        "TRL best fit": peers.trl_packer(),
        **(peers.axolotl_packers() or {"axolotl first fit": None}),
        "plain Python best fit (bisect)": lambda x, n: len(best_fit(x.tolist(), n)),
    }
    if count <= 10_000:  # rows times examples steps of Python
        found["plain Python first fit"] = lambda x, n: len(first_fit(x.tolist(), n))
        found["SkyRL 0.3.0 first fit"] = peers.skyrl_packer()
    return found


def compare(
    report: Report, folder: Path, count: int, rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Every packer on the same lengths: at the least how many times faster ours is; seconds."""
    least: dict[str, float] = {}
    most: dict[str, float] = {}
    mixes = (
        ("real mix", *real_mix(folder, count, longest=8192), 8192),
        ("long tail", *long_tail(count, longest=16384), 16384),
    )
    for mix, lengths, what, max_tokens in mixes:
        check(pack(lengths, max_tokens), lengths)
        found = packers(count)
        runs = {k: partial(f, lengths, max_tokens) for k, f in found.items() if f is not None}
        num_rows = {name: run() for name, run in runs.items()}
        times = alternate(
            {name: timed(run) for name, run in runs.items()}, rounds=rounds, warm_up=1
        )
        report.times(f"{count} lengths, {mix}", times)
        ours = times["pack, best fit"].median
        tokens = int(lengths.sum())
        rows = []
        for name in found:
            if name not in times:
                rows.append([name, NOT_INSTALLED, "-", "-", "-", "-", "-"])
                continue
            factor = times[name].median / ours
            least[name] = min(factor, least.get(name, factor))
            most[name] = max(times[name].median, most.get(name, 0))
            fill = tokens / (num_rows[name] * max_tokens)
            rows.append(
                [name, *times[name].cells(), f"{factor:.1f}x", f"{num_rows[name]:,}", f"{fill:.2%}"]
            )
        note = (
            f"ms; {what}, cut at {max_tokens} = the row; {tokens:,} tokens; medians of {rounds} "
            "rounds."
        )
        header = ["packer", "median", "quartiles", "minimum", "time / ours", "rows", "filled"]
        report.table(f"{count:,} lengths, {mix}", header, rows, note)
    return least, most


def plan_alone(folder: Path, count: int) -> None:
    """In a process of its own, on one core: print seconds and bytes as JSON."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    before = _peak_bytes()
    lengths, _ = real_mix(folder, count, longest=8192)
    began = time.perf_counter()
    plan = pack(lengths, 8192)
    seconds = time.perf_counter() - began
    peak = _peak_bytes()
    print(json.dumps({"seconds": seconds, "bytes": peak - before, "process": peak}))
    assert plan.num_rows


def _peak_bytes() -> int:
    """The largest this process has been."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024


def growth(report: Report, folder: Path, rounds: int) -> None:
    """Time and memory from a thousand lengths to ten million."""
    rows = []
    for count in (1_000, 10_000, 100_000, 1_000_000, 10_000_000):
        command = [sys.executable, __file__, "--plan", str(count), "--data", str(folder)]
        runs = [
            json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            for _ in range(min(rounds, 3))
        ]
        seconds = Times.of([run["seconds"] for run in runs])
        gigabytes = max(run["bytes"] for run in runs) / 1e9
        process = max(run["process"] for run in runs) / 1e9
        report.data[f"growth, {count}"] = {"runs": runs}
        ns = f"{1e9 * seconds.median / count:.0f}"
        rows.append([f"{count:,}", *seconds.cells(), ns, f"{gigabytes:.2f}", f"{process:.2f}"])
    report.target("10,000,000 lengths on one core", seconds.median, "< s", 4)
    report.target("10,000,000 lengths, memory", gigabytes, "< GB", 1)
    header = ["lengths", "median", "quartiles", "minimum", "ns per length", "GB", "GB, process"]
    note = "ms, first plan of a new process on one core, best fit, the real mix."
    report.table("Growth", header, rows, note)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--plan", type=int, help="only plan so many lengths, print what it took")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.plan:
        return plan_alone(options.data, options.plan)
    claim = (
        "A packing plan of 300,000 lengths at least 50 times faster than TRL's best fit and 3 "
        "times faster than axolotl's numba first fit, in no more rows; 10,000,000 lengths on one "
        "core in less than 4 s and 1 GB."
    )
    report = Report("packing", claim)
    least, _ = compare(report, options.data, 300_000, options.rounds)
    for name, limit, aim in (("TRL", 50, 100), ("axolotl", 3, 5)):
        for packer, factor in least.items():
            if packer.startswith(name):
                report.target(f"300,000 lengths, against {packer}", factor, "x", limit, aim=aim)
    compare(report, options.data, 10_000, options.rounds)
    _, seconds = compare(report, options.data, 1_024, 5 * options.rounds)
    ms = 1e3 * seconds["pack, best fit, 8 ranks"]
    report.target("1,024 lengths for 8 ranks", ms, "< ms", 0.5)
    growth(report, options.data, options.rounds)
    report.write(options.out)


if __name__ == "__main__":
    main()
