"""Supervised fine-tuning on packed rows: one file, from conversations to a saved model.

Without arguments it makes up a chat corpus whose answers can be checked (synthetic_chat.py), trains
a tokenizer and a small Qwen3 on it in a minute on two CPU cores, and measures what was learnt:

    accelerate launch examples/sft.py --model Qwen/Qwen3-0.6B --dataset chats.jsonl

A step is `--batch-size` conversations, or `--batch-rows` full rows, over any number of ranks. Every
rank plans the whole step and trains its own rows of it, so the loss is the exact token mean.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import os
import time
from typing import Any

import checkpoints
import datasets
import evaluation
import numpy as np
import run_log
import synthetic_chat
import torch
import trained_model
import transformers
import turns
from accelerate import Accelerator
from accelerate.utils import set_seed
from checkpoints import fail
from example_log import ExampleLog
from options import argument_parser, parse_arguments
from torch.utils.data import DataLoader

import torch_collate_kit as kit
from torch_collate_kit.loading import read_records


def read_dataset(name: str, split: str) -> datasets.Dataset:
    """Read the records of a file, a saved folder or a hub dataset, or end the script."""
    try:
        return read_records(name, split=split)
    except kit.DataError as error:
        fail(f"--dataset {error}")


def load_conversations(args: argparse.Namespace) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Conversations to train on, and others to evaluate on."""
    if args.dataset:
        return hold_out(read_dataset(args.dataset, args.split), args)
    args.num_held_out = 350 if args.num_held_out is None else args.num_held_out
    count = args.num_conversations + args.num_held_out
    return hold_out(datasets.Dataset.from_list(synthetic_chat.make_corpus(count, args.seed)), args)


def hold_out(
    found: datasets.Dataset, args: argparse.Namespace
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Shuffle conversations, and divide them into those to train on and those to evaluate on."""
    number = args.num_held_out
    number = min(350, len(found) // 20) if number is None else number
    order = np.random.default_rng(np.random.SeedSequence((args.seed, 1))).permutation(len(found))
    return found.select(order[number:]), found.select(order[:number])


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
    """Pack rows so that all ranks have equal work, by the cost of this model; or pad."""
    if args.no_packing:  # on the right: some recurrent models read pads on the left as tokens
        return kit.PaddedCollator(tokenizer, padding_side="right")
    layout = kit.ParallelLayout(dp=args.layout.dp, tp=args.align)
    options = {"max_tokens": args.max_tokens, "parallel": layout}
    options |= {"strategy": "balanced", "rows_multiple_of": args.rows_multiple_of}
    if args.compile:  # one shape, of as many boundaries in every batch
        options["max_sequences_per_row"] = 1 + args.max_tokens // 16
    with contextlib.suppress(ValueError):  # sizes under other names: the cost of a usual model
        options["cost"] = kit.ModelCost.of(model.config)
    packing = kit.PackingOptions(**options, **args.of_turns)
    return kit.PackedCollator(tokenizer, packing=packing, fixed_width=args.compile)


def step_size(args: argparse.Namespace, training: bool) -> dict[str, int]:
    """Return how many conversations or full rows a step has; packed rows are evaluated by rows."""
    if args.no_packing or (training and args.batch_size):
        return {"batch_size": args.batch_size}
    rows = args.rows_per_micro_batch * (args.rows_multiple_of or args.layout.dp)
    return {"batch_rows": args.batch_rows or rows}


def make_loader(
    examples: kit.TokenizedDataset, collate: Any, accelerator: Any, args: Any, shuffle: bool
) -> kit.PrefetchLoader:
    """Load batches onto the device, in an order that is a function of (seed, epoch)."""
    options = {**step_size(args, shuffle), "shuffle": shuffle, "seed": args.seed}
    if args.no_packing:  # every rank collates the whole batch
        sampler: Any = kit.PrefetchingSampler(examples, dp_rank=0, dp_size=1, **options)
    else:  # every rank plans the whole batch, and reads its own rows: as narrow as can be
        sampler = kit.PackedBatchSampler(examples, collate, dp_rank=args.dp_rank, **options)
    if shuffle:
        args.sampler = sampler  # knows the examples of every step
    workers = {"num_workers": args.num_workers, "worker_init_fn": checkpoints.finish_the_step}
    loader = DataLoader(examples, batch_sampler=sampler, collate_fn=collate, **workers)
    return kit.PrefetchLoader(loader, prefetch=args.prefetch, device=accelerator.device)


def two_examples(
    examples: kit.TokenizedDataset, tokenizer: Any, collate: Any, args: Any
) -> kit.Batch:
    """Return the two shortest in one row, for a check that they do not see each other."""
    lengths = turns.num_tokens(examples)
    two = np.argsort(lengths, kind="stable")[:2]
    if not args.no_packing:  # a row that holds both, however long they are
        shares = {"share_prefixes": collate.packing.share_prefixes}
        collate = kit.PackedCollator(tokenizer, max_tokens=int(lengths[two].sum()), **shares)
    return collate(examples.__getitems__(two))


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
    """Take one optimizer step; return its loss, gradient norm, and whether some rank must stop."""
    total = torch.zeros((), device=accelerator.device)
    for part in parts:
        synchronize = part.metadata["is_last_part"]
        with contextlib.nullcontext() if synchronize else accelerator.no_sync(model):
            if args.example_log:
                loss = args.example_log.loss(model, part)
            else:
                loss = model(part, part.metadata["num_loss_tokens"])  # of all parts and ranks
            accelerator.backward(loss * accelerator.num_processes)  # DDP averages over ranks
        total += loss.detach()
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    must_stop = total.new_tensor(float(bool(args.sigterms)))
    loss, num_stopping = accelerator.reduce(torch.stack([total, must_stop]), "sum").tolist()
    return loss, float(grad_norm), num_stopping > 0


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Warm up and decay to 0, as a function of the step: there is no state to resume."""
    done, num_warm = step / args.num_steps, round(args.warmup * args.num_steps)
    left = 1 - done if args.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return args.learning_rate * left * min(1, (step + 1) / max(1, num_warm))


def train(
    model: Any, loader: Any, optimizer: Any, accelerator: Accelerator, args: Any
) -> dict | None:
    """Train from step `args.first_step` on; return a summary, or None after a SIGTERM."""
    if run_log.is_finished(args):
        accelerator.print(f"{args.output_dir}: this run is already finished")
        return None
    steps = range(args.first_step, args.num_steps)
    log = run_log.RunLog(accelerator.unwrap_model(model), loader, accelerator, args)
    model.train()
    with checkpoints.noting_sigterm() as args.sigterms, loader, log:
        for step, batch in zip(steps, loader.steps(len(steps)), strict=True):
            rate = learning_rate(step, args)
            for group in optimizer.param_groups:
                group["lr"] = rate
            parts = micro_batches(batch, args)
            loss, grad_norm, must_stop = train_step(model, parts, optimizer, accelerator, args)
            done = step + 1
            run_log.check_finite(done, loss, grad_norm, batch, args)
            log.step(done, parts, loss, rate, grad_norm)
            if args.example_log:
                args.example_log.step(done, batch)
            every = args.checkpoint_every
            is_due = every and (done % every == 0 or done == args.num_steps)
            if is_due or must_stop:
                checkpoints.save_checkpoint(accelerator, loader, done, args)
            if must_stop:
                accelerator.print(f"stopped by SIGTERM: step {done} is saved, --resume goes on")
                return None
    if args.example_log:
        args.example_log.print_worst()
    return log.summary()


def padded_line(
    model: Any, examples: Any, tokenizer: Any, summary: dict, accelerator: Any, args: Any
) -> str:
    """Train the first steps again on padded rows, without keeping it; one line to compare with."""
    size = args.batch_size or round(len(examples) / len(args.sampler))  # as many on average
    changed = {"no_packing": True, "compile": False, "batch_size": size, "example_log": None}
    padded = argparse.Namespace(**vars(args) | changed)
    alone = copy.deepcopy(model)
    alone.set_attn_implementation("sdpa")
    model = trained_model.ModelWithLoss(alone).train()
    optimizer = trained_model.make_optimizer(model, padded)
    steps, tokens, cells = min(20, args.num_steps), 0, 0
    collate = make_collator(tokenizer, alone, padded)
    with make_loader(examples, collate, accelerator, padded, shuffle=True) as loader:
        began = time.perf_counter()
        for batch in loader.steps(steps):
            train_step(model, micro_batches(batch, padded), optimizer, accelerator, padded)
            tokens += batch.step.num_tokens
            cells += batch.step.num_cells
        speed = tokens / (time.perf_counter() - began)
    packed = f"{summary['tokens_per_second']:,.0f} tokens/s, {summary['padding']:.0%} padding"
    found = f"{speed:,.0f} tokens/s, {1 - tokens / cells:.0%} padding"
    return f"the first {steps} steps padded: {found}; packed, all steps: {packed}"


def start(args: argparse.Namespace, *handlers: Any) -> Accelerator:
    """Set up ranks, threads, seeds and the output folder."""
    options = {"log_with": run_log.checked_tracker(args.log_with), "project_dir": args.output_dir}
    options |= {"mixed_precision": args.precision, "kwargs_handlers": handlers}
    accelerator = Accelerator(cpu=args.cpu, **options)
    args.num_ranks, args.rank = accelerator.num_processes, accelerator.process_index
    trained_model.divide_ranks(args)
    for name in ("rows_multiple_of", "batch_rows"):
        if (rows := getattr(args, name)) and rows % args.layout.dp:
            option = f"--{name.replace('_', '-')} {rows}"
            fail(f"{option}: must be a multiple of the {args.layout.dp} ranks that read rows")
    if args.batch_rows and args.batch_rows % (args.rows_multiple_of or 1):
        fail(f"--batch-rows {args.batch_rows}: must be a multiple of --rows-multiple-of")
    if args.cpu:  # `accelerate launch` and torchrun leave one thread
        torch.set_num_threads(args.threads or max(1, (os.cpu_count() or 1) // args.num_ranks))
    trained_model.check_sharding(accelerator)
    args.run |= {"weights:": "in parts" if accelerator.is_fsdp2 else "whole"}
    if not accelerator.is_main_process:
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()  # of loading weights
    checkpoints.claim(accelerator, args)
    set_seed(args.seed)
    return accelerator


def save_results(model: Any, weights: Any, tokenizer: Any, summary: dict, args: Any) -> None:
    model.save_pretrained(args.output_dir / "model", state_dict=weights)
    tokenizer.save_pretrained(args.output_dir / "model")
    run_log.write_results(summary, args)


def load_data(
    args: argparse.Namespace, accelerator: Accelerator
) -> tuple[Any, datasets.Dataset, datasets.Dataset, datasets.Dataset]:
    """Return the tokenizer, and the tokenized conversations and held-out ones, also as text."""
    with accelerator.main_process_first():  # the others find its result in the cache of datasets
        conversations, held_out = load_conversations(args)
        tokenizer = load_tokenizer(args, conversations)
        limit = turns.chat_options(args)
        given = (conversations, None), (held_out, args.loss_per)
        parts = [evaluation.tokenized(part, tokenizer, limit, of) for part, of in given]
    accelerator.print("{} conversations to train on, {} held out".format(*map(len, parts)))
    if len(parts[0]) < 2:
        fail("too few to train on; hold out fewer (--num-held-out), or raise --max-tokens")
    return tokenizer, *parts, held_out


def prepare(
    model: Any, two: kit.Batch, num_tokens: int, loader: Any, accelerator: Any, args: Any
) -> tuple[Any, Any]:
    """Return the model with its loss, and the optimizer, both loaded when a run resumes."""
    steps_of_epochs = args.epochs * len(loader)
    args.num_steps = min(steps_of_epochs, args.max_steps or steps_of_epochs)
    args.run |= {"tokens in the data:": str(num_tokens)}  # and any number of ranks
    model = trained_model.with_loss(model, two, accelerator, args)
    model.context = args.context
    optimizer = trained_model.make_optimizer(model, args)
    model, optimizer = accelerator.prepare(model, optimizer)
    args.first_step = checkpoints.resume(accelerator, loader, args) if args.resume else 0
    return model, optimizer


def run(args: argparse.Namespace, accelerator: Accelerator) -> None:
    tokenizer, tokenized, tokenized_held_out, held_out = load_data(args, accelerator)
    examples = kit.TokenizedDataset(tokenized)
    model = trained_model.load_model(args, tokenizer)
    model = model.to(accelerator.device).train()  # it may be in eval mode
    args.of_turns = turns.packing_options(examples, args)
    collate = make_collator(tokenizer, model, args)
    loader = make_loader(examples, collate, accelerator, args, shuffle=True)
    if args.checkpoint_every and accelerator.is_main_process and not args.resume:
        tokenized.save_to_disk(args.output_dir / "examples")  # which a step is made of
    two = two_examples(examples, tokenizer, collate, args)
    num_tokens = turns.num_tokens(examples).sum()
    model, optimizer = prepare(model, two, num_tokens, loader, accelerator, args)
    args.example_log = ExampleLog(examples, tokenizer, args) if args.log_examples else None
    summary = train(model, loader, optimizer, accelerator, args)
    if summary is None:
        return
    if len(tokenized_held_out):
        given = evaluation.with_column(tokenized_held_out, collate, tokenizer, args.loss_per)
        with make_loader(*given, accelerator, args, shuffle=False) as loader:
            rows = (part for batch in loader for part in micro_batches(batch, args))
            summary |= evaluation.losses(model, rows, accelerator, args.loss_per)
    weights = trained_model.whole_weights(model, accelerator)
    model_alone = trained_model.whole_model(model, accelerator)
    shown: dict[str, str] = {}
    if not args.dataset:
        rates, shown = synthetic_chat.exact_match(model_alone, tokenizer, held_out, accelerator)
        summary |= {f"exact match, {skill}": rate for skill, rate in rates.items()}
    accelerator.log({f"summary/{name}": of for name, of in summary.items()}, args.num_steps)
    if accelerator.is_main_process:
        save_results(model_alone, weights, tokenizer, summary, args)
    if shown and args.num_ranks == 1:
        print("\n".join(shown[skill] for skill in ("addition", "story") if skill in shown))
        if not args.no_packing and args.train_on != "each":
            print(padded_line(model_alone, examples, tokenizer, summary, accelerator, args))


def leave(accelerator: Accelerator) -> None:
    """Leave with all ranks, once no model is left: DDP holds the process group.

    A rank that leaves while gloo is in use may abort.
    """
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


def main() -> None:
    parser = argument_parser()
    parser.add_argument("--loss-per", metavar="COLUMN", help="also the held-out loss of its values")
    of_each = "also write the loss of each conversation, and print the worst of each epoch"
    parser.add_argument("--log-examples", action="store_true", help=of_each)
    turns.add_options(parser)
    args = parse_arguments(parser, from_scratch=3e-3)
    turns.check(args)
    if args.log_examples and args.context_parallel > 1:
        fail("--log-examples: a context rank has parts of conversations; omit --context-parallel")
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
