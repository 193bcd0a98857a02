"""Preferences on packed rows: DPO, KTO or a reward model, one file from pairs to a saved model.

Without arguments it makes up pairs whose answer can be checked: of a list of words the first in the
alphabet is preferred. A small Qwen3 first learns to speak, by imitating both answers of each pair;
what it prefers, it learns from the pairs, in two minutes on two CPU cores:

    accelerate launch examples/preference.py --model Qwen/Qwen3-0.6B --dataset pairs.jsonl

A pair is an example of two segments, which are never in different rows. So a loss is a function of
the sums of its segments, divided by the pairs of the step, over micro-batches and ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import synthetic_chat
import torch
import trained_model
import transformers
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env, set_seed
from checkpoints import fail
from torch.utils.data import DataLoader
from tqdm import tqdm

import torch_collate_kit as kit
from torch_collate_kit import preference
from torch_collate_kit.loading import map_segments, read_records
from torch_collate_kit.losses import ModelWithLoss, global_num_examples, segment_ends

# Options that must be 1 or more; other numbers must be 0 or more.
COUNTS = {"num_pairs", "max_tokens", "batch_size", "rows_per_micro_batch", "epochs", "threads"}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument_group("data and model").add_argument
    add("--dataset", help="of chosen and rejected, for kto of completion and label; none: made up")
    add("--model", help="hub name or folder, with a chat template; none: a small one, from scratch")
    add("--num-pairs", type=int, default=6000, help="number to make up for training")
    add("--num-held-out", type=int, default=400, help="to evaluate on")
    add("--max-tokens", type=int, help="capacity of a row; none: with --model 8192, else 1024")
    add = parser.add_argument_group("training").add_argument
    add("--loss", default="dpo", choices=["dpo", "kto", "reward"], help="what is trained")
    add("--beta", type=float, help="keeps near the reference; none: with --model 0.1, else 0.3")
    add("--warm-start-steps", type=int, default=120, help="without --model, on both answers")
    add("--batch-size", type=int, default=64, help="pairs per step, over all ranks")
    add("--rows-per-micro-batch", type=int, default=2, help="rows at a time, on each rank")
    add("--epochs", type=int, default=1, help="passes over the pairs")
    add("--learning-rate", type=float, help="peak; none: with --model 1e-6, else 3e-4")
    add("--max-grad-norm", type=float, default=1.0, help="gradients are clipped to this norm")
    add("--gradient-checkpointing", action="store_true", help="less memory, slower")
    add("--seed", type=int, default=0, help="pairs, weights and order follow from it")
    add = parser.add_argument_group("run").add_argument
    add("--output-dir", type=Path, default=Path("outputs/preference"), help="model and metrics")
    add("--cpu", action="store_true", help="do not use a GPU")
    add("--threads", type=int, help="CPU threads of a rank; none: all cores")
    # what trained_model.py asks for, and this file leaves out
    parser.set_defaults(lora=None, arch="qwen3", attention="auto", no_packing=False)
    args = parser.parse_args()
    args.max_tokens = args.max_tokens or (8192 if args.model else 1024)
    for name, of_model, of_small in (("learning_rate", 1e-6, 3e-4), ("beta", 0.1, 0.3)):
        if getattr(args, name) is None:
            setattr(args, name, of_model if args.model else of_small)
    for name, value in vars(args).items():
        lowest = 1 if name in COUNTS else 0
        if isinstance(value, (int, float)) and not lowest <= value < math.inf:  # refuses nan too
            fail(f"--{name.replace('_', '-')} {value}: must be {lowest} or more, and finite")
    args.cpu |= parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    has_bf16 = not args.cpu and torch.cuda.is_bf16_supported(including_emulation=False)
    args.precision = "bf16" if has_bf16 else "no"
    return args


# --- data


def read_pairs(args: argparse.Namespace) -> list[dict]:
    if not args.dataset:
        return synthetic_chat.make_pairs(args.num_pairs + args.num_held_out, args.seed)
    try:
        records = read_records(args.dataset)
    except kit.DataError as error:
        fail(f"--dataset {error}")
    order = np.random.default_rng(np.random.SeedSequence((args.seed, 1))).permutation(len(records))
    return list(records.select(order))


def tokenize(pairs: list[dict], tokenizer: Any, args: argparse.Namespace) -> datasets.Dataset:
    """Tokenize records as examples of two segments that fit into a row together."""
    limit = kit.ChatOptions(max_length=args.max_tokens // 2, overflow="drop")
    return preference.tokenize_preferences(datasets.Dataset.from_list(pairs), tokenizer, limit)[0]


def make_collator(tokenizer: Any, columns: list[str], args: argparse.Namespace) -> Any:
    """Pack rows for all ranks; columns of numbers per example become fields of the batch."""
    fields = {
        "ref_logps": kit.PerExample(torch.float32, shape=(2,)),
        "label": kit.PerExample(torch.bool),
        "margin": kit.PerExample(torch.float32),
    }
    fields = {name: spec for name, spec in fields.items() if name in columns}
    layout = kit.ParallelLayout(dp=args.num_ranks)
    return kit.PackedCollator(tokenizer, max_tokens=args.max_tokens, parallel=layout, fields=fields)


def make_loader(data: Any, tokenizer: Any, accelerator: Any, args: Any) -> kit.PrefetchLoader:
    examples = kit.TokenizedDataset(data, columns=data.column_names)
    collate = make_collator(tokenizer, data.column_names, args)
    options = {"batch_size": args.batch_size, "dp_rank": args.rank, "seed": args.seed}
    sampler = kit.PackedBatchSampler(examples, collate, **options)
    loader = DataLoader(examples, batch_sampler=sampler, collate_fn=collate)
    return kit.PrefetchLoader(loader, device=accelerator.device)


# --- the model and its loss


class Rewarder(torch.nn.Module):
    """A model that returns one number per segment: its reward, by a head of one score."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._no_split_modules = model._no_split_modules  # FSDP2 shards these layers one by one

    def forward(self, batch: kit.Batch) -> torch.Tensor:
        hidden = self.model.base_model(**batch.model_inputs(self.model, labels=False))[0]
        ends = hidden.flatten(0, 1)[segment_ends(batch)]
        return self.model.score(ends)[:, 0].float()


def segment_logps(hidden: torch.Tensor, batch: kit.Batch, **options: Any) -> torch.Tensor:
    """Return one number per segment: the log-probability of an answer."""
    return kit.segment_sums(kit.token_logps(hidden, batch, **options), batch)


def scorer_of(model: Any) -> torch.nn.Module:
    """Return the module that is trained, whose forward pass returns one number per segment."""
    return Rewarder(model) if hasattr(model, "score") else ModelWithLoss(model, segment_logps)


def with_score(model: Any) -> Any:
    """Return the model with a head of one score, in place of that of the next token."""
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    options = {"attn_implementation": config._attn_implementation, "dtype": model.dtype}
    scored = transformers.AutoModelForSequenceClassification.from_config(config, **options)
    scored.base_model.load_state_dict(model.base_model.state_dict())
    return scored.to(model.device)


def loss_of(
    model: Any, part: kit.Batch, kl: torch.Tensor | None, args: Any
) -> preference.PreferenceLoss:
    """Return the losses of the examples of some rows, and what is logged of them."""
    sums = model(part)
    if args.loss == "reward":
        return preference.bradley_terry(sums, part.get("margin"))
    if args.loss == "dpo":
        return preference.dpo(sums, part["ref_logps"], beta=args.beta)
    return preference.kto(sums, part["ref_logps"], part["label"], beta=args.beta, kl=kl)


@torch.no_grad()
def divergence(model: Any, parts: list[kit.Batch], accelerator: Accelerator) -> torch.Tensor:
    """Return the reference point of KTO, from the answers to other prompts in the whole step."""
    total = torch.zeros((), device=accelerator.device)
    for part in parts:
        total += (model(part) - part["ref_logps"].values.flatten())[1::2].sum()
    return accelerator.reduce(total, "sum") / global_num_examples(parts).to(total.device)


def run_step(
    model: Any, parts: list[kit.Batch], accelerator: Accelerator, args: Any
) -> torch.Tensor:
    """Return means over the examples of the step: loss, accuracy, margin; and add up gradients."""
    number = global_num_examples(parts).to(accelerator.device)
    kl = divergence(model, parts, accelerator) if args.loss == "kto" else None
    found = torch.zeros(3, device=accelerator.device)
    for part in parts:
        synchronize = part.metadata["is_last_part"]
        with contextlib.nullcontext() if synchronize else accelerator.no_sync(model):
            losses = loss_of(model, part, kl, args)
            if torch.is_grad_enabled():  # DDP averages over ranks
                accelerator.backward(losses.loss.sum() / number * accelerator.num_processes)
        logged = (losses.loss.detach(), losses.accuracy, losses.margin)
        found += torch.stack([values.sum() for values in logged])
    return accelerator.reduce(found, "sum") / number


def train(model: Any, loader: Any, optimizer: Any, accelerator: Any, args: Any) -> dict[str, float]:
    """Train on all steps; return what the last one logs."""
    num_steps, record = args.epochs * len(loader), {}
    bar = tqdm(total=num_steps, desc=args.loss, disable=not accelerator.is_main_process)
    model.train()
    with loader, bar:
        for step, batch in enumerate(loader.steps(num_steps)):
            rate = args.learning_rate * (1 - step / num_steps) * min(1, (step + 1) / 10)
            for group in optimizer.param_groups:
                group["lr"] = rate
            parts = batch.split(args.rows_per_micro_batch)
            loss, accuracy, margin = run_step(model, parts, accelerator, args).tolist()
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            record = {"step": step + 1, "loss": loss, "accuracy": accuracy, "margin": margin}
            record |= {"grad_norm": float(grad_norm), "padding": batch.step.padding}
            bar.update()
            bar.set_postfix_str(f"loss {loss:.3f}, accuracy {accuracy:.0%}")
            if accelerator.is_main_process:
                with open(args.output_dir / "metrics.jsonl", "a") as file:
                    file.write(json.dumps(record) + "\n")
    return record


@torch.no_grad()
def evaluate(model: Any, loader: Any, accelerator: Accelerator, args: Any) -> dict[str, float]:
    """Return means over the held-out examples: loss, and how often the right side is preferred."""
    model.eval()
    sums, number = torch.zeros(3, device=accelerator.device), 0
    with loader:
        for batch in loader:
            means = run_step(model, batch.split(args.rows_per_micro_batch), accelerator, args)
            sums += means * batch.metadata["num_examples"]
            number += batch.metadata["num_examples"]
    names = ("loss", "accuracy", "margin")
    return {f"held_out_{k}": v for k, v in zip(names, (sums / number).tolist(), strict=True)}


def warm_start(model: Any, pairs: Any, tokenizer: Any, args: Any) -> None:
    """Imitate both answers of the pairs, the same on every rank: a model that has no preference."""
    examples = kit.TokenizedDataset(pairs)
    collate = kit.PackedCollator(tokenizer, max_tokens=args.max_tokens)
    sampler = kit.PackedBatchSampler(examples, collate, batch_size=64, dp_rank=0, seed=args.seed)
    loader = DataLoader(examples, batch_sampler=sampler, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    steps = range(args.warm_start_steps)
    with kit.PrefetchLoader(loader, device=model.device) as batches:
        bar = tqdm(batches.steps(len(steps)), "warm start", len(steps), disable=args.rank > 0)
        for step, batch in zip(steps, bar, strict=True):
            logits = model(**batch.model_inputs(model, labels=False)).logits
            number = batch.metadata["num_loss_tokens"]
            kit.token_loss(logits, batch, num_loss_tokens=number).backward()
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min(1, (step + 1) / 10)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


# --- the run


def start(args: argparse.Namespace) -> Accelerator:
    """Set up ranks, threads, seeds and the output folder."""
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.precision)
    args.num_ranks, args.rank = accelerator.num_processes, accelerator.process_index
    if args.cpu:  # `accelerate launch` and torchrun leave one thread
        torch.set_num_threads(args.threads or max(1, (os.cpu_count() or 1) // args.num_ranks))
    trained_model.check_sharding(accelerator)
    datasets.disable_progress_bars()
    if not accelerator.is_main_process:
        transformers.utils.logging.disable_progress_bar()  # of loading weights
    try:  # on all ranks, so that all of them stop
        args.output_dir.mkdir(parents=True, exist_ok=True)
        if accelerator.is_main_process:
            (args.output_dir / "metrics.jsonl").write_text("")
    except OSError as error:
        fail(f"--output-dir {args.output_dir}: cannot be made and written to: {error.strerror}")
    set_seed(args.seed)
    return accelerator


def prepare_model(pairs: list[dict], tokenizer: Any, accelerator: Any, args: Any) -> Any:
    """Load or make the model, with the attention that keeps the segments of a row apart."""
    model = trained_model.load_model(args, tokenizer).to(accelerator.device)
    two = tokenize(pairs[:1], tokenizer, args)
    batch = make_collator(tokenizer, [], args)(kit.TokenizedDataset(two)[:]).to(model.device)
    with accelerator.autocast():
        accelerator.print(trained_model.choose_attention(model, batch, accelerator.device, args))
    if not args.model and args.loss != "reward":
        warm_start(model, tokenize(pairs, tokenizer, args), tokenizer, args)
    return with_score(model) if args.loss == "reward" else model


def with_reference(data: Any, model: Any, tokenizer: Any, accelerator: Any, args: Any) -> Any:
    """Add the log-probs of both segments under the model as it is: once, before training."""
    if args.loss == "reward":
        return data
    model.eval()
    examples, collate = kit.TokenizedDataset(data), make_collator(tokenizer, [], args)
    found = map_segments(model, examples, collate, rows=2, device=accelerator.device)
    return data.add_column("ref_logps", found.tolist())


def run(args: argparse.Namespace, accelerator: Accelerator) -> None:
    pairs = read_pairs(args)
    if args.model:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    else:
        said = ({"messages": pair["prompt"] + pair["chosen"]} for pair in pairs)
        tokenizer = synthetic_chat.train_tokenizer(said)
    parts = pairs[args.num_held_out :], pairs[: args.num_held_out]
    model = prepare_model(parts[0], tokenizer, accelerator, args)
    scorer = scorer_of(model)
    optimizer = torch.optim.AdamW(scorer.parameters(), args.learning_rate, betas=(0.9, 0.98))
    scorer, optimizer = accelerator.prepare(scorer, optimizer)
    with accelerator.main_process_first():  # the others find its result in the cache of datasets
        records = [
            synthetic_chat.rated(of) if args.loss == "kto" and not args.dataset else of
            for of in parts
        ]
        tokenized = [tokenize(of, tokenizer, args) for of in records]
    accelerator.print("{} examples to train on, {} held out".format(*map(len, tokenized)))
    data = [with_reference(of, scorer, tokenizer, accelerator, args) for of in tokenized]
    loaders = [make_loader(of, tokenizer, accelerator, args) for of in data]
    summary = {"loss": args.loss, **train(scorer, loaders[0], optimizer, accelerator, args)}
    summary |= evaluate(scorer, loaders[1], accelerator, args)
    weights = trained_model.whole_weights(scorer, accelerator)
    alone = trained_model.whole_model(scorer, accelerator)
    if not args.dataset and args.loss != "reward":
        asked = [{"messages": p["prompt"] + p["chosen"], "skill": "choice"} for p in parts[1]]
        rates, shown = synthetic_chat.exact_match(alone, tokenizer, asked, accelerator)
        summary |= {"preferred answers written": rates["choice"]}
        accelerator.print(shown["choice"])
    if accelerator.is_main_process:
        alone.save_pretrained(args.output_dir / "model", state_dict=weights)
        tokenizer.save_pretrained(args.output_dir / "model")
        (args.output_dir / "summary.json").write_text(json.dumps(summary, indent=2))
        print(*(f"{name:<28}{value:>12}" for name, value in summary.items()), sep="\n")


def main() -> None:
    args = parse_arguments()
    accelerator = start(args)
    run(args, accelerator)
    accelerator.free_memory()  # once no model is left: DDP holds the process group
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    try:
        main()
    except (kit.DataError, kit.IsolationError) as error:
        fail(str(error))
