"""Supervised fine-tuning on packed rows: one file, from conversations to a saved model.

Without arguments it makes up a chat corpus whose answers can be checked (synthetic_chat.py), trains
a tokenizer and a small Qwen3 on it in a minute on two CPU cores, and measures what was learnt:

    accelerate launch examples/sft.py --model Qwen/Qwen3-0.6B --dataset chats.jsonl

A step is `--batch-size` conversations, whatever the layout and the number of ranks. Every rank
collates the global batch and trains its own rows, so the loss is the exact token mean.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import datasets
import numpy as np
import synthetic_chat
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env, set_seed
from torch.utils.data import DataLoader
from tqdm import tqdm

import torch_collate_kit as kit

FREE_WHEN_RESUMING = {"output_dir", "checkpoint_every", "resume", "num_workers", "threads"}
COUNTS = "batch_size rows_per_micro_batch epochs max_steps max_tokens num_conversations threads"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument_group("data and model").add_argument
    add("--dataset", help="JSON Lines or Parquet file, saved folder, or hub name; none: made up")
    add("--split", default="train", help="split of a hub dataset or saved folder")
    add("--num-conversations", type=int, default=5000, help="made up for training")
    add("--num-held-out", type=int, default=350, help="conversations that are not trained on")
    add("--model", help="hub name or folder; none: a small Qwen3, from scratch")
    add("--chat-template", type=Path, help="Jinja file, for a tokenizer that has no template")
    add = parser.add_argument_group("layout").add_argument
    add("--no-packing", action="store_true", help="one conversation a row, padded")
    add("--max-tokens", type=int, default=1024, help="of a row; longer conversations are cut")
    add("--rows-per-micro-batch", type=int, help="rows at a time; none: 1 packed, 8 padded")
    add = parser.add_argument_group("training").add_argument
    add("--batch-size", type=int, default=8, help="conversations a step, over all ranks")
    add("--epochs", type=int, default=1, help="passes over the data")
    add("--max-steps", type=int, help="train no more steps than that")
    add("--learning-rate", type=float, help="the highest; none: 2e-3, with --model 2e-5")
    add("--schedule", default="cosine", choices=["cosine", "linear"], help="way down to 0")
    add("--warmup", type=float, default=0.05, help="fraction of the steps")
    add("--weight-decay", type=float, default=0.0, help="of AdamW")
    add("--max-grad-norm", type=float, default=1.0, help="gradients are clipped to it")
    add("--gradient-checkpointing", action="store_true", help="less memory, slower")
    add("--seed", type=int, default=0, help="corpus, weights and order follow from it")
    add = parser.add_argument_group("run").add_argument
    add("--output-dir", type=Path, default=Path("outputs/sft"), help="model, metrics, checkpoints")
    add("--checkpoint-every", type=int, default=0, help="steps; 0: never")
    add("--resume", action="store_true", help="go on from the latest checkpoint")
    add("--num-workers", type=int, default=0, help="DataLoader workers")
    add("--cpu", action="store_true", help="do not use a GPU")
    add("--threads", type=int, help="CPU threads of a rank; none: all cores")
    args = parser.parse_args()
    for name in COUNTS.split():
        if (value := getattr(args, name)) is not None and value < 1:
            fail(f"--{name.replace('_', '-')} {value}: must be 1 or more")
    args.rows_per_micro_batch = args.rows_per_micro_batch or (8 if args.no_packing else 1)
    if args.learning_rate is None:
        args.learning_rate = 2e-5 if args.model else 2e-3
    args.cpu |= parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    kept = {k: str(v) for k, v in vars(args).items() if k not in FREE_WHEN_RESUMING}
    args.run = {f"--{k.replace('_', '-')}": v for k, v in kept.items()}
    args.attention = "sdpa" if args.no_packing else "torch_varlen"
    return args


def fail(message: str) -> NoReturn:
    raise SystemExit(f"sft.py: {message}")


def load_conversations(args: argparse.Namespace) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Conversations to train on, and others to evaluate on."""
    if args.dataset:
        found = read_dataset(args.dataset, args.split)
    else:
        count = args.num_conversations + args.num_held_out
        found = datasets.Dataset.from_list(synthetic_chat.make_corpus(count, args.seed))
    num_held_out = min(args.num_held_out, len(found) // 2)
    order = np.random.default_rng(np.random.SeedSequence((args.seed, 1))).permutation(len(found))
    return found.select(order[num_held_out:]), found.select(order[:num_held_out])


def read_dataset(name: str, split: str) -> datasets.Dataset:
    path = Path(name)
    kind = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get(path.suffix)
    if kind and not path.is_file():
        fail(f"--dataset {name}: there is no such file")
    if kind:
        return datasets.load_dataset(kind, data_files=name, split="train")
    try:
        found = datasets.load_from_disk(name) if path.is_dir() else datasets.load_dataset(name)
    except (OSError, ValueError) as error:
        fail(f"--dataset {name}: no saved dataset here, and not found on the hub: {error}")
    if isinstance(found, datasets.DatasetDict) and split not in found:
        fail(f"--split {split}: {name} has the splits {sorted(found)}")
    return found[split] if isinstance(found, datasets.DatasetDict) else found


def load_tokenizer(args: argparse.Namespace, conversations: datasets.Dataset) -> Any:
    if not args.model:
        return synthetic_chat.train_tokenizer(conversations)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        fail(f"--model {args.model}: neither here nor on the hub: {str(error).splitlines()[0]}")
    if args.chat_template:
        tokenizer.chat_template = args.chat_template.read_text()
    if not tokenizer.chat_template:
        fail(f"{args.model} has no chat template; take its chat version, or pass --chat-template")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # pads are never trained
    if tokenizer.pad_token is None:
        fail(f"{args.model} has neither a pad nor an end token; set one in its tokenizer")
    return tokenizer


def load_model(args: argparse.Namespace, tokenizer: Any) -> Any:
    kit.register_torch_varlen()
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": args.attention}
    if args.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model, **options)
    else:
        model = synthetic_chat.make_model(tokenizer, **options)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def make_collator(tokenizer: Any, args: argparse.Namespace) -> Any:
    if args.no_packing:
        return kit.PaddedCollator(tokenizer)
    layout = kit.ParallelLayout(dp=args.num_ranks)
    options = {"max_tokens": args.max_tokens, "strategy": "balanced"}  # as narrow as can be
    return kit.PackedCollator(tokenizer, parallel=layout, **options)


def training_order(num_examples: int, args: argparse.Namespace) -> list[list[int]]:
    """The examples of every step of every epoch, a function of (seed, epoch)."""
    steps: list[list[int]] = []
    for epoch in range(args.epochs):
        rng = np.random.default_rng(np.random.SeedSequence((args.seed, 2, epoch)))
        order = rng.permutation(num_examples).tolist()
        steps += [order[i : i + args.batch_size] for i in range(0, num_examples, args.batch_size)]
    return steps[: args.max_steps]


def micro_batches(batch: kit.Batch, accelerator: Accelerator, args: Any) -> list[kit.Batch]:
    """This rank's rows of the global batch, a few at a time, on its device."""
    batch = batch.pad_rows(multiple_of=accelerator.num_processes)  # packed rows divide already
    rows = batch.chunk(accelerator.num_processes)[accelerator.process_index]
    size = args.rows_per_micro_batch
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [part.to(accelerator.device, non_blocking=True) for part in parts]


def batch_loss(model: Any, batch: kit.Batch, num_loss_tokens: int, args: Any) -> torch.Tensor:
    inputs = batch.model_inputs(attention=args.attention, labels=False)
    return kit.token_loss(model(**inputs).logits, batch, num_loss_tokens=num_loss_tokens)


def train_step(
    model: Any, batch: kit.Batch, optimizer: Any, accelerator: Accelerator, args: Any
) -> tuple[float, float]:
    """One optimizer step: the loss over all micro-batches and ranks, and the gradient norm."""
    num_loss_tokens = batch.metadata["num_loss_tokens"]  # of all micro-batches and ranks
    parts = micro_batches(batch, accelerator, args)
    total = torch.zeros((), device=accelerator.device)
    for i, part in enumerate(parts):
        is_last = i == len(parts) - 1  # only the last backward exchanges gradients
        with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
            loss = batch_loss(model, part, num_loss_tokens, args)
            accelerator.backward(loss * accelerator.num_processes)  # DDP averages over ranks
        total += loss.detach()
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return accelerator.reduce(total, "sum").item(), float(grad_norm)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, and down to 0. A function of the step: there is no state to resume."""
    done, num_warm = step / args.num_steps, round(args.warmup * args.num_steps)
    left = 1 - done if args.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return args.learning_rate * left * min(1, (step + 1) / max(1, num_warm))


def train(
    model: Any, loader: DataLoader, optimizer: Any, accelerator: Accelerator, args: Any
) -> dict[str, float]:
    """Train on every batch of the loader, from step `args.first_step`; returns what it took."""
    took: Counter[str] = Counter()
    began, batches = time.perf_counter(), iter(loader)
    bar = tqdm(range(args.first_step, args.num_steps), disable=not accelerator.is_main_process)
    model.train()
    for step in bar:
        asked = time.perf_counter()
        batch = next(batches)
        got, rate = time.perf_counter(), learning_rate(step, args)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, grad_norm = train_step(model, batch, optimizer, accelerator, args)
        num_tokens, num_cells = batch.metadata["num_tokens"], batch["input_ids"].numel()
        took.update(wait_seconds=got - asked, tokens=num_tokens, cells=num_cells)
        took["train_seconds"] = time.perf_counter() - began
        took["tokens_per_second"] = took["tokens"] / took["train_seconds"]
        took["packing_efficiency"] = took["tokens"] / took["cells"]
        bar.set_postfix_str(
            f"loss {loss:.3f}, {took['tokens_per_second']:,.0f} tokens/s, "
            f"rows {took['packing_efficiency']:.0%} full, waited {took['wait_seconds']:.1f} s"
        )
        record = {"step": step + 1, "loss": loss, "learning_rate": rate, "grad_norm": grad_norm}
        record |= {"packing_efficiency": num_tokens / num_cells, "wait_seconds": got - asked}
        record |= {"tokens_per_second": num_tokens / (time.perf_counter() - asked)}
        if accelerator.is_main_process:
            with open(args.output_dir / "metrics.jsonl", "a") as file:
                file.write(json.dumps(record) + "\n")
        if args.checkpoint_every and (step + 1) % args.checkpoint_every == 0:
            save_checkpoint(accelerator, step + 1, args)
    return dict(took)


def checkpoints(args: argparse.Namespace) -> list[Path]:
    return sorted(path.parent for path in args.output_dir.glob("checkpoint-*/run.json"))


def save_checkpoint(accelerator: Accelerator, step: int, args: argparse.Namespace) -> None:
    """Write beside, then rename: a kill at any moment leaves the checkpoint before it whole."""
    unfinished = args.output_dir / "unfinished"
    accelerator.save_state(str(unfinished))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        state = {"version": 2, "step": step, "run": args.run}
        (unfinished / "run.json").write_text(json.dumps(state, indent=2))
        unfinished.rename(args.output_dir / f"checkpoint-{step:08d}")
        for old in checkpoints(args)[:-2]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def resume(accelerator: Accelerator, args: argparse.Namespace) -> int:
    """Load the latest checkpoint, if it is of this very run; the number of its step."""
    latest = checkpoints(args)[-1]
    state = json.loads((latest / "run.json").read_text())
    other = [f"{k} {was}" for k, was in state["run"].items() if args.run.get(k) != was]
    if state["version"] != 2 or other:
        fail(f"--resume: {latest} is of another run, which had {', '.join(other)}")
    accelerator.load_state(str(latest))
    if accelerator.is_main_process:  # forget the steps that came after it
        metrics = args.output_dir / "metrics.jsonl"
        metrics.write_text("".join(metrics.read_text().splitlines(True)[: state["step"]]))
    return state["step"]


@torch.no_grad()
def held_out_loss(model: Any, loader: DataLoader, accelerator: Accelerator, args: Any) -> float:
    """Mean loss over the trained tokens of the held-out conversations, whatever the layout."""
    model.eval()
    nll, num_loss_tokens = torch.zeros((), dtype=torch.float64, device=accelerator.device), 0
    for batch in loader:
        for part in micro_batches(batch, accelerator, args):
            nll += batch_loss(model, part, 1, args)
        num_loss_tokens += batch.metadata["num_loss_tokens"]
    return accelerator.reduce(nll, "sum").item() / num_loss_tokens


def main() -> None:
    args = parse_arguments()
    accelerator = Accelerator(cpu=args.cpu, mixed_precision="no" if args.cpu else "bf16")
    args.num_ranks = accelerator.num_processes
    if args.cpu:  # `accelerate launch` and torchrun leave one thread
        torch.set_num_threads(args.threads or max(1, (os.cpu_count() or 1) // args.num_ranks))
    if not accelerator.is_main_process:
        datasets.disable_progress_bars()
    if args.resume and not checkpoints(args):
        fail(f"--resume: no checkpoint in {args.output_dir}; was --checkpoint-every given?")
    if checkpoints(args) and not args.resume:
        fail(f"{args.output_dir} has checkpoints of an earlier run; --resume it, or go elsewhere")
    set_seed(args.seed)
    with accelerator.main_process_first():  # the others find its result in the cache of datasets
        conversations, held_out = load_conversations(args)
        tokenizer = load_tokenizer(args, conversations)
        tokenized = [
            kit.tokenize_chat_dataset(part, tokenizer, max_length=args.max_tokens)[0]
            for part in (conversations, held_out)
        ]
    examples, held_out_examples = (part.with_format("numpy") for part in tokenized)
    if len(examples) < 2:
        fail(f"{len(examples)} conversations have something to train within --max-tokens")
    order = training_order(len(examples), args)
    args.num_steps, lengths = len(order), [len(ids) for ids in examples["input_ids"]]
    args.run |= {"ranks:": str(args.num_ranks), "tokens in the data:": str(sum(lengths))}
    model = load_model(args, tokenizer).to(accelerator.device).train()  # it may be in eval mode
    if not args.no_packing:
        shortest = examples.select(np.argsort(lengths, kind="stable")[:2])  # a few forwards
        pair = kit.PackedCollator(tokenizer, max_tokens=2 * args.max_tokens)([*shortest])
        with accelerator.autocast():
            kit.check_isolation(model, pair.to(accelerator.device))
    options = {"betas": (0.9, 0.98), "weight_decay": args.weight_decay, "fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model, optimizer = accelerator.prepare(model, optimizer)
    args.first_step = resume(accelerator, args) if args.resume else 0
    options = {"collate_fn": make_collator(tokenizer, args), "num_workers": args.num_workers}
    loader = DataLoader(examples, batch_sampler=order[args.first_step :], **options)
    if accelerator.is_main_process and not args.resume:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        (args.output_dir / "metrics.jsonl").write_text("")
    summary = train(model, loader, optimizer, accelerator, args)
    model_alone = accelerator.unwrap_model(model)
    if len(held_out_examples):
        loader = DataLoader(held_out_examples, batch_size=args.batch_size, **options)
        summary["held_out_loss"] = held_out_loss(model, loader, accelerator, args)
    if not args.dataset:
        rates = synthetic_chat.exact_match(model_alone, tokenizer, held_out, accelerator)
        summary |= {f"exact match, {skill}": rate for skill, rate in rates.items()}
    if accelerator.is_main_process:
        model_alone.save_pretrained(args.output_dir / "model")
        tokenizer.save_pretrained(args.output_dir / "model")
        (args.output_dir / "summary.json").write_text(json.dumps(summary, indent=2))
        for name, value in summary.items():
            print(f"{name:<24}{value:>12,.0f}" if value >= 1000 else f"{name:<24}{value:>12.4g}")
        print(f"model, metrics and summary are in {args.output_dir}")
    model, optimizer = accelerator.free_memory(model, optimizer)  # DDP holds the process group
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    try:
        main()
    except (kit.DataError, kit.IsolationError) as error:
        fail(str(error))
