"""Three faults of common stacks, each shown by running the stack, and what the kit gives instead.

    python benchmarks/why.py leak      # packed examples that see each other
    python benchmarks/why.py budget    # rows over the token budget, and how full rows are
    python benchmarks/why.py loss      # the mean of means, where the mean over tokens is meant

Seconds on a CPU; tiny models from a config, seeded lengths. ``budget`` also runs SkyRL's collator
where it is installed (`make build/bench/.installed`, then build/bench/bin/python).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import cache, partial
from importlib import metadata
from typing import Any

import accelerate
import numpy as np
import peers
import torch
import transformers
from accelerate import Accelerator
from torch import Tensor
from transformers import (
    DataCollatorWithFlattening,
    PreTrainedModel,
    PrinterCallback,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)

from torch_collate_kit import (
    PackedCollator,
    PaddedCollator,
    ParallelLayout,
    global_num_loss_tokens,
    isolate_mixers,
    token_loss,
)

__all__ = ["budget", "leak", "loss"]

_VOCAB = 512
Examples = list[dict[str, Any]]


def chats(count: int, *, longest: int = 4096, seed: int = 0) -> Examples:
    """Random ids in the lengths of short chats (log-normal, median 300), answers half of them."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(np.log(300) + rng.standard_normal(count)), 8, longest).astype(int)
    ids = [rng.integers(1, _VOCAB, n) for n in lengths]
    trained = [n - int(rng.uniform(0.2, 0.8) * n) for n in lengths]
    return [
        {"input_ids": row, "labels": np.where(np.arange(len(row)) < start, -100, row)}
        for row, start in zip(ids, trained, strict=True)
    ]


def tiny_model(hybrid: bool = False) -> PreTrainedModel:
    """A Qwen3, or a Qwen3.5 with a layer of linear attention and one of attention."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": _VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.2,
    }
    if not hybrid:
        model, config = Qwen3ForCausalLM, Qwen3Config(**sizes)
    else:
        heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
        heads |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
        layers = ["linear_attention", "full_attention"]
        config = Qwen3_5TextConfig(**sizes, **heads, layer_types=layers)
        model = Qwen3_5ForCausalLM
    return model._from_config(config, attn_implementation="sdpa").eval()


@cache
def leak() -> dict[str, float]:
    """The share of an example's predictions that change with the example packed before it.

    "Trainer" predicts on the flattened rows too: it sets use_cache=False in the model's config.
    """
    first, other, last = chats(3, longest=64)
    first, other = ({k: v[:32] for k, v in e.items()} for e in (first, other))
    model = tiny_model()

    def flattened(examples: Examples) -> torch.Tensor:
        batch = DataCollatorWithFlattening(return_tensors="pt")(examples)
        return model(**batch).logits[0]

    def packed(examples: Examples, model: PreTrainedModel = model) -> torch.Tensor:
        collate = PackedCollator(0, max_tokens=128, strategy="sequential")
        return model(**collate(examples).model_inputs(model, labels=False)).logits[0]

    def in_trainer(examples: Examples, hybrid: bool = False) -> torch.Tensor:
        with tempfile.TemporaryDirectory() as folder:
            collate = DataCollatorWithFlattening(return_tensors="pt")
            trainer = Trainer(tiny_model(hybrid), _settings(folder), data_collator=collate)
            return torch.as_tensor(trainer.predict(examples).predictions[0])

    isolated = tiny_model(hybrid=True)
    isolate_mixers(isolated)
    runs: dict[str, Callable[[Examples], torch.Tensor]] = {
        "flattening": flattened,
        "Trainer": in_trainer,
        "kit": packed,
        "hybrid in Trainer": partial(in_trainer, hybrid=True),
        "hybrid in the kit": partial(packed, model=isolated),
    }
    changed = {}
    with torch.no_grad():
        for name, logits in runs.items():
            alone = slice(32, 32 + len(last["input_ids"]))
            before, after = (logits([e, last])[alone].argmax(-1) for e in (first, other))
            changed[name] = (before != after).float().mean().item()
    return changed


def _settings(folder: str, **settings: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder, report_to=[], use_cpu=True, disable_tqdm=True, **settings
    )


@cache
def budget(max_tokens: int = 4096, tp: int = 8) -> dict[str, dict[str, float]]:
    """By stack: the longest row in tokens, the share of rows over the budget, of cells filled."""
    batches = [chats(256, longest=2048, seed=seed) for seed in range(20)]
    widths: dict[str, list[int]] = {"flattening": [], "SkyRL": [], "kit": []}
    filled: dict[str, list[float]] = {name: [] for name in widths}
    kit = PackedCollator(0, max_tokens=max_tokens, parallel=ParallelLayout(dp=4, tp=tp))
    skyrl = peers.skyrl_packed(max_tokens, tp=tp, dp=4)
    for batch in batches:
        for start in range(0, len(batch), 8):  # per_device_train_batch_size=8
            row = DataCollatorWithFlattening(return_tensors="pt")(batch[start : start + 8])
            widths["flattening"].append(row["input_ids"].shape[1])
            filled["flattening"].append(row["input_ids"].shape[1] / max_tokens)
        rows = kit(batch)["sub_seq_lengths"].tolist()
        _count(rows, tp, max_tokens, widths["kit"], filled["kit"])
        if skyrl is not None:
            examples = [_with_actions(example) for example in batch]
            rows = [row.tolist() for row in skyrl(examples)["sub_seq_lengths"]]
            _count(rows, tp, max_tokens, widths["SkyRL"], filled["SkyRL"])
    return {
        name: {
            "longest": max(of),
            "over": sum(n > max_tokens for n in of) / len(of),
            "least_filled": min(filled[name]),
        }
        for name, of in widths.items()
        if of
    }


def _count(rows: Any, tp: int, max_tokens: int, widths: list[int], filled: list[float]) -> None:
    for lengths in rows:
        widths.append(sum(-(-n // tp) * tp for n in lengths))
        filled.append(sum(lengths) / max_tokens)


def _with_actions(example: dict[str, Any]) -> dict[str, Any]:
    num_actions = int((example["labels"] != -100).sum())
    ids = example["input_ids"].tolist()
    return {"input_ids": ids, "num_actions": num_actions, "loss_mask": [1] * num_actions}


@cache
def loss() -> dict[str, float]:
    """How far the gradient of a step of four micro-batches is from that of its token mean.

    "accumulate" is ``model(**batch).loss`` under ``Accelerator(gradient_accumulation_steps=4)``;
    "Trainer" accumulates as many, and passes the model the labels of the whole step.
    """
    step = [chats(4, longest=2048, seed=seed) for seed in range(4)]
    expected = _gradient(_one_at_a_time, step)
    found = {
        "accumulate": _gradient(_accumulated, step),
        "Trainer": _gradient(_in_trainer, step),
        "kit": _gradient(_token_mean, step),
    }
    return {
        name: ((gradient - expected).norm() / expected.norm()).item()
        for name, gradient in found.items()
    }


def _gradient(train_step: Callable[[Any, list[Examples]], Any], step: list[Examples]) -> Tensor:
    model = tiny_model()
    model = train_step(model, step) or model
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _one_at_a_time(model: Any, step: list[Examples]) -> None:
    """The reference: each chat alone, the sum of its losses by all trained tokens of the step."""
    examples = [example for batch in step for example in batch]
    num_trained = sum(int((e["labels"][1:] != -100).sum()) for e in examples)
    for example in examples:
        ids, labels = (torch.as_tensor(example[name])[None] for name in ("input_ids", "labels"))
        logits = model(ids, use_cache=False).logits[0, :-1]
        nll = torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum")
        (nll / num_trained).backward()


def _accumulated(model: Any, step: list[Examples]) -> Any:
    accelerator = Accelerator(gradient_accumulation_steps=len(step), cpu=True)
    model = accelerator.prepare(model)
    for batch in map(_padded, step):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
    return model


def _padded(examples: Examples) -> dict[str, Tensor]:
    batch = PaddedCollator(0, padding_side="right")(examples)
    return {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}


def _in_trainer(model: Any, step: list[Examples]) -> None:
    examples = [example for batch in step for example in batch]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(
            folder,
            max_steps=1,
            per_device_train_batch_size=len(step[0]),
            gradient_accumulation_steps=len(step),
            train_sampling_strategy="sequential",
            max_grad_norm=0.0,
            save_strategy="no",
            lr_scheduler_type="constant",
        )
        trainer = Trainer(model, settings, _padded, examples, optimizers=(optimizer, None))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    for parameter, old in zip(model.parameters(), before, strict=True):
        parameter.grad = old - parameter.detach()  # of a step of lr=1


def _token_mean(model: Any, step: list[Examples]) -> None:
    batches = [PackedCollator(0, max_tokens=2048)(examples) for examples in step]
    num_loss_tokens = global_num_loss_tokens(batches)
    for batch in batches:
        logits = model(**batch.model_inputs("sdpa", labels=False)).logits
        token_loss(logits, batch, num_loss_tokens=num_loss_tokens).backward()


def _print_leak() -> None:
    changed = leak()
    print("Predictions of an example that change when the example packed before it changes:")
    stack = f"DataCollatorWithFlattening, model(**batch): transformers {transformers.__version__}"
    print(f"  {stack:78} {changed['flattening']:6.1%}")
    stack = "the same rows in Trainer, which turns the cache off"
    print(f"  {stack:78} {changed['Trainer']:6.1%}")
    print(f"  {'PackedCollator, model(**batch.model_inputs(model))':78} {changed['kit']:6.1%}")
    stack = "a hybrid (Qwen3.5), DataCollatorWithFlattening in Trainer"
    print(f"  {stack:78} {changed['hybrid in Trainer']:6.1%}")
    stack = "a hybrid (Qwen3.5), PackedCollator and isolate_mixers(model)"
    print(f"  {stack:78} {changed['hybrid in the kit']:6.1%}")


def _print_budget() -> None:
    print("Rows for a budget of 4,096 tokens, from batches of 256 chats (dp=4, tp=8):")
    version = transformers.__version__
    names = {
        "flattening": f"DataCollatorWithFlattening, 8 per row: transformers {version}",
        "SkyRL": "PackedDataCollator: SkyRL",
        "kit": "PackedCollator",
    }
    found = budget()
    if "SkyRL" in found:
        names["SkyRL"] += f" {metadata.version('skyrl')}"
    for key, of in found.items():
        print(
            f"  {names[key]:64} longest row {of['longest']:6,.0f}, {of['over']:4.0%} of the rows "
            f"over, emptiest row {of['least_filled']:4.0%} full"
        )


def _print_loss() -> None:
    found = loss()
    print("Distance of a step's gradient from that of the token mean, four micro-batches:")
    versions = f"transformers {transformers.__version__}, accelerate {accelerate.__version__}"
    stack = f"model(**batch).loss under accumulate(): {versions}"
    print(f"  {stack:78} {found['accumulate']:6.1%}")
    print(f"  {'Trainer, which divides by the labels of the step':78} {found['Trainer']:6.1%}")
    print(
        f"  {'token_loss(..., num_loss_tokens=global_num_loss_tokens(...))':78} {found['kit']:6.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = {"leak": _print_leak, "budget": _print_budget, "loss": _print_loss}
    parser.add_argument("part", nargs="?", choices=parts, help="all of them, if none is named")
    part = parser.parse_args().part
    for name, show in parts.items():
        if part in (None, name):
            show()


if __name__ == "__main__":
    main()
