"""How long it takes to cut a batch over context ranks, in each layout.

Claimed: the shard of a rank in at most 10 ms per million tokens of the batch.

    python benchmarks/bench_context.py

Lengths of real conversations, packed in rows of 32,768 cells for 8 context ranks, with 0/1 weights.
"shard" is ``context_shard``, "fields" makes all dense fields of that shard, "paths" finds the keys
of its cells in those of all ranks, which ``model_inputs`` of a shard needs. Times are those of rank
0 or 7, whichever is slower, of the CPU, in one thread.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from harness import Report, Times, alternate, arguments, timed
from runs import columns_of
from samples import examples_of, real_mix

from torch_collate_kit import Batch, PackedCollator, ParallelLayout
from torch_collate_kit.batch.paths import paths_of_shard

LAYOUTS = ("zigzag", "contiguous", "head_tail")
RANKS, WIDTH, COUNT = 8, 32_768, 6000


def fields_of(shard: Batch) -> list[Any]:
    """All dense fields, made again: pickling keeps columns alone."""
    fresh = Batch.of_storage(shard.stored(), check=False)
    return [fresh[name] for name in fresh]


def times_of(batch: Batch, layout: Any, rank: int, rounds: int) -> dict[str, Times]:
    shard = batch.context_shard(rank, RANKS, layout=layout)
    assert shard.num_cells * RANKS == batch.num_cells
    runs = {
        "shard": partial(batch.context_shard, rank, RANKS, layout=layout),
        "fields": partial(fields_of, shard),
        "paths": partial(paths_of_shard, shard.placement, len(shard)),
    }
    clocked = {name: timed(run, time.process_time) for name, run in runs.items()}
    return alternate(clocked, rounds=rounds, warm_up=2)


def main() -> None:
    options = arguments(__doc__, rounds=15).parse_args()
    torch.set_num_threads(1)
    report = Report("context", (__doc__ or "").split("Claimed: ")[1].split("\n\n")[0])
    lengths, what = real_mix(options.data, COUNT, longest=WIDTH)
    layout = ParallelLayout(cp=RANKS)
    batch = PackedCollator(0, max_tokens=WIDTH, parallel=layout)(columns_of(examples_of(lengths)))
    millions = batch.num_tokens / 1e6
    rows, slowest = [], 0.0
    for name in LAYOUTS:
        of_ranks = [times_of(batch, name, rank, options.rounds) for rank in (0, RANKS - 1)]
        times = max(of_ranks, key=lambda found: found["shard"].median)
        report.times(name, times)
        rows += [[name, part, f"{of.median / millions * 1e3:.2f}", *of.cells()]
                 for part, of in times.items()]  # fmt: skip
        slowest = max(slowest, times["shard"].median / millions * 1e3)
    about = f"{batch.num_tokens:,} tokens of {COUNT:,} documents in {len(batch)} rows; {what}."
    header = ["layout", "", "ms per million tokens", "median ms", "quartiles", "least"]
    report.table("One of eight context ranks", header, rows, about)
    report.target("a shard of a million tokens, slowest layout", slowest, "< ms", 10)
    report.write(options.out)


if __name__ == "__main__":
    main()
