"""What isolating the mixers of a hybrid model costs on a CPU, and what packing it saves.

Claimed: a training step with isolate_mixers takes at most 1.1 times that of the same row leaking,
and packed rows bring at least twice the real tokens per second of right-padded batches.

    python benchmarks/bench_hybrids.py

A random Qwen3.5 (three linear-attention layers, one of attention), float32, one thread, forward and
backward pass, without kernels. "leaking" is the same model without isolate_mixers, given positions
that restart, with the same attention (sdpa): its mixers run over the whole row. "padded" is batches
of 32 examples in random order, right-padded to their longest, run by 4 rows to save memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from harness import Report, Times, alternate, arguments, timed
from samples import Examples, real_mix

from torch_collate_kit import (
    Batch,
    PackedCollator,
    PaddedCollator,
    isolate_mixers,
    register_torch_varlen,
)

_VOCAB, _ROW, _PADDED_BATCH = 1000, 8192, 32


def tiny_qwen(attention: str, hidden: int) -> Any:
    """The same weights for every attention."""
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=_VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=hidden // 4,
        linear_value_head_dim=hidden // 4,
        attn_implementation=attention,
    )
    return transformers.Qwen3_5ForCausalLM(config).train()


def examples_of_ids(lengths: np.ndarray) -> Examples:
    rng = np.random.default_rng(0)
    return [{"input_ids": rng.integers(1, _VOCAB, length)} for length in lengths.tolist()]


def step(model: Any, inputs: Sequence[dict[str, Any]]) -> Callable[[], float]:
    def run() -> None:
        for each in inputs:
            model(**each).logits.square().mean().backward()
        model.zero_grad()

    return timed(run)


def against_leaking(lengths: np.ndarray, width: int, rounds: int) -> dict[str, Times]:
    """One row of real lengths: isolated, and with mixers that run over the whole of it."""
    batch = PackedCollator(0, max_tokens=width)(examples_of_ids(lengths))[:1]
    leaking, isolated = tiny_qwen("sdpa", 256), tiny_qwen("sdpa", 256)
    isolate_mixers(isolated)
    inputs = batch.model_inputs(isolated, labels=False)
    names = ("input_ids", "position_ids", "use_cache")
    positions = {name: inputs[name] for name in names}
    runs = {"leaking": step(leaking, [positions]), "isolated": step(isolated, [inputs])}
    return alternate(runs, rounds=rounds, warm_up=1)


def padded_batches(examples: Examples) -> list[Batch]:
    collate = PaddedCollator(0, padding_side="right")
    starts = range(0, len(examples), _PADDED_BATCH)
    batches = [collate(examples[start : start + _PADDED_BATCH]) for start in starts]
    return [part for batch in batches for part in batch.chunk(_PADDED_BATCH // 4)]


def against_padded(lengths: np.ndarray, rounds: int) -> dict[str, Times]:
    """All examples once, packed into rows and padded."""
    examples = examples_of_ids(lengths)
    packed = PackedCollator(0, max_tokens=_ROW)(examples)
    isolated, padded = tiny_qwen("torch_varlen", 64), tiny_qwen("sdpa", 64)
    isolate_mixers(isolated)
    rows = [row.model_inputs(isolated, labels=False) for row in packed.chunk(len(packed))]
    batches = [each.model_inputs("sdpa", labels=False) for each in padded_batches(examples)]
    runs = {"packed": step(isolated, rows), "padded": step(padded, batches)}
    return alternate(runs, rounds=rounds, warm_up=1)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--examples", type=int, default=128, help="examples packed and padded")
    options = parser.parse_args()
    torch.set_num_threads(1)
    register_torch_varlen()
    transformers.logging.set_verbosity_error()
    report = Report("hybrids", "Packed hybrids cost no more per row, and save the padding.")
    rows = []
    for width in (2048, _ROW):
        lengths, what = real_mix(options.data, 256, longest=width)
        times = against_leaking(lengths, width, options.rounds)
        report.times(f"leaking {width}", times)
        ratio = times["isolated"].median / times["leaking"].median
        rows.append([f"1 x {width:,}", *(times[name].cells()[0] for name in times), f"{ratio:.2f}"])
        report.target(f"step of {width:,} tokens, isolated against leaking", ratio, "<x", 1.1)
    note = f"ms, medians of {options.rounds} rounds, hidden size 256; lengths of {what}."
    report.table("Isolated against leaking", ["row", "leaking", "isolated", "ratio"], rows, note)
    lengths, _ = real_mix(options.data, options.examples, longest=_ROW)
    times = against_padded(lengths, max(2, options.rounds // 2))
    report.times("padded", times)
    speeds = {name: lengths.sum() / each.median for name, each in times.items()}
    note = f"{len(lengths)} examples, {lengths.sum():,} real tokens, hidden size 64."
    cells = [[name, f"{speed:,.0f}"] for name, speed in speeds.items()]
    report.table("Packed against padded", ["rows", "real tokens per second"], cells, note)
    ratio = speeds["packed"] / speeds["padded"]
    report.target("real tokens per second, packed against padded", ratio, "x", 2)
    report.write(options.out)


if __name__ == "__main__":
    main()
