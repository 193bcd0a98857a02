"""One shape: what is compiled again, what a limit costs in cells, and block masks in closed form.

Claimed: with max_sequences_per_row nothing is compiled again over an epoch of real lengths; at 1.25
times the mean number of segments rows are within 1% as full as without a limit; block masks take at
most a five-hundredth of the time of create_block_mask.

    python benchmarks/bench_shapes.py
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from harness import Report, alternate, arguments, timed
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask

from torch_collate_kit import (
    PackedBatchSampler,
    PackedCollator,
    PackingOptions,
    ParallelLayout,
    TokenizedDataset,
    register_torch_varlen,
)
from torch_collate_kit.batch.block_masks import document_masks

_MIXES = ("mix_all.qwen", "mix_all.mistral", "gsm8k_train.qwen", "taskmaster4_all.qwen")


def recompilations(report: Report, folder: Path) -> None:
    """An epoch of a tiny Llama by rows, compiled with "eager"; tracing does not depend on it."""
    lengths = np.load(folder / "lengths" / "gsm8k_train.qwen.npy")[:400]
    examples = [{"input_ids": [5] * int(n)} for n in lengths]
    dataset, rows = TokenizedDataset(examples, train_all=True), []
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, attn_implementation="torch_varlen",
    )  # fmt: skip
    for most in (None, 14):
        for dynamic in (None, False):
            packing = PackingOptions(2048, max_sequences_per_row=most)
            collate = PackedCollator(0, packing=packing, fixed_width=True, train_all=True)
            model = transformers.LlamaForCausalLM(config)
            torch._dynamo.reset()
            counters.clear()
            compiled = torch.compile(model.model, backend="eager", dynamic=dynamic)
            shapes, graphs = set(), []
            for part in PackedBatchSampler(dataset, collate, batch_rows=2, dp_rank=0):
                inputs = collate(dataset.__getitems__(part)).model_inputs(model, labels=False)
                shapes.add((inputs["cu_seq_lens_q"].shape, inputs["max_length_q"]))
                with torch.no_grad():
                    compiled(**inputs)
                graphs.append(counters["stats"]["unique_graphs"])
            name = "max_sequences_per_row=14" if most else "no limit"
            how = "default" if dynamic is None else "dynamic=False"
            again = graphs[-1] - graphs[0]
            rows.append([f"{name}, {how}", f"{len(graphs)}", f"{len(shapes)}", f"{again}"])
            if most:
                report.target(f"compiled again, {how}", again, "<", 0)
    header = ["", "steps", "shapes", "compiled again"]
    report.table("Recompilations", header, rows, "Real lengths of GSM8K, 2 rows of 2,048 a step.")


def fullness(report: Report, folder: Path) -> None:
    """Share of the cells of the full steps of an epoch, 16 rows on 8 ranks, that hold tokens."""
    rows = []
    for name in _MIXES:
        for width in (8192, 4096):
            lengths = np.minimum(np.load(folder / "lengths" / f"{name}.npy"), width)
            found: list[float] = []
            mean, counts = 0.0, np.zeros(0)
            for ratio in (None, 1.25, 1.5, 2):
                limit = None if ratio is None else math.ceil(ratio * mean)
                packing = PackingOptions(
                    width,
                    "balanced",
                    parallel=ParallelLayout(dp=8),
                    max_sequences_per_row=limit,
                )
                collate = PackedCollator(0, packing=packing, normalize_loss=False)
                sampler = PackedBatchSampler(
                    lengths, collate, batch_rows=16, dp_rank=0, tail="drop"
                )
                plans = [part.plan for part in sampler]
                if ratio is None:
                    counts = np.concatenate([plan.rows.counts() for plan in plans])
                    mean = float(counts.mean())
                tokens = sum(int(plan.lengths.sum()) for plan in plans)
                found.append(100 * tokens / (width * sum(plan.num_rows for plan in plans)))
            what = f"{name}, {width:,}"
            segments = f"{mean:.1f}, {counts.max():.0f}"
            rows.append([what, segments, *(f"{value:.2f}%" for value in found)])
            report.target(f"{what}: cells lost at 1.25", found[0] - found[1], "<%", 1)
    header = ["", "segments, most", "no limit", "1.25 x mean", "1.5", "2"]
    report.table(
        "Fullness",
        header,
        rows,
        (
            "Examples longer than a row are cut at its end. Of full steps: the last of an epoch "
            "holds what is left, and one more of them is 1.5% of an epoch of 67."
        ),
    )


def block_masks(report: Report, rounds: int) -> None:
    rng, times = np.random.default_rng(0), {}
    cases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for width in (8192, 32_768, 131_072):
        cuts = sorted({0, width, *rng.integers(1, width, width // 400).tolist()})
        flat = torch.tensor(cuts, dtype=torch.int32)
        cases[width] = flat, torch.repeat_interleave(torch.diff(flat))[None]

    def closed(width: int) -> Any:
        return timed(lambda: document_masks(*cases[width]))

    def compared() -> object:
        ids = cases[8192][1]
        return create_block_mask(
            lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (k <= q), 1, None, 8192, 8192, "cpu"
        )

    times = alternate({f"{n:,} cells": closed(n) for n in cases}, rounds=4 * rounds)
    times |= alternate(
        {"create_block_mask, 8,192 cells": timed(compared)}, rounds=rounds, warm_up=1
    )
    report.times("Block masks", times)
    ratio = times["create_block_mask, 8,192 cells"].least / times["8,192 cells"].least
    report.target("create_block_mask against the closed form, 8,192 cells", ratio, "x", 500)


def main() -> None:
    options = arguments(__doc__, rounds=5).parse_args()
    torch.set_num_threads(1)
    register_torch_varlen()
    report = Report("shapes", "one shape of all inputs, at no cost in cells")
    fullness(report, options.data)
    block_masks(report, options.rounds)
    recompilations(report, options.data)
    report.write(options.out)


if __name__ == "__main__":
    main()
