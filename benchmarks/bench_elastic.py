"""What going on with another number of ranks costs, and what finding an example takes.

Claimed: with rows planned for R ranks, and 8 rows for each of them, rows are less full by at most
1% where the longest example takes half a row; a state loads in less than a second at 100 million
examples; any step of these is known in 10 ms once the order of its epoch is there, and from the
start with a keyed order; an index of a keyed order takes about a microsecond.

    python benchmarks/bench_elastic.py
    python benchmarks/bench_elastic.py --examples 1000000

"Filled" is real tokens divided by the cells of the rows. Time is CPU time of one thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from harness import Report, arguments
from samples import real_mix

from torch_collate_kit import (
    PackedBatchSampler,
    PackedCollator,
    PackingOptions,
    ParallelLayout,
    PrefetchingSampler,
    pack,
)

_MAX_TOKENS, _ROWS_PER_RANK, _STEPS = 8192, 8, 12


def seconds_of(work: Callable[[], object], rounds: int = 1) -> float:
    """The median CPU time of a call."""
    found = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return float(np.median(found))


def price(report: Report, data: Path) -> None:
    rows = []
    for longest in (_MAX_TOKENS // 2, _MAX_TOKENS):
        lengths, what = real_mix(data, 200_000, longest=longest)
        rng = np.random.default_rng(0)
        for planned_for in (8, 24, 64):
            count = int(0.97 * planned_for * _ROWS_PER_RANK * _MAX_TOKENS / lengths.mean())
            batches = [rng.choice(lengths, count) for _ in range(_STEPS)]
            fixed = filled(batches, planned_for, planned_for)
            for ranks in sorted({1, planned_for // 4, planned_for // 2}):
                free = filled(batches, ranks, ranks)
                lost = 100 * (free - fixed)
                most = report.data.setdefault("most lost", {})
                most[str(longest)] = max(most.get(str(longest), 0.0), lost)
                rows.append(
                    [
                        f"{longest:,}",
                        str(planned_for),
                        str(ranks),
                        f"{free:.2%}",
                        f"{fixed:.2%}",
                        f"{lost:.2f}%",
                    ]
                )
                if longest < _MAX_TOKENS:
                    name = f"fill lost, rows for {planned_for} ranks on {ranks}"
                    report.target(name, lost, "< %", 1)
    header = ["longest", "planned for", "ranks", "filled by their own plan", "filled", "lost"]
    note = (
        f"Rows of {_MAX_TOKENS} tokens, {_ROWS_PER_RANK} for each rank planned for, {_STEPS} steps "
        f"of {what}. Where an example is as long as a row, every row is as wide, and rows that are "
        "added to reach a multiple are pads: that is the price of the number of examples per step, "
        "which a run on as many ranks pays as well."
    )
    report.table("The price of the same rows on any number of ranks", header, rows, note)


def filled(batches: list[np.ndarray], ranks: int, planned_for: int) -> float:
    layout = ParallelLayout(dp=ranks)
    packing = PackingOptions(_MAX_TOKENS, parallel=layout, rows_multiple_of=planned_for)
    plans = [pack(of, packing=packing) for of in batches]
    return sum(int(p.lengths.sum()) for p in plans) / sum(p.num_rows * p.width for p in plans)


def next_step(sampler: PrefetchingSampler, steps: Iterator[int]) -> object:
    return sampler.examples(5, next(steps))


def read(sampler: PrefetchingSampler) -> None:
    """A thousand batches of 512."""
    for _ in zip(range(1000), sampler, strict=False):
        pass


def lineage(report: Report, num_examples: int, rounds: int) -> None:
    rows = []
    for shuffle in (True, "keyed"):
        sampler = PrefetchingSampler(
            num_examples, batch_size=512, shuffle=shuffle, dp_rank=0, dp_size=64
        )
        steps = iter(np.random.default_rng(0).integers(0, len(sampler), rounds).tolist())
        cold = seconds_of(partial(sampler.examples, 5, 7))
        warm = seconds_of(partial(next_step, sampler, steps), rounds)
        when = seconds_of(partial(sampler.when, 12_345, 5))
        state = sampler.state_at(5, 1000)
        other = PrefetchingSampler(
            num_examples, batch_size=512, shuffle=shuffle, dp_rank=0, dp_size=48
        )
        load = seconds_of(partial(other.load_state_dict, state), rounds)
        times = [f"{1e3 * t:,.3g}" for t in (cold, warm, when, load)]
        rows.append([f"shuffle={shuffle!r}", *times, str(len(json.dumps(state)))])
        name = f"shuffle={shuffle!r}, {num_examples:,} examples"
        report.target(f"{name}: any step, order at hand", 1e3 * warm, "< ms", 10)
        report.target(f"{name}: a state loads", load, "< s", 1)
        if shuffle == "keyed":
            report.target(f"{name}: any step, from the start", 1e3 * cold, "< ms", 10)
            each = seconds_of(partial(read, sampler)) / 512_000
            report.target(f"{name}: an index, in batches of 512", 1e6 * each, "< us", 1)
    header = ["order", "first step of an epoch", "any other", "when()", "load a state", "bytes"]
    note = f"CPU ms; PrefetchingSampler of {num_examples:,} examples on 64 ranks, resumed on 48."
    report.table("Finding a step", header, rows, note)


def packed_states(report: Report, num_examples: int, rounds: int) -> None:
    lengths = np.random.default_rng(0).integers(20, 500, num_examples)

    def make(ranks: int) -> PackedBatchSampler:
        packing = PackingOptions(4096, parallel=ParallelLayout(dp=ranks), rows_multiple_of=48)
        collate = PackedCollator(0, packing=packing, normalize_loss=False)
        return PackedBatchSampler(lengths, collate, batch_size=512)

    state = make(48).state_at(3, 9)
    other = make(16)
    first = seconds_of(lambda: other.load_state_dict(state))
    again = seconds_of(lambda: other.load_state_dict(state), rounds)
    cells = [f"{1e3 * t:,.3g}" for t in (first, again)]
    rows = [[f"{num_examples:,}", *cells, str(len(json.dumps(state)))]]
    header = ["examples", "load, with digests of the lengths", "again", "bytes"]
    report.table("A PackedBatchSampler", header, rows, "CPU ms; from 48 to 16 ranks.")


def main() -> None:
    parser = arguments(__doc__, rounds=9)
    parser.add_argument("--examples", type=int, default=100_000_000)
    options = parser.parse_args()
    report = Report(
        "elastic",
        "The same rows on any number of ranks cost at most 1% of their fill; any step of 100 "
        "million examples is found in 10 ms.",
    )
    price(report, options.data)
    lineage(report, options.examples, options.rounds)
    packed_states(report, min(options.examples, 10_000_000), options.rounds)
    report.write(options.out)


if __name__ == "__main__":
    main()
