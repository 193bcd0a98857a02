"""What many ranks and many examples cost: planning a step, reading a dataset, resuming an order.

Claimed: a plan over 512 ranks takes less than 200 ms; the memory of a memory-mapped dataset does
not grow with its examples; a state is less than 1 kB, whatever the number of examples.

    python benchmarks/bench_scale.py
    python benchmarks/bench_scale.py --examples 1000000   # 100000000 takes half a minute

Every rank plans the step of all ranks. "resume" is a new sampler that loads a state in the middle
of an epoch, up to its first batch. Time is CPU time, which other work on the machine moves less.
Memory is what a new process has more than before: RssAnon.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from harness import Report, Times, arguments
from samples import real_mix

from torch_collate_kit import (
    PackedBatchSampler,
    PackedCollator,
    ParallelLayout,
    PrefetchingSampler,
    TokenizedDataset,
)

_MAX_TOKENS, _ROWS_PER_RANK = 8192, 4
_NUM_EXAMPLES = [1_000_000, 10_000_000, 100_000_000]


def memory() -> int:
    """Bytes of this process that no file stands for."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def plan_steps(report: Report, lengths: np.ndarray, what: str, rounds: int) -> None:
    rows = []
    for ranks in (8, 64, 512):
        batch_size = int(0.95 * ranks * _ROWS_PER_RANK * _MAX_TOKENS / lengths.mean())
        sampler = PackedBatchSampler(
            lengths,
            PackedCollator(
                0,
                max_tokens=_MAX_TOKENS,
                parallel=ParallelLayout(dp=ranks),
                normalize_loss=False,
            ),
            batch_size=batch_size,
            tail="wrap",
        )
        steps = iter(sampler)
        next(steps)  # makes the order of the epoch
        seconds = []
        for _ in range(rounds):
            began = time.process_time()
            plan = next(steps).plan
            seconds.append(time.process_time() - began)
        times = Times.of(seconds)
        cost, tokens = plan.cost_per_rank, plan.tokens_per_rank
        uneven = [f"{100 * (x.max() / x.mean() - 1):.2f}%" for x in (cost, tokens)]
        counts = [f"{n:,}" for n in (ranks, batch_size, plan.num_rows)]
        rows.append([*counts, *times.cells(), f"{plan.efficiency:.1%}", *uneven])
        if ranks == 512:
            report.target("a step of 512 ranks", 1e3 * times.median, "< ms", 200)
    header = ["ranks", "examples", "rows", "median", "quartiles", "minimum", "filled"]
    note = (
        f"CPU ms per step on every rank, {rounds} steps; rows of {_MAX_TOKENS} tokens, about "
        f"{_ROWS_PER_RANK} per rank; {what}. The last columns: how much more than the mean the "
        "busiest rank has."
    )
    report.table("Planning a step", [*header, "cost", "tokens"], rows, note)


def in_new_process(function: Callable[[Any], dict[str, Any]], argument: Any) -> dict[str, Any]:
    """What a function of this file returns in a process that has done nothing else."""
    code = (
        f"import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import bench_scale\n"
        f"print(json.dumps(bench_scale.{function.__name__}({argument!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def reading(path: str) -> dict[str, Any]:
    """Seconds to open a memory-mapped dataset, its memory after random reads, bytes of a pickle."""
    TokenizedDataset(pa.table({"input_ids": [[1]]}))  # imports what reading needs
    before, began = memory(), time.process_time()
    dataset = TokenizedDataset(path)
    seconds = time.process_time() - began
    rng = np.random.default_rng(0)
    for _ in range(100):
        dataset.__getitems__(rng.integers(0, len(dataset), 256).tolist())
    return {
        "seconds": seconds,
        "memory": memory() - before,
        "pickled": len(pickle.dumps(dataset)),
    }


def resuming(num_examples: int) -> dict[str, Any]:
    """Bytes of a state, and seconds from it to the first batch of a new sampler."""
    before = memory()
    saved = PrefetchingSampler(num_examples, batch_size=1024)
    state = saved.state_at(3, len(saved) // 2)
    began = time.process_time()
    sampler = PrefetchingSampler(num_examples, batch_size=1024)
    sampler.load_state_dict(state)
    loaded = time.process_time() - began
    steps = iter(sampler)
    next(steps)
    return {
        "state": len(json.dumps(state)),
        "loaded": loaded,
        "resumed": time.process_time() - began,
        "memory": memory() - before,
    }


def read_datasets(report: Report) -> None:
    rows = []
    for num_examples, length in ((100_000, 50), (100_000, 500), (1_000_000, 50)):
        offsets = pa.array(np.arange(num_examples + 1, dtype=np.int32) * length)
        ids = pa.ListArray.from_arrays(offsets, pa.array(np.ones(num_examples * length, np.int32)))
        table = pa.table({"input_ids": ids})
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "tokens.arrow")
            with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
            found = in_new_process(reading, path)
        report.data.setdefault("datasets", []).append(found)
        cells = [f"{1e3 * found['seconds']:.1f}", f"{found['memory'] / 1e6:.1f}"]
        counts = [f"{n:,}" for n in (num_examples, num_examples * length)]
        rows.append([*counts, *cells, f"{found['pickled']:,}"])
    header = ["examples", "tokens", "CPU ms to open", "MB of memory", "bytes to a worker"]
    note = "An Arrow file of int32 ids, memory-mapped, after 100 random batches of 256 rows."
    report.table("A TokenizedDataset", header, rows, note)


def resume_orders(report: Report, sizes: list[int]) -> None:
    rows = []
    for num_examples in sizes:
        found = in_new_process(resuming, num_examples)
        report.data.setdefault("orders", []).append(found)
        cells = [f"{1e3 * found[name]:.3g}" for name in ("loaded", "resumed")]
        megabytes = f"{found['memory'] / 1e6:,.0f}"
        rows.append([f"{num_examples:,}", str(found["state"]), *cells, megabytes])
        report.target(f"state of {num_examples:,} examples", found["state"], "< bytes", 1000)
    header = [
        "examples",
        "bytes of a state",
        "CPU ms to load it",
        "CPU ms to the first batch",
        "MB",
    ]
    note = "PrefetchingSampler, shuffled, resumed in the middle of epoch 3; a new process each."
    report.table("An order", header, rows, note)


def main() -> None:
    parser = arguments(__doc__, rounds=9)
    parser.add_argument("--examples", type=int, nargs="+", default=_NUM_EXAMPLES)
    options = parser.parse_args()
    report = Report(
        "scale",
        "A plan over 512 ranks takes less than 200 ms; a state is less than 1 kB, whatever the "
        "number of examples.",
    )
    lengths, what = real_mix(options.data, 1_000_000, longest=_MAX_TOKENS)
    plan_steps(report, lengths, what, options.rounds)
    read_datasets(report)
    resume_orders(report, options.examples)
    report.write(options.out)


if __name__ == "__main__":
    main()
