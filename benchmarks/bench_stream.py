"""What packing a stream costs per example, by kind of source, next to packing all of it offline.

Claimed: over columns (a TokenizedDataset, a datasets.Dataset) a stream costs at most 1.5 times the
collation of the same rows, planned beforehand.

    python benchmarks/bench_stream.py

Real lengths, int32 ids, an int8 loss_mask, rows of 4,096 tokens, four a batch, a buffer of 1,000.
"offline" reads the rows of one plan of everything through ``TokenizedDataset.__getitems__`` and
collates them. "no batch" is the stream over columns without reading and collating: the planning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pyarrow as pa
import torch
from harness import Report, alternate, arguments, timed
from samples import real_mix

from torch_collate_kit import PackedCollator, PackedIterableDataset, TokenizedDataset, pack
from torch_collate_kit.loading.streaming.shard_batches import ShardBatches

_MAX_TOKENS, _ROWS = 4096, 4


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


def runs_over(lengths: np.ndarray) -> dict[str, Callable[[], object]]:
    table = table_of(lengths)
    columns, rows = TokenizedDataset(table), datasets.Dataset(datasets.table.InMemoryTable(table))
    examples = [columns[i] for i in range(len(columns))]
    collate = PackedCollator(0, max_tokens=_MAX_TOKENS)
    bins = [np.sort(row) for row in pack(lengths, _MAX_TOKENS).bins]

    def offline() -> None:
        for i in range(0, len(bins), _ROWS):
            collate(columns.__getitems__(np.concatenate(bins[i : i + _ROWS])))

    def stream(source: Any) -> Callable[[], object]:
        settings = {"batch_rows": _ROWS, "buffer_size": 1000}
        return lambda: sum(1 for _ in PackedIterableDataset(source, collate, **settings))

    def planned() -> None:
        with mock.patch.object(ShardBatches, "_collate", return_value={}):
            stream(columns)()

    return {
        "offline": offline,
        "TokenizedDataset": stream(columns),
        "datasets.Dataset": stream(rows),
        "list of dicts of arrays": stream(examples),
        "datasets.IterableDataset": stream(rows.to_iterable_dataset(num_shards=4)),
        "TokenizedDataset, no batch": planned,
    }


def main() -> None:
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--examples", type=int, default=20_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lengths, what = real_mix(options.data, options.examples, longest=_MAX_TOKENS)
    runs = {name: timed(run) for name, run in runs_over(lengths).items()}
    times = alternate(runs, rounds=options.rounds, warm_up=1)
    report = Report("stream", "Over columns, packing a stream costs little more than collating it.")
    report.times("pass", times)
    rows = [
        [name, *(f"{1e6 * s / len(lengths):.1f}" for s in (t.median, t.lower_quartile, t.least))]
        for name, t in times.items()
    ]
    note = (
        f"us per example, {options.rounds} passes over {len(lengths):,} lengths drawn from {what}."
    )
    report.table("A pass", ["source", "median", "lower quartile", "minimum"], rows, note)
    for name in ("TokenizedDataset", "datasets.Dataset"):
        ratio = times[name].median / times["offline"].median
        report.target(f"{name} against offline", ratio, "<x", 1.5)
    report.write(options.out)


if __name__ == "__main__":
    main()
