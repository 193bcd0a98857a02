"""How long it takes to cut a batch over context ranks, in each layout, and to find later targets.

Claimed: the shard of a rank in at most 10 ms per million tokens of the batch; targets three tokens
on in at most twice the time of trained_values, and a deep shard about as fast as one of depth 1.

    python benchmarks/bench_context.py

Lengths of real conversations, packed in rows of 32,768 cells for 8 context ranks, with 0/1 weights.
"shard" is ``context_shard``, "fields" makes all dense fields of that shard, "paths" finds the keys
of its cells in those of all ranks, which ``model_inputs`` of a shard needs. Times are those of rank
0 or 7, whichever is slower, of the CPU, in one thread.

"Depths" is a batch of 1,000 conversations. Pairs are ``batch.targets(depth)`` beside
``trained_values`` of one field, whose loss mask exists already; a first read is a shard cut and all
of its fields made.
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
from torch_collate_kit.losses import trained_values

LAYOUTS = ("zigzag", "contiguous", "head_tail")
RANKS, WIDTH, COUNT, FEWER = 8, 32_768, 6000, 1000


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


def first_read(batch: Batch, depth: int) -> list[Any]:
    return fields_of(batch.context_shard(0, 1, depth=depth))


def depths(report: Report, batch: Batch, rounds: int) -> None:
    """Targets three tokens on, beside what depth 1 costs."""
    runs: dict[str, Any] = {
        "trained_values": partial(trained_values, batch["input_ids"], batch),
        "targets(1)": partial(batch.targets, 1),
        "targets(3)": partial(batch.targets, 3),
        "first read, depth 1": partial(first_read, batch, 1),
        "first read, depth 3": partial(first_read, batch, 3),
    }
    clocked = {name: timed(run, time.process_time) for name, run in runs.items()}
    times = alternate(clocked, rounds=rounds, warm_up=2)
    report.times("depths", times)
    about = f"{batch.num_tokens:,} tokens in {len(batch)} rows, one rank, alternating."
    header = ["", "median ms", "quartiles", "least"]
    rows = [[name, *of.cells()] for name, of in times.items()]
    report.table("Depths", header, rows, about)
    pairs, values, deep, shallow = (
        times[name].median
        for name in ("targets(3)", "trained_values", "first read, depth 3", "first read, depth 1")
    )
    report.target("targets(3), times trained_values", pairs / values, "<x", 2.0)
    report.target("first read of a deep shard, times depth 1", deep / shallow, "<x", 1.2)


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
    fewer, _ = real_mix(options.data, FEWER, longest=WIDTH)
    packed = PackedCollator(0, max_tokens=WIDTH)(columns_of(examples_of(fewer)))
    depths(report, packed, options.rounds)
    report.write(options.out)


if __name__ == "__main__":
    main()
