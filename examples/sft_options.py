"""The options of sft.py, which vlm_sft.py has too: what they are, and whether they can be."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from accelerate.utils import parse_flag_from_env
from attention_choice import NAMES
from read_data import fail
from run_log import TRACKERS
from trained_model import check_arguments

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
    add("--num-conversations", type=int, default=5000, help="made up for training")
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
        help="capacity of a row; none: with --model 4096, else as it suits",
    )
    add("--rows-per-micro-batch", type=int, help="rows at a time; none: 1 packed, 8 padded")
    add(
        "--rows-multiple-of",
        type=int,
        metavar="R",
        help="plan for R ranks: any number that divides it resumes with the same rows",
    )
    add("--attention", default="auto", choices=["auto", *NAMES], help="auto: the fastest that can")
    add = parser.add_argument_group("training").add_argument
    add("--batch-size", type=int, default=8, help="conversations a step, over all ranks")
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
    parser: argparse.ArgumentParser, from_scratch: float, max_tokens: int = 1024
) -> argparse.Namespace:
    """The arguments, checked; without --model the learning rate is `from_scratch`, and a row holds
    `max_tokens`."""
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
        args.rows_per_micro_batch = 8 if args.no_packing else 1
    if args.learning_rate is None:
        of_model = 2e-4 if args.lora else 2e-5
        args.learning_rate = of_model if args.model else from_scratch
    if args.max_tokens is None:
        args.max_tokens = 4096 if args.model else max_tokens
    args.cpu |= parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    kept = {name: str(value) for name, value in vars(args).items() if name not in MAY_CHANGE}
    args.run = {f"--{name.replace('_', '-')}": value for name, value in kept.items()}
    check_arguments(args)
    return args
