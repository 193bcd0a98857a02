"""What packing preference pairs saves, and what keeping them together costs.

Claimed: packed pairs bring at least 1.8 times the real tokens per second of padded batches, with
the same loss; a million pairs are planned in at most 1.1 times a million single examples; their
rows are at most 2% more than those of segments that may lie anywhere.

    python benchmarks/bench_preference.py

A random Qwen3 of two layers, float32, one thread, forward and backward pass of a DPO step. "padded"
is what TRL's DPOTrainer runs: batches of 8 pairs, the chosen rows first, right-padded to the
longest, logits of all cells. Lengths are log-normal: prompts of mean 250, answers of mean 281
tokens. Losses are compared in float64: a sum of 281 log-probs has an error of 1e-4 in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from harness import Report, Times, alternate, arguments, timed

from torch_collate_kit import (
    PackedCollator,
    PerExample,
    TokenizedDataset,
    pack,
    preference,
    register_torch_varlen,
    segment_sums,
    token_logps,
)
from torch_collate_kit.loading import map_segments
from torch_collate_kit.ragged import Ragged

_VOCAB, _ROW, _BATCH, _BETA = 4000, 8192, 8, 0.1
_SPREAD = 0.8  # sigma of the logarithm of a length
_FIELDS = {"ref_logps": PerExample(torch.float32, shape=(2,))}


def lengths_of(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the prompts [count], and of the two answers of each, [count, 2]."""
    rng = np.random.default_rng(seed)

    def drawn(mean: float, shape: Any) -> np.ndarray:
        lengths = rng.lognormal(np.log(mean) - _SPREAD**2 / 2, _SPREAD, shape)
        return np.clip(lengths, 4, 1500).astype(np.int64)

    return drawn(250, count), drawn(281, (count, 2))


def make_pairs(count: int) -> list[dict[str, Any]]:
    rng, pairs = np.random.default_rng(1), []
    for prompt, answers in zip(*(of.tolist() for of in lengths_of(count)), strict=True):
        start = rng.integers(1, _VOCAB, prompt)
        sides = [np.append(start, rng.integers(1, _VOCAB, answer)) for answer in answers]
        masks = [np.arange(len(side)) >= prompt for side in sides]
        pairs.append({"input_ids": sides, "loss_mask": masks})
    return pairs


def make_model(attention: str) -> Any:
    """The same weights for every attention."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=_VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        attn_implementation=attention,
    )
    return transformers.Qwen3ForCausalLM(config).train()


def padded_batches(pairs: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Batches as TRL's collator makes them: chosen rows, then rejected ones, right-padded."""
    batches = []
    for start in range(0, len(pairs), _BATCH):
        part = pairs[start : start + _BATCH]
        order = [(pair, side) for side in (0, 1) for pair in part]
        batch = {}
        for name in ("input_ids", "loss_mask"):
            rows = [torch.from_numpy(pair[name][side]) for pair, side in order]
            batch[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        real = torch.tensor([len(pair["input_ids"][side]) for pair, side in order])
        width = batch["input_ids"].shape[1]
        batch["attention_mask"] = (torch.arange(width) < real[:, None]).long()
        refs = torch.tensor(np.array([pair["ref_logps"] for pair in part]), dtype=torch.float32)
        batches.append(batch | {"ref_logps": refs})
    return batches


def padded_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum of DPO losses of a batch, as TRL computes it."""
    ids = batch["input_ids"]
    logits = model(ids, attention_mask=batch["attention_mask"], use_cache=False).logits[:, :-1]
    nll = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    sums = -(nll.view(len(ids), -1) * batch["loss_mask"][:, 1:]).sum(1)
    chosen, rejected = sums.chunk(2)
    margin = chosen - rejected - (batch["ref_logps"][:, 0] - batch["ref_logps"][:, 1])
    return -F.logsigmoid(_BETA * margin).sum()


def segment_logps(model: Any, part: Any) -> torch.Tensor:
    hidden = model.model(**part.model_inputs(model, labels=False)).last_hidden_state
    return segment_sums(token_logps(hidden, part, head=model.lm_head), part)


def packed_loss(model: Any, part: Any) -> torch.Tensor:
    """The sum of DPO losses of a row."""
    return preference.dpo(segment_logps(model, part), part["ref_logps"], beta=_BETA).loss.sum()


def step(loss_of: Any, model: Any, parts: Any) -> Callable[[], float]:
    def run() -> None:
        for part in parts:
            loss_of(model, part).backward()
        model.zero_grad()

    return timed(run)


@torch.no_grad()
def mean_loss(loss_of: Any, model: Any, parts: Any, count: int) -> float:
    """The mean over pairs, in float64."""
    model.double()
    return float(sum(loss_of(model, part).item() for part in parts)) / count


def against_padded(count: int, rounds: int, report: Report) -> dict[str, Times]:
    """All pairs once, packed and padded, by the same weights, which moved since the reference."""
    pairs, models = make_pairs(count), [make_model(name) for name in ("torch_varlen", "sdpa")]
    plain = PackedCollator(0, max_tokens=_ROW)
    refs = map_segments(lambda b: segment_logps(models[0], b), TokenizedDataset(pairs), plain)
    for model in models:
        noise = torch.Generator().manual_seed(2)
        for parameter in model.parameters():
            parameter.data += 0.005 * torch.randn(parameter.shape, generator=noise)
    pairs = [pair | {"ref_logps": of} for pair, of in zip(pairs, refs, strict=True)]
    batch = PackedCollator(0, max_tokens=_ROW, fields=_FIELDS)(pairs)
    padded = padded_batches(pairs)
    given = {
        "packed": (packed_loss, models[0], batch.split(1)),
        "padded": (padded_loss, models[1], padded),
    }
    times = alternate({name: step(*of) for name, of in given.items()}, rounds=rounds, warm_up=1)
    means = {name: mean_loss(*of, count) for name, of in given.items()}
    num_tokens = sum(len(side) for pair in pairs for side in pair["input_ids"])
    cells = {"packed": batch.num_cells, "padded": sum(b["input_ids"].numel() for b in padded)}
    speeds = {name: num_tokens / of.median for name, of in times.items()}
    rows = [
        [name, f"{speeds[name]:,.0f}", f"{cells[name] / num_tokens:.2f}", f"{means[name]:.9f}"]
        for name in times
    ]
    header = ["rows", "real tokens per second", "cells per token", "loss"]
    note = f"{count} pairs, {num_tokens:,} tokens; medians of {rounds} rounds."
    report.table("Packed against padded", header, rows, note)
    ratio = speeds["packed"] / speeds["padded"]
    report.target("real tokens per second, packed against padded", ratio, "x", 1.8)
    difference = abs(means["packed"] - means["padded"]) / means["padded"]
    report.target("difference of the losses, relative", difference, "<", 1e-5)
    report.data["speeds"], report.data["cells"] = speeds, cells
    return times


def planning(count: int, rounds: int) -> dict[str, Times]:
    """A plan of pairs, and of single examples of as many tokens."""
    prompts, answers = lengths_of(count)
    sides = prompts[:, None] + answers
    pairs, singles = Ragged.from_lengths(sides.ravel(), np.full(count, 2)), sides.sum(axis=1)
    runs = {
        name: timed(lambda of=of: pack(of, _ROW))
        for name, of in (("pairs", pairs), ("singles", singles))
    }
    return alternate(runs, rounds=rounds, warm_up=1)


def rows_of(batches: int) -> dict[str, int]:
    """Rows of batches of 64 pairs, together and with segments that may lie anywhere."""
    rows = {"pairs": 0, "segments": 0}
    for seed in range(batches):
        prompts, answers = lengths_of(64, seed)
        sides = prompts[:, None] + answers
        together = Ragged.from_lengths(sides.ravel(), np.full(64, 2))
        rows["pairs"] += pack(together, _ROW).num_rows
        rows["segments"] += pack(sides.ravel(), _ROW).num_rows
    return rows


def main() -> None:
    parser = arguments(__doc__, rounds=5, data=False)
    parser.add_argument("--pairs", type=int, default=64, help="pairs packed and padded")
    parser.add_argument("--planned", type=int, default=1_000_000, help="pairs planned")
    parser.add_argument("--batches", type=int, default=1000, help="of 64 pairs, rows counted")
    options = parser.parse_args()
    torch.set_num_threads(1)
    register_torch_varlen()
    transformers.logging.set_verbosity_error()
    report = Report("preference", "Packed pairs save the padding, and cost nothing to plan.")
    report.times("padded", against_padded(options.pairs, options.rounds, report))
    times = planning(options.planned, 5 * options.rounds)
    report.times("planning", times)
    cells = [[name, *of.cells()] for name, of in times.items()]
    note = f"{options.planned:,} pairs, and single examples of as many tokens; ms."
    report.table("Planning", ["examples", "median", "quartiles", "minimum"], cells, note)
    ratio = times["pairs"].median / times["singles"].median
    report.target(f"planning {options.planned:,} pairs, against singles", ratio, "<x", 1.1)
    rows = rows_of(options.batches)
    report.data["rows"] = rows
    header, note = ["", "rows"], f"{options.batches} batches of 64 pairs, rows of {_ROW:,} cells."
    report.table("Rows", header, [[name, f"{of:,}"] for name, of in rows.items()], note)
    more = rows["pairs"] / rows["segments"]
    report.target("rows of pairs, against segments anywhere", more, "<x", 1.02)
    report.write(options.out)


if __name__ == "__main__":
    main()
