"""What packing a stream costs per example, by kind of source, and how full and even its steps are.

Claimed: with a buffer of 1,000 at least 98.0% of the cells hold tokens where lengths are spread
evenly, and 99.2% on real ones, with 4,000 99.0% and 99.3%; steps differ in cost by 1.5% at most.

    python benchmarks/bench_stream.py [--before CHECKOUT]

Real lengths, int32 ids, an int8 loss_mask, rows of 4,096 tokens, four a batch, a buffer of 1,000.
"offline" reads the rows of one plan of everything through ``TokenizedDataset.__getitems__`` and
collates them. "no batch" is a stream over a list without collating: reading and planning. With
``--before`` an earlier checkout reads the list, too, in a process of its own, in turn.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pyarrow as pa
import torch
from harness import Report, alternate, arguments, timed
from samples import real_mix

from torch_collate_kit import PackedCollator, PackedIterableDataset, TokenizedDataset, pack

_MAX_TOKENS, _ROWS = 4096, 4
_LOADING, _BEFORE = "torch_collate_kit.loading", "streaming.shard_batches"
_FULL = {("even", 1000): 0.980, ("even", 4000): 0.990, ("real", 1000): 0.992, ("real", 4000): 0.993}


def table_of(lengths: np.ndarray) -> pa.Table:
    rng = np.random.default_rng(0)
    num_tokens = int(lengths.sum())
    offsets = pa.array(np.append(0, np.cumsum(lengths)).astype(np.int32))
    columns = {
        "input_ids": rng.integers(0, 32_000, num_tokens).astype(np.int32),
        "loss_mask": (rng.random(num_tokens) < 0.5).astype(np.int8),
    }
    return pa.table(
        {k: pa.ListArray.from_arrays(offsets, pa.array(flat)) for k, flat in columns.items()}
    )


def stream_of(source: Any, buffer_size: int = 1000) -> PackedIterableDataset:
    collate = PackedCollator(0, max_tokens=_MAX_TOKENS)
    return PackedIterableDataset(source, collate, batch_rows=_ROWS, buffer_size=buffer_size)


def list_runs(lengths: np.ndarray) -> dict[str, Callable[[], object]]:
    """Runs over a list, also of an earlier checkout."""
    columns = TokenizedDataset(table_of(lengths))
    examples = [columns[i] for i in range(len(columns))]
    is_here = find_spec(f"{_LOADING}.stream_batches") is not None
    batches = import_module(f"{_LOADING}.{'stream_batches' if is_here else _BEFORE}")

    def read() -> int:
        return sum(1 for _ in stream_of(examples))

    def no_batch(*_: Any) -> dict[str, Any]:  # a mock would hold all examples
        return {}

    def planned() -> None:
        with mock.patch.object(batches.ShardBatches, "_collate", new=no_batch):
            read()

    return {"list of dicts of arrays": read, "list, no batch": planned}


def runs_over(lengths: np.ndarray) -> dict[str, Callable[[], object]]:
    table = table_of(lengths)
    columns, rows = TokenizedDataset(table), datasets.Dataset(datasets.table.InMemoryTable(table))
    collate = PackedCollator(0, max_tokens=_MAX_TOKENS)
    bins = [np.sort(row) for row in pack(lengths, _MAX_TOKENS).bins]

    def offline() -> None:
        for i in range(0, len(bins), _ROWS):
            collate(columns.__getitems__(np.concatenate(bins[i : i + _ROWS])))

    def read(source: Any) -> Callable[[], object]:
        return lambda: sum(1 for _ in stream_of(source))

    return {
        "offline": offline,
        **list_runs(lengths),
        "TokenizedDataset": read(columns),
        "datasets.Dataset": read(rows),
        "datasets.IterableDataset": read(rows.to_iterable_dataset(num_shards=4)),
    }


def steps_of(lengths: np.ndarray, buffer_size: int) -> tuple[float, float]:
    """Share of the cells that hold tokens, and the spread of the costs of whole steps."""
    ids = np.zeros(_MAX_TOKENS, dtype=np.int32)
    source = [{"input_ids": ids[:n]} for n in lengths.tolist()]
    costs, num_tokens, num_rows = [], 0, 0
    for batch in stream_of(source, buffer_size):
        segments = np.concatenate([np.asarray(row) for row in batch["sub_seq_lengths"]])
        num_tokens, num_rows = num_tokens + int(segments.sum()), num_rows + len(batch)
        if len(batch) == _ROWS:
            costs.append(float((segments.astype(np.float64) * (24576 + segments)).sum()))
    return num_tokens / (num_rows * _MAX_TOKENS), float(np.std(costs) / np.mean(costs))


def timed_lists(options: Any) -> str:
    """Return the CPU time of a round over a list, as another process prints it."""
    lengths, _ = real_mix(options.data, options.examples, longest=_MAX_TOKENS)
    found = []
    for run in list_runs(lengths).values():
        run()
        gc.collect()
        gc.freeze()  # a collection would walk through all examples, at another moment each time
        began = time.process_time()
        run()
        found.append(time.process_time() - began)
    return " ".join(map(str, found))


def against(report: Report, options: Any) -> None:
    """Time a list in this checkout and in an earlier one, in turn."""
    here = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, __file__, "--lists", "--examples", str(options.examples)]
    command += ["--data", str(options.data)]
    times: dict[str, list[list[float]]] = {"before": [], "now": []}
    for turn in range(options.rounds):
        for name in sorted(times, reverse=bool(turn % 2)):
            path = options.before if name == "before" else here
            env = os.environ | {"PYTHONPATH": str(Path(path).resolve())}
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            times[name].append([float(s) for s in done.stdout.split()])
    rows = []
    for number, name in enumerate(("list of dicts of arrays", "list, no batch")):
        before, now = (median(of[number] for of in times[key]) for key in ("before", "now"))
        each = 1e6 / options.examples
        rows.append([name, f"{before * each:.1f}", f"{now * each:.1f}", f"{now / before:.2f}"])
        if number:
            report.target("a list, reading and planning: now / before", now / before, "<x", 0.6)
    note = f"CPU us per example, medians of {options.rounds} rounds in turn."
    report.table("Against an earlier checkout", ["source", "before", "now", "ratio"], rows, note)


def main() -> None:
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--before", help="an earlier checkout to compare with")
    parser.add_argument("--lists", action="store_true", help="print the times of the lists alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.lists:
        print(timed_lists(options))
        return
    lengths, what = real_mix(options.data, options.examples, longest=_MAX_TOKENS)
    runs = {name: timed(run, time.process_time) for name, run in runs_over(lengths).items()}
    times = alternate(runs, rounds=options.rounds, warm_up=1)
    report = Report("stream", "Steps of a stream are full and cost the same.")
    report.times("pass", times)
    rows = [
        [name, *(f"{1e6 * s / len(lengths):.1f}" for s in (t.median, t.lower_quartile, t.least))]
        for name, t in times.items()
    ]
    passes = f"{options.rounds} passes over {len(lengths):,} lengths"
    note = f"CPU us per example, {passes} drawn from {what}."
    report.table("A pass", ["source", "median", "lower quartile", "minimum"], rows, note)
    even = np.random.default_rng(0).integers(1, _MAX_TOKENS + 1, options.examples)
    rows = []
    for (kind, buffer_size), limit in _FULL.items():
        full, spread = steps_of(even if kind == "even" else lengths, buffer_size)
        rows.append([kind, f"{buffer_size:,}", f"{full:.2%}", f"{spread:.4f}"])
        name = f"{kind} lengths, a buffer of {buffer_size:,}"
        report.target(f"cells with tokens, {name}", full, "", limit)
        report.target(f"spread of the costs of steps, {name}", spread, "<", 0.015)
    note = "Shares of all cells; standard deviation of the costs of whole steps over their mean."
    report.table("Steps", ["lengths", "buffer", "full", "spread"], rows, note)
    if options.before is not None:
        against(report, options)
    report.write(options.out)


if __name__ == "__main__":
    main()
