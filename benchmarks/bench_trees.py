"""What sharing prefixes saves: conversations with a target per turn, computed once per token.

Claimed: airline dialogues of tau-bench through ``train_on="each"`` with Qwen3's template take at
least 9 times fewer cells, bring at least 4 times the training tokens per CPU second, and train the
same model; "auto" costs at most 1.02 times as much where nothing is shared.

    python benchmarks/bench_trees.py

A random Qwen3 of two layers, one thread, forward and backward pass, ``torch_varlen``. "packed" is
the same turns as examples of their own, in rows of the same ``max_tokens``. Loss and parameters are
compared in float64, with norms of float64: those of transformers compute in float32.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from harness import Report, alternate, arguments, timed

from torch_collate_kit import (
    Batch,
    ChatOptions,
    PackedCollator,
    register_torch_varlen,
    token_loss,
    tokenize_chat,
)
from torch_collate_kit.packing.trees import Trees, trees_of

_ROW, _DIALOGUES = 32_768, 30
Example = dict[str, Any]
Examples = list[Example]


def dialogues(folder: Path) -> Examples:
    """Each dialogue as an example with a segment for each trained context."""
    import trl

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder / "tokenizers" / "mistral-32k-chatml"
    )
    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen3.jinja").read_text(encoding="utf-8")
    tools = (folder / "chat_tools_tau_airline.tools.json").read_text(encoding="utf-8")
    options = ChatOptions(train_on="each", group_turns=True, tools=json.loads(tools))
    lines = (folder / "chat_tools_tau_airline_128.jsonl").read_text(encoding="utf-8").splitlines()
    found = []
    for line in lines[:_DIALOGUES]:
        example = tokenize_chat({"messages": json.loads(line)["messages"]}, tokenizer, options)
        names = ("input_ids", "loss_mask")
        found.append({name: [np.array(of) for of in example[name]] for name in names})
    return found


def segments_of(examples: Examples) -> Examples:
    """Every segment as an example of its own."""
    return [
        {"input_ids": ids, "loss_mask": mask}
        for example in examples
        for ids, mask in zip(example["input_ids"], example["loss_mask"], strict=True)
    ]


def trees(groups: Sequence[Sequence[np.ndarray]]) -> Trees:
    lengths = [len(ids) for group in groups for ids in group]
    ids = np.concatenate([ids for group in groups for ids in group]).astype(np.int32)
    examples = np.append(0, np.cumsum([len(group) for group in groups]))
    return trees_of(ids, np.append(0, np.cumsum(lengths)), examples)


def fitting(example: Example, max_tokens: int) -> Example:
    """Leave out the segments that are longer than a row by themselves."""
    fits = [len(ids) <= max_tokens for ids in example["input_ids"]]
    return {
        name: [of for of, fit in zip(column, fits, strict=True) if fit]
        for name, column in example.items()
    }


def cells(report: Report, examples: Examples) -> None:
    rows, num_segments = [], sum(len(example["input_ids"]) for example in examples)
    for max_tokens in (_ROW, 8192):
        kept = [of for example in examples if (of := fitting(example, max_tokens))["input_ids"]]
        packing = {"max_tokens": max_tokens, "share_prefixes": True, "overflow": "drop"}
        batch = PackedCollator(0, **packing)(kept)
        total, count = batch.step.num_tokens, batch.metadata["step_num_filled_cells"]
        found = f"{sum(batch.metadata['num_segments'])} of {num_segments}"
        rows.append([f"{max_tokens:,}", found, f"{batch.metadata['num_dropped']}"])
        rows[-1] += [f"{total:,}", f"{count:,}", f"{total / count:.2f}"]
        if max_tokens == _ROW:
            report.target("tokens for each cell, rows of 32,768", total / count, "x", 9)
    header = ["max_tokens", "segments", "dialogues dropped", "tokens", "cells", "tokens per cell"]
    note = (
        f"{len(examples)} airline dialogues of tau-bench. A tree that is larger than a row is "
        'left out (`overflow="drop"`), and so are segments longer than a row.'
    )
    report.table("Cells", header, rows, note)


class _Norm(torch.nn.Module):
    """RMSNorm in the type of its input."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(other.weight.detach().double())
        self.epsilon = other.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon))


def tiny_qwen(hidden: int, *, exact: bool = False) -> Any:
    """The same weights every time; ``exact`` in float64."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=32_768,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        attn_implementation="torch_varlen",
    )
    model = transformers.Qwen3ForCausalLM(config).train()
    if exact:
        model = model.double()
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child).__name__ == "Qwen3RMSNorm":
                    setattr(module, name, _Norm(child))
    return model


def backward(model: Any, batch: Batch) -> float:
    """The loss of a step over rows of a batch, one at a time, with its gradients."""
    total = 0.0
    for row in batch.split(1):
        hidden = model.model(**row.model_inputs(model, labels=False)).last_hidden_state
        count = row.metadata["num_loss_tokens"]
        loss = token_loss(hidden, row, head=model.lm_head, num_loss_tokens=count)
        loss.backward()
        total += loss.item()
    return total


def same_training(report: Report, examples: Examples, num_steps: int) -> None:
    """Loss and parameters after steps of SGD, in float64, with and without sharing."""
    collators = {
        "shared": (PackedCollator(0, max_tokens=_ROW, share_prefixes=True), list),
        "packed": (PackedCollator(0, max_tokens=_ROW), segments_of),
    }
    losses, weights = {}, {}
    for name, (collate, opened) in collators.items():
        model = tiny_qwen(16, exact=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses[name] = []
        for step in range(num_steps):
            example = examples[step % len(examples)]
            losses[name].append(backward(model, collate(opened([example]))))
            optimizer.step()
            optimizer.zero_grad()
        weights[name] = torch.cat([p.detach().flatten() for p in model.parameters()])
    one, other = (backward(model, of(opened(examples[:2]))) for of, opened in collators.values())
    apart = abs(one - other)
    moved = (weights["shared"] - weights["packed"]).abs().max().item()
    fell = f"{losses['shared'][0]:.3f} to {losses['shared'][-1]:.3f}"
    report.text(f"Losses of {num_steps} steps of SGD, a dialogue each, in float64: {fell}.")
    first = abs(losses["shared"][0] - losses["packed"][0])
    report.target("loss of the first step, difference in float64", first, "<", 1e-12)
    report.target(f"loss of 2 dialogues after {num_steps} steps, difference", apart, "<", 1e-12)
    report.target(f"parameters after {num_steps} steps, difference", moved, "<", 1e-8)


def cpu_seconds(run: Callable[[], object]) -> Callable[[], float]:
    return timed(run, time.process_time)


def speed(report: Report, examples: Examples, hidden: int, rounds: int) -> None:
    """Training tokens per CPU second of collating, forward and backward pass."""
    model = tiny_qwen(hidden)
    shared = PackedCollator(0, max_tokens=_ROW, share_prefixes=True)
    plain = PackedCollator(0, max_tokens=_ROW)
    turns = segments_of(examples)

    def run(collate: PackedCollator, given: Examples) -> Callable[[], float]:
        return cpu_seconds(lambda: (backward(model, collate(given)), model.zero_grad()))

    runs = {"packed": run(plain, turns), "shared": run(shared, examples)}
    times = alternate(runs, rounds=rounds, warm_up=0)
    report.times("dialogues", times)
    num_tokens = sum(len(turn["input_ids"]) for turn in turns)
    cells = {
        "packed": num_tokens,
        "shared": int(trees([e["input_ids"] for e in examples]).num_cells.sum()),
    }
    speeds = {name: num_tokens / each.median for name, each in times.items()}
    rows = [[name, f"{cells[name]:,}", f"{each:,.0f}"] for name, each in speeds.items()]
    note = (
        f"The dialogue of median size: {len(turns)} trained contexts of {num_tokens:,} tokens, "
        f"hidden size {hidden}; collating, forward and backward pass, medians of {rounds} rounds."
    )
    header = ["rows", "cells", "training tokens per CPU second"]
    report.table("Training", header, rows, note)
    ratio = times["packed"].median / times["shared"].median
    report.target("training tokens per CPU second, shared against packed", ratio, "x", 4)


def nothing_shared(report: Report, hidden: int, rounds: int) -> None:
    """A step of pairs that begin differently, with "auto" and without."""
    rng = np.random.default_rng(0)
    examples: Examples = [
        {"input_ids": [rng.integers(1, 32_000, n) for n in rng.integers(100, 700, 2)]}
        for _ in range(8)
    ]
    model = tiny_qwen(hidden)
    collators = {
        name: PackedCollator(0, max_tokens=2048, share_prefixes=share, train_all=True)
        for name, share in (("without", False), ("auto", "auto"))
    }

    def run(collate: PackedCollator) -> Callable[[], float]:
        return cpu_seconds(lambda: (backward(model, collate(examples)), model.zero_grad()))

    times = alternate({name: run(of) for name, of in collators.items()}, rounds=rounds)
    report.times("nothing shared", times)
    ratio = times["auto"].median / times["without"].median
    report.target('a step where nothing is shared, "auto" against without', ratio, "<x", 1.02)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--hidden", type=int, default=128, help="hidden size where time is taken")
    parser.add_argument("--steps", type=int, default=20, help="steps of SGD that are compared")
    options = parser.parse_args()
    torch.set_num_threads(1)
    register_torch_varlen()
    transformers.logging.set_verbosity_error()
    report = Report("trees", "A prefix that segments share is computed once, and trained the same.")
    examples = dialogues(options.data)
    cells(report, examples)
    nothing_shared(report, options.hidden, 2 * options.rounds)
    by_size = sorted(examples, key=lambda e: sum(map(len, e["input_ids"])))
    same_training(report, by_size[:4], options.steps)
    speed(report, by_size[14:15], options.hidden, options.rounds)
    report.write(options.out)


if __name__ == "__main__":
    main()
