"""How full and how even the steps of a stream are, over ranks that each plan their own rows.

    python -m tests.loading.streaming.step_figures shared/data/lengths/mix_all.qwen.npy

"time" is the modelled time of a real token: 1 without padding and without waiting. A segment of n
tokens costs n * (24576 + n); all cells of a row are computed, and a step takes as long as its
slowest rank. Then the share of the tokens that a mixture of two streams reads in shards: the short
conversations, and the long ones of ``tau_airline_all.qwen.npy`` beside it.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import numpy as np

from tests.building import packed_stream
from torch_collate_kit import Mixture, PackedCollator, PackedIterableDataset

LINEAR = 24576
Lengths = list[np.ndarray]  # of one row or more


def steps_of(
    lengths: np.ndarray, dp_size: int, rows: int, max_tokens: int, *, num_passes: int = 1
) -> list[list[Lengths]]:
    """The lengths in every row of every rank, for the steps that all ranks have."""
    tokens = np.arange(int(lengths.max()), dtype=np.int32)
    source = [{"input_ids": tokens[:n]} for n in lengths.tolist()]
    steps: list[list[Lengths]] = []
    for epoch in range(num_passes):
        ranks = []
        for rank in range(dp_size):
            stream = packed_stream(
                source,
                max_tokens=max_tokens,
                rows=rows,
                dp_rank=rank,
                dp_size=dp_size,
                shuffle=True,
            )
            stream.set_epoch(epoch)
            found = [[row.numpy() for row in batch["sub_seq_lengths"]] for batch in stream]
            ranks.append([batch for batch in found if len(batch) == rows])
        steps += map(list, islice(zip(*ranks, strict=False), len(min(ranks, key=len)) - 1))
    return steps


def figures(steps: list[list[Lengths]], max_tokens: int) -> dict[str, float]:
    """Share of full cells, cost of the slowest rank over the mean, modelled time of a token."""
    full, uneven, times = [], [], []
    for ranks in steps:
        squares = np.array([sum(float((row * row).sum()) for row in rank) for rank in ranks])
        tokens = np.array([sum(int(row.sum()) for row in rank) for rank in ranks])
        costs = LINEAR * tokens + squares
        cells = len(ranks[0]) * max_tokens
        full.append(tokens.sum() / (cells * len(ranks)))
        uneven.append(costs.max() / costs.mean())
        times.append((LINEAR * cells + squares.max()) / costs.mean())
    return {
        "steps": len(steps),
        "full": float(np.mean(full)),
        "worst full": float(np.min(full)),
        "imbalance": float(np.mean(uneven)),
        "imbalance, 99th percentile": float(np.percentile(uneven, 99)),
        "time": float(np.mean(times)),
    }


def share_read(sources: list[np.ndarray], by: str, num_shards: int) -> float:
    """Share of the tokens that a mixture reads with the sizes of its sources as weights."""
    sizes = [len(of) if by == "examples" else int(of.sum()) for of in sources]
    examples = [[{"input_ids": np.ones(n, dtype=np.int32)} for n in of] for of in sources]
    streams = [lambda own=own: iter(own) for own in examples]
    mixture = Mixture(streams, weights=sizes, by=by)
    collate = PackedCollator(0, max_tokens=8192)
    dataset = PackedIterableDataset(mixture, collate, num_shards=num_shards, buffer_size=200)
    read = sum(batch.num_tokens for batch in dataset)
    return read / sum(int(of.sum()) for of in sources)


def main() -> None:
    path, rng = Path(sys.argv[1]), np.random.default_rng(0)
    lengths, long = np.load(path), np.load(path.with_name("tau_airline_all.qwen.npy"))
    lengths, long = lengths[lengths <= 8192], long[long <= 8192]
    sources = [rng.permutation(of) for of in (lengths[lengths <= 1008], long)]
    for by in ("tokens", "examples"):
        shares = {n: share_read(sources, by, n) for n in (1, 2, 8, 64)}
        print("mixed by", by, {f"{n} shards": round(share, 3) for n, share in shares.items()})
    for dp_size, rows in ((8, 1), (8, 2), (8, 4), (1, 4)):
        found = figures(steps_of(lengths, dp_size, rows, 8192), 8192)
        print(dp_size, "x", rows, {name: round(value, 3) for name, value in found.items()})


if __name__ == "__main__":
    main()
