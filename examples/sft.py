"""Supervised fine-tuning on packed rows: one file, from conversations to a saved model.

Without arguments it makes up a chat corpus whose answers can be checked (synthetic_chat.py), trains
a tokenizer and a small Qwen3 on it in a minute on two CPU cores, and measures what was learnt:

    accelerate launch examples/sft.py --model Qwen/Qwen3-0.6B --dataset chats.jsonl

A step is `--batch-size` conversations, whatever the layout and the number of ranks. Every rank
plans the whole batch and trains its own rows of it, so the loss is the exact token mean.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import os
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import synthetic_chat
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env, set_seed
from checkpoints import (
    Termination,
    checkpoints,
    claim,
    fail,
    finish_the_step,
    resume,
    save_checkpoint,
)
from run_log import TRACKERS, RunLog, check_finite, checked_tracker, is_finished, write_results
from torch.utils.data import DataLoader
from trained_model import (
    NAMES,
    Attention,
    ModelWithLoss,
    check_arguments,
    check_sharding,
    load_model,
    make_optimizer,
    whole_model,
    whole_weights,
    with_loss,
)

import torch_collate_kit as kit
from torch_collate_kit.loading import read_records

# Options that a resumed run may have otherwise; all others are what its losses follow from.
MAY_CHANGE = {
    *("output_dir", "checkpoint_every", "keep_checkpoints", "resume"),
    *("num_workers", "prefetch", "threads", "log_with"),
}
# Options that must be 1 or more; other numbers must be 0 or more.
COUNTS = {
    *("batch_size", "rows_per_micro_batch", "rows_multiple_of", "max_tokens", "num_conversations"),
    *("epochs", "max_steps", "keep_checkpoints", "threads", "lora", "lora_alpha"),
}


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument_group("data and model").add_argument
    add("--dataset", help="JSON Lines or Parquet file, saved folder, or hub name; none: made up")
    add("--split", default="train", help="split of a hub dataset or saved folder")
    add("--num-conversations", type=int, default=9000, help="made up for training")
    add("--num-held-out", type=int, help="to evaluate on; none: 350, of a dataset at most 5%%")
    add("--model", help="hub name or folder; none: a small one, from scratch")
    add(
        "--tokenizer",
        help="folder or hub name, for a model from scratch; none: trained on the data",
    )
    add("--chat-template", type=Path, help="Jinja file, for a tokenizer that has no template")
    add = parser.add_argument_group("layout").add_argument
    add("--no-packing", action="store_true", help="one conversation a row, padded")
    add(
        "--max-tokens",
        type=int,
        help="capacity of a row; none: with --model 4096, else 512",
    )
    add("--rows-per-micro-batch", type=int, help="rows at a time; none: 8, packed with --model 1")
    add(
        "--rows-multiple-of",
        type=int,
        metavar="R",
        help="plan for R ranks: any number that divides it resumes with the same rows",
    )
    add("--attention", default="auto", choices=["auto", *NAMES], help="auto: the fastest that can")
    add = parser.add_argument_group("training").add_argument
    add("--batch-size", type=int, default=32, help="conversations a step, over all ranks")
    add("--epochs", type=int, default=1, help="passes over the data")
    add("--max-steps", type=int, help="train no more steps than that")
    add("--lora", type=int, metavar="RANK", help="train adapters of this rank, not the weights")
    add("--lora-alpha", type=int, help="alpha / rank scales adapters; none: twice the rank")
    add(
        "--learning-rate",
        type=float,
        help="the highest; none: with --lora 2e-4, with --model 2e-5, else as it suits",
    )
    add("--schedule", default="cosine", choices=["cosine", "linear"], help="way down to 0")
    add("--warmup", type=float, default=0.05, help="fraction of the steps")
    add("--weight-decay", type=float, default=0.0, help="of AdamW")
    add("--max-grad-norm", type=float, default=1.0, help="gradients are clipped to it")
    add("--gradient-checkpointing", action="store_true", help="less memory, slower")
    add("--compile", action="store_true", help="the layers, by torch.compile; rows of one shape")
    add("--seed", type=int, default=0, help="corpus, weights and order follow from it")
    add = parser.add_argument_group("run").add_argument
    add("--output-dir", type=Path, default=Path("outputs/sft"), help="model, metrics, checkpoints")
    add("--checkpoint-every", type=int, default=0, help="steps; 0: never")
    add("--keep-checkpoints", type=int, default=2, help="the latest ones; older ones are deleted")
    add(
        "--resume",
        nargs="?",
        const="always",
        choices=["always", "auto"],
        help="go on from the latest checkpoint; auto: begin where there is none",
    )
    add("--log-with", choices=TRACKERS, help="tracker of Accelerate that gets every step, too")
    add("--num-workers", type=int, default=0, help="DataLoader workers")
    add("--prefetch", action=argparse.BooleanOptionalAction, default=True, help="build ahead")
    add("--cpu", action="store_true", help="do not use a GPU")
    add("--threads", type=int, help="CPU threads of a rank; none: all cores")
    return parser


def parse_arguments(
    parser: argparse.ArgumentParser, from_scratch: float, packed_rows: int = 8
) -> argparse.Namespace:
    """Return the arguments, checked; without --model the learning rate is `from_scratch`, and
    `packed_rows` are trained at a time."""
    args = parser.parse_args()
    for name, value in vars(args).items():
        lowest = 1 if name in COUNTS else 0
        if isinstance(value, (int, float)) and not value >= lowest:  # refuses nan too
            fail(f"--{name.replace('_', '-')} {value}: must be {lowest} or more")
    for name in ("learning_rate", "weight_decay"):
        if getattr(args, name) == math.inf:
            fail(f"--{name.replace('_', '-')} inf: must be finite")
    if args.warmup > 1:
        fail(f"--warmup {args.warmup}: must be at most 1, it is a fraction of the steps")
    if args.rows_per_micro_batch is None:
        packed = 1 if args.model else packed_rows
        args.rows_per_micro_batch = 8 if args.no_packing else packed
    if args.learning_rate is None:
        of_model = 2e-4 if args.lora else 2e-5
        args.learning_rate = of_model if args.model else from_scratch
    if args.max_tokens is None:
        args.max_tokens = 4096 if args.model else 512
    args.cpu |= parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    kept = {name: str(value) for name, value in vars(args).items() if name not in MAY_CHANGE}
    args.run = {f"--{name.replace('_', '-')}": value for name, value in kept.items()}
    check_arguments(args)
    return args


def read_dataset(name: str, split: str) -> datasets.Dataset:
    """Read the records of a file, a saved folder or a hub dataset, or end the script."""
    try:
        return read_records(name, split=split)
    except kit.DataError as error:
        fail(f"--dataset {error}")


def load_conversations(args: argparse.Namespace) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Conversations to train on, and others to evaluate on."""
    num_held_out = 350 if args.num_held_out is None else args.num_held_out
    if args.dataset:
        found = read_dataset(args.dataset, args.split)
        if args.num_held_out is None:
            num_held_out = min(num_held_out, len(found) // 20)
    else:
        count = args.num_conversations + num_held_out
        found = datasets.Dataset.from_list(synthetic_chat.make_corpus(count, args.seed))
    order = np.random.default_rng(np.random.SeedSequence((args.seed, 1))).permutation(len(found))
    return found.select(order[num_held_out:]), found.select(order[:num_held_out])


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


def make_collator(tokenizer: Any, model: Any, args: argparse.Namespace) -> Any:
    """Rows of which every rank gets as much work, by what tokens cost this model; or padded."""
    if args.no_packing:
        return kit.PaddedCollator(tokenizer)
    options = {"max_tokens": args.max_tokens, "parallel": kit.ParallelLayout(dp=args.num_ranks)}
    options |= {"strategy": "balanced", "rows_multiple_of": args.rows_multiple_of}
    with contextlib.suppress(ValueError):  # sizes under other names: the cost of a usual model
        options["cost"] = kit.ModelCost.of(model.config)
    packing = kit.PackingOptions(**options)
    return kit.PackedCollator(tokenizer, packing=packing, fixed_width=args.compile)


def make_loader(
    examples: kit.TokenizedDataset, collate: Any, accelerator: Any, args: Any, shuffle: bool
) -> kit.PrefetchLoader:
    """Batches on their device, one built ahead; their order is a function of (seed, epoch)."""
    options = {"batch_size": args.batch_size, "shuffle": shuffle, "seed": args.seed}
    if args.no_packing:  # every rank collates the whole batch
        sampler: Any = kit.PrefetchingSampler(examples, **options)
    else:  # every rank plans the whole batch, and reads its own rows: as narrow as can be
        sampler = kit.PackedBatchSampler(examples, collate, dp_rank=args.rank, **options)
    if shuffle:
        args.sampler = sampler  # knows the examples of every step
    workers = {"num_workers": args.num_workers, "worker_init_fn": finish_the_step}
    loader = DataLoader(examples, batch_sampler=sampler, collate_fn=collate, **workers)
    return kit.PrefetchLoader(loader, prefetch=args.prefetch, device=accelerator.device)


def two_examples(
    examples: kit.TokenizedDataset, tokenizer: Any, collate: Any, args: Any
) -> kit.Batch:
    """The two shortest; packed into one row, for a check that they do not see each other."""
    if not args.no_packing:  # a row that holds both, however long they are
        collate = kit.PackedCollator(tokenizer, max_tokens=2 * args.max_tokens)
    return collate(examples.__getitems__(np.argsort(examples.lengths, kind="stable")[:2]))


def micro_batches(batch: kit.Batch, args: argparse.Namespace) -> list[kit.Batch]:
    """Return this rank's rows, a few at a time; all parts of one shape if the model is compiled."""
    if args.no_packing:
        batch = batch.pad_rows(multiple_of=args.num_ranks).chunk(args.num_ranks)[args.rank]
    if args.compile:
        batch = batch.pad_rows(multiple_of=args.rows_per_micro_batch)
    return batch.split(args.rows_per_micro_batch)


def train_step(
    model: Any, parts: list[kit.Batch], optimizer: Any, accelerator: Accelerator, args: Any
) -> tuple[float, float, bool]:
    """Take one optimizer step.

    Returns the loss of all micro-batches and ranks, the gradient norm, and whether a rank was told
    to stop.
    """
    total = torch.zeros((), device=accelerator.device)
    for part in parts:
        synchronize = part.metadata["is_last_part"]
        with contextlib.nullcontext() if synchronize else accelerator.no_sync(model):
            loss = model(part, part.metadata["num_loss_tokens"])  # of all parts and ranks
            accelerator.backward(loss * accelerator.num_processes)  # DDP averages over ranks
        total += loss.detach()
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    told = total.new_tensor(float(args.termination.is_requested))
    loss, num_told = accelerator.reduce(torch.stack([total, told]), "sum").tolist()
    return loss, float(grad_norm), num_told > 0


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, and down to 0. A function of the step: there is no state to resume."""
    done, num_warm = step / args.num_steps, round(args.warmup * args.num_steps)
    left = 1 - done if args.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return args.learning_rate * left * min(1, (step + 1) / max(1, num_warm))


def train(
    model: Any, loader: Any, optimizer: Any, accelerator: Accelerator, args: Any
) -> dict | None:
    """Train from step `args.first_step` on, where the loader stands; returns what it took, or
    None if it was told to stop."""
    steps = range(args.first_step, args.num_steps)
    log = RunLog(accelerator.unwrap_model(model), loader, accelerator, args)
    model.train()
    with Termination() as args.termination, loader, log:
        for step, batch in zip(steps, loader.steps(len(steps)), strict=True):
            rate = learning_rate(step, args)
            for group in optimizer.param_groups:
                group["lr"] = rate
            parts = micro_batches(batch, args)
            loss, grad_norm, is_told = train_step(model, parts, optimizer, accelerator, args)
            done = step + 1
            check_finite(done, loss, grad_norm, batch, args)
            log.step(done, parts, loss, rate, grad_norm)
            every = args.checkpoint_every
            is_due = every and (done % every == 0 or done == args.num_steps)
            if is_due or is_told:
                save_checkpoint(accelerator, loader, done, args)
            if is_told:
                accelerator.print(f"told to stop: step {done} is saved, --resume goes on")
                return None
    return log.summary()


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # too short to be worth compiling for
def held_out_loss(model: Any, loader: Any, accelerator: Accelerator, args: Any) -> float:
    """Mean loss over the trained tokens of the held-out conversations, whatever the layout."""
    model.eval()
    nll, num_loss_tokens = torch.zeros((), dtype=torch.float64, device=accelerator.device), 0
    for batch in loader:
        for part in micro_batches(batch, args):
            nll += model(part, 1)
        num_loss_tokens += batch.metadata["num_loss_tokens"]
    return accelerator.reduce(nll, "sum").item() / num_loss_tokens


def padded_line(
    model: Any, examples: Any, tokenizer: Any, summary: dict, accelerator: Any, args: Any
) -> str:
    """Train the first steps again on padded rows, without keeping it; one line to compare with."""
    padded = argparse.Namespace(**{**vars(args), "no_packing": True, "compile": False})
    alone = copy.deepcopy(model.model)
    alone.set_attn_implementation("sdpa")
    model = ModelWithLoss(alone, Attention("sdpa")).train()
    optimizer, collate = make_optimizer(model, padded), kit.PaddedCollator(tokenizer)
    steps, tokens, cells = min(20, args.num_steps), 0, 0
    with make_loader(examples, collate, accelerator, padded, shuffle=True) as loader:
        began = time.perf_counter()
        for batch in loader.steps(steps):
            parts = micro_batches(batch, padded)
            train_step(model, parts, optimizer, accelerator, padded)
            tokens += batch.metadata["num_tokens"]
            cells += batch["input_ids"].numel()
        speed = tokens / (time.perf_counter() - began)
    return (
        f"the first {steps} steps padded: {speed:,.0f} tokens/s, {1 - tokens / cells:.0%} padding; "
        f"packed, all steps: {summary['tokens_per_second']:,.0f} tokens/s, "
        f"{summary['padding']:.0%} padding"
    )


def start(args: argparse.Namespace, *handlers: Any) -> Accelerator:
    """Ranks, threads and seeds; and the output folder is ours, and fit to begin or to resume."""
    log = {"log_with": checked_tracker(args.log_with), "project_dir": args.output_dir}
    accelerator = Accelerator(
        cpu=args.cpu, mixed_precision=args.precision, kwargs_handlers=handlers, **log
    )
    args.num_ranks, args.rank = accelerator.num_processes, accelerator.process_index
    if (rows := args.rows_multiple_of) and rows % args.num_ranks:
        fail(f"--rows-multiple-of {rows}: must be a multiple of the {args.num_ranks} ranks")
    if args.cpu:  # `accelerate launch` and torchrun leave one thread
        torch.set_num_threads(args.threads or max(1, (os.cpu_count() or 1) // args.num_ranks))
    check_sharding(accelerator)
    args.run |= {"weights:": "in parts" if accelerator.is_fsdp2 else "whole"}
    if not accelerator.is_main_process:
        datasets.disable_progress_bars()
    claim(accelerator, args)
    if args.resume == "auto" and not checkpoints(args):
        args.resume = None
    set_seed(args.seed)
    return accelerator


def save_results(model: Any, weights: Any, tokenizer: Any, summary: dict, args: Any) -> None:
    model.save_pretrained(args.output_dir / "model", state_dict=weights)
    tokenizer.save_pretrained(args.output_dir / "model")
    write_results(summary, args)


def load_data(
    args: argparse.Namespace, accelerator: Accelerator
) -> tuple[Any, datasets.Dataset, datasets.Dataset, datasets.Dataset]:
    """The tokenizer; what to train on, tokenized; what is held out, tokenized, and as it was."""
    with accelerator.main_process_first():  # the others find its result in the cache of datasets
        conversations, held_out = load_conversations(args)
        tokenizer = load_tokenizer(args, conversations)
        # A cut answer has no end
        limit = kit.ChatOptions(max_length=args.max_tokens, overflow="drop")
        tokenized, tokenized_held_out = (
            kit.tokenize_chat_dataset(part, tokenizer, limit)[0]
            for part in (conversations, held_out)
        )
    counts = f"{len(tokenized)} conversations to train on, {len(tokenized_held_out)} held out"
    accelerator.print(counts)
    if len(tokenized) < 2:
        fail("too few to train on; hold out fewer (--num-held-out), or raise --max-tokens")
    return tokenizer, tokenized, tokenized_held_out, held_out


def run(args: argparse.Namespace, accelerator: Accelerator) -> None:
    tokenizer, tokenized, tokenized_held_out, held_out = load_data(args, accelerator)
    examples = kit.TokenizedDataset(tokenized)
    model = load_model(args, tokenizer).to(accelerator.device).train()  # it may be in eval mode
    collate = make_collator(tokenizer, model, args)
    loader = make_loader(examples, collate, accelerator, args, shuffle=True)
    steps_of_epochs = args.epochs * len(loader)
    args.num_steps = min(steps_of_epochs, args.max_steps or steps_of_epochs)
    args.run |= {"tokens in the data:": str(examples.lengths.sum())}  # and any number of ranks
    if args.checkpoint_every and accelerator.is_main_process and not args.resume:
        tokenized.save_to_disk(args.output_dir / "examples")  # which a step is made of
    two = two_examples(examples, tokenizer, collate, args)
    model = with_loss(model, two, accelerator, args)
    model, optimizer = accelerator.prepare(model, make_optimizer(model, args))
    args.first_step = resume(accelerator, loader, args) if args.resume else 0
    if is_finished(args):
        accelerator.print(f"{args.output_dir}: this run is already finished")
        return
    summary = train(model, loader, optimizer, accelerator, args)
    if summary is None:
        return
    if len(tokenized_held_out):
        held_out_examples = kit.TokenizedDataset(tokenized_held_out)
        with make_loader(held_out_examples, collate, accelerator, args, shuffle=False) as loader:
            summary["held_out_loss"] = held_out_loss(model, loader, accelerator, args)
    weights, model_alone = whole_weights(model, accelerator), whole_model(model, accelerator)
    shown: dict[str, str] = {}
    if not args.dataset:
        rates, shown = synthetic_chat.exact_match(model_alone, tokenizer, held_out, accelerator)
        summary |= {f"exact match, {skill}": rate for skill, rate in rates.items()}
    accelerator.log({f"summary/{name}": of for name, of in summary.items()}, args.num_steps)
    if accelerator.is_main_process:
        save_results(model_alone, weights, tokenizer, summary, args)
    if shown and args.num_ranks == 1:
        print("\n".join(shown[skill] for skill in ("addition", "story") if skill in shown))
        if not args.no_packing:
            print(padded_line(model, examples, tokenizer, summary, accelerator, args))


def leave(accelerator: Accelerator) -> None:
    """All ranks together, and when no model is left, since DDP holds the process group: a rank that
    leaves while gloo is in use may abort."""
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


def main() -> None:
    args = parse_arguments(argument_parser(), from_scratch=3e-3)
    accelerator = start(args)
    run(args, accelerator)
    leave(accelerator)


if __name__ == "__main__":
    try:
        main()
    except (kit.DataError, kit.IsolationError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("stopped; --resume goes on from the last checkpoint, if --checkpoint-every saved one")
