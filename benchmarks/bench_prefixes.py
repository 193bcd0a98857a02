"""How fast the prefixes that segments share are found, against TRL's trie.

Claimed: of 1,024 segments of 4,096 tokens, the cell of every token in at most 50 ms on one core,
and at least 10 times faster than TRL's `TreeRow.add`.

    python benchmarks/bench_prefixes.py

"trees" finds the cell of every token (what a batch needs), "depths" what a plan needs of a dataset.
TRL's trie has a node more for each branch, and gets its samples as tensors; `pack`, which lays it
out, is not timed. Times are of the CPU, in one thread. Both are checked to have the same cells.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from harness import Report, alternate, arguments, timed

from torch_collate_kit.packing.trees import depths_of, trees_of

COUNT, LENGTH = 1024, 4096
GROUPS = {"groups of 8 behind 3,840 tokens": (8, 3840), "groups of 8 behind 2,048": (8, 2048)}
GROUPS |= {"all behind 2,048": (COUNT, 2048), "nothing shared": (8, 0)}


def segments_of(group: int, shared: int) -> np.ndarray:
    """Segments that begin alike in groups: int32 [COUNT, LENGTH]."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 150_000, (COUNT, LENGTH), dtype=np.int32)
    ids[:, :shared] = np.repeat(ids[::group, :shared], group, axis=0)
    return ids


def trl_trie() -> Callable[[np.ndarray, int], Callable[[], int]] | None:
    """A run of TRL's tries, one for each group, which returns their nodes; None without TRL."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        import torch
        from trl.experimental.async_grpo.packing import TreeRow
    except ImportError:
        return None

    def run_of(ids: np.ndarray, group: int) -> Callable[[], int]:
        trained = torch.zeros(1, dtype=torch.int64)
        samples = [
            {"input_ids": row, "completion_mask": trained, "group_id": i // group}
            for i, row in enumerate(torch.from_numpy(ids.astype(np.int64)))
        ]

        def run() -> int:
            num_nodes = 0
            for start in range(0, len(samples), group):
                row = TreeRow()
                for sample in samples[start : start + group]:
                    row.add(sample)
                num_nodes += len(row.tokens)
            return num_nodes

        return run

    return run_of


def main() -> None:
    options = arguments(__doc__, rounds=5, data=False).parse_args()
    report = Report("prefixes", (__doc__ or "").split("Claimed: ")[1].split("\n\n")[0])
    theirs_of, rows = trl_trie(), []
    slowest, least = 0.0, float("inf")
    for what, (group, shared) in GROUPS.items():
        ids = segments_of(group, shared)
        offsets, firsts = np.arange(COUNT + 1) * LENGTH, np.arange(0, COUNT + 1, group)
        given = ids.ravel(), offsets, firsts
        cells = int(trees_of(*given).num_cells.sum())
        runs = {"trees": timed(partial(trees_of, *given), time.process_time)}
        runs["depths"] = timed(partial(depths_of, *given), time.process_time)
        if theirs_of is not None and what == next(iter(GROUPS)):
            theirs = theirs_of(ids, group)
            branches = (COUNT // group) * (group - 1)
            assert theirs() == cells + branches, "other cells"
            runs["TRL"] = timed(theirs, time.process_time)
        times = alternate(runs, rounds=options.rounds, warm_up=1)
        report.times(what, times)
        factor = f"{ids.size / cells:.2f}"
        rows += [[what, factor, name, *of.cells()] for name, of in times.items()]
        slowest = max(slowest, times["trees"].median)
        if "TRL" in times:
            least = min(least, times["TRL"].median / times["trees"].median)
    header = ["1,024 segments of 4,096 tokens", "tokens per cell", "", "median ms", "quartiles"]
    report.table(
        "Finding shared prefixes", [*header, "least"], rows, "int32 ids, one thread, CPU time."
    )
    report.target("the cells of 4.2 million tokens, slowest of four", slowest * 1e3, "< ms", 50)
    if least < float("inf"):
        report.target("TRL's trie, over ours", least, "x", 10)
    report.write(options.out)


if __name__ == "__main__":
    main()
