"""The command line of sft.py and vlm_sft.py, with its defaults and what is refused."""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path

import torch
from accelerate.utils import parse_flag_from_env
from checkpoints import fail
from run_log import TRACKERS
from trained_model import NAMES
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.peft_utils import check_peft_version

# Options that a resumed run may change; its losses depend on all others.
MAY_CHANGE = {
    *("--output-dir", "--checkpoint-every", "--keep-checkpoints", "--resume"),
    *("--num-workers", "--prefetch", "--threads", "--log-with", "--loss-per"),
    "--context-parallel",  # as long as --align is the same
}
# Options that must be 1 or more; other numbers must be 0 or more.
COUNTS = {
    *("batch_size", "batch_rows", "rows_per_micro_batch", "rows_multiple_of", "max_tokens"),
    *("num_conversations", "epochs", "max_steps", "keep_checkpoints", "threads"),
    *("lora", "lora_alpha", "context_parallel", "align"),
}


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument_group("data and model").add_argument
    add("--dataset", help="JSON Lines or Parquet file, saved folder, or hub name; none: made up")
    add("--split", default="train", help="split of a hub dataset or saved folder")
    add("--num-conversations", type=int, default=9000, help="number to make up for training")
    add("--num-held-out", type=int, help="to evaluate on; none: 350, or 5%% of a small dataset")
    add("--model", help="hub name or folder; none: a small one, from scratch")
    add(
        "--arch",
        default="qwen3",
        choices=["qwen3", "qwen3_5"],
        help="of the small one; qwen3_5 is a hybrid",
    )
    add("--chat-template", type=Path, help="Jinja file, for a tokenizer that has no template")
    add = parser.add_argument_group("layout").add_argument
    add("--no-packing", action="store_true", help="one conversation per row, padded")
    add("--max-tokens", type=int, help="capacity of a row; none: with --model 4096, else 512")
    add("--rows-per-micro-batch", type=int, help="rows at a time; none: 8, packed with --model 1")
    add("--rows-multiple-of", type=int, help="rows stay the same for any divisor of it as ranks")
    shared = "ranks that share each row, in place of rows of their own"
    add("--context-parallel", type=int, default=1, help=shared)
    padded = "conversations are padded to a multiple of it; none: twice --context-parallel"
    add("--align", type=int, help=f"{padded}; a larger one allows more such ranks")
    names = ["auto", *NAMES]
    add("--attention", default="auto", choices=names, help="auto: the fastest that passes a check")
    add = parser.add_argument_group("training").add_argument
    one = parser.add_mutually_exclusive_group().add_argument
    one("--batch-size", type=int, default=32, help="conversations per step, over all ranks")
    one("--batch-rows", type=int, help="in place of it, full rows per step, over all ranks")
    add("--epochs", type=int, default=1, help="passes over the data")
    add("--max-steps", type=int, help="stop after so many steps")
    add("--lora", type=int, metavar="RANK", help="train adapters of this rank, not the weights")
    add("--lora-alpha", type=int, help="alpha / rank scales adapters; none: twice the rank")
    add("--learning-rate", type=float, help="peak; none: 2e-4 with --lora, 2e-5 with --model")
    add("--schedule", default="cosine", choices=["cosine", "linear"], help="decay to 0")
    add("--warmup", type=float, default=0.05, help="as a fraction of the steps")
    add("--weight-decay", type=float, default=0.0, help="of AdamW")
    add("--max-grad-norm", type=float, default=1.0, help="gradients are clipped to this norm")
    add("--gradient-checkpointing", action="store_true", help="less memory, slower")
    add("--compile", action="store_true", help="compile the layers; all rows get one shape")
    add("--seed", type=int, default=0, help="of the corpus, the weights and the order")
    add = parser.add_argument_group("run").add_argument
    add("--output-dir", type=Path, default=Path("outputs/sft"), help="model, metrics, checkpoints")
    add("--checkpoint-every", type=int, default=0, help="number of steps; 0: never")
    add("--keep-checkpoints", type=int, default=2, help="how many; older ones are deleted")
    options = {"nargs": "?", "const": "always", "choices": ["always", "auto"]}
    add("--resume", **options, help="from the latest checkpoint; auto: if there is one")
    add("--log-with", choices=TRACKERS, help="a tracker of Accelerate, which gets every step")
    add("--num-workers", type=int, default=0, help="DataLoader workers")
    add("--prefetch", action=argparse.BooleanOptionalAction, default=True, help="build ahead")
    add("--cpu", action="store_true", help="do not use a GPU")
    add("--threads", type=int, help="CPU threads of a rank; none: all cores")
    return parser


def parse_arguments(
    parser: argparse.ArgumentParser, from_scratch: float, packed_rows: int = 8
) -> argparse.Namespace:
    """Return the arguments, checked; the last two are defaults for a model from scratch."""
    args = parser.parse_args()
    named = {name: f"--{name.replace('_', '-')}" for name in vars(args)}
    for name, value in vars(args).items():
        lowest = 1 if name in COUNTS else 0
        if isinstance(value, (int, float)) and not value >= lowest:  # refuses nan too
            fail(f"{named[name]} {value}: must be {lowest} or more")
        if value == math.inf:
            fail(f"{named[name]} inf: must be finite")
    if args.warmup > 1:
        fail(f"--warmup {args.warmup}: must be at most 1, it is a fraction of the steps")
    rows, rate, max_tokens = packed_rows, from_scratch, 512
    if args.model:
        rows, rate, max_tokens = 1, 2e-4 if args.lora else 2e-5, 4096
    defaults = {"rows_per_micro_batch": 8 if args.no_packing else rows, "learning_rate": rate}
    for name, value in (defaults | {"max_tokens": max_tokens}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.batch_rows:
        args.batch_size = None
    if args.align is None:
        args.align = 1 if args.context_parallel == 1 else 2 * args.context_parallel
    args.cpu |= parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    given = {named[name]: str(value) for name, value in vars(args).items()}
    args.run = {name: value for name, value in given.items() if name not in MAY_CHANGE}
    # float16 needs a loss scale, whose first steps overflow by design
    has_bf16 = not args.cpu and torch.cuda.is_bf16_supported(including_emulation=False)
    args.precision = "bf16" if has_bf16 else "no"
    check_adapters_and_layout(args)
    return args


def check_adapters_and_layout(args: argparse.Namespace) -> None:
    """Refuse options that contradict each other, and adapters without their package."""
    if args.compile and args.no_packing:
        fail("--compile: padded rows differ in width from batch to batch; leave out --no-packing")
    if args.context_parallel > 1:
        check_context_parallel(args)
    if args.batch_rows and args.no_packing:
        fail(f"--batch-rows {args.batch_rows}: padded rows are as many as --batch-size")
    if args.lora and not args.model:
        fail(f"--lora {args.lora}: adapters need a trained model; pass --model")
    if args.lora_alpha and not args.lora:
        fail(f"--lora-alpha {args.lora_alpha}: there are no adapters without --lora")
    if args.lora and importlib.util.find_spec("peft") is None:
        fail(f'--lora {args.lora}: needs peft; pip install -e ".[lora]" in the clone')
    if args.lora:
        try:  # each transformers has its own: 5.24 needs peft 0.22
            check_peft_version(min_version=MIN_PEFT_VERSION)
        except ValueError as error:
            fail(f"--lora {args.lora}: {error}; pip install -U peft")


def check_context_parallel(args: argparse.Namespace) -> None:
    """Refuse options that rows shared by several ranks do not have; choose their attention."""
    given = f"--context-parallel {args.context_parallel}"
    if args.no_packing:
        fail(f"{given}: the segments of packed rows are cut; leave out --no-packing")
    if args.compile:
        fail(f"{given}: ranks exchange keys in every layer, which is not compiled; no --compile")
    if args.attention not in ("auto", "torch_varlen"):
        fail(f"{given}: needs --attention torch_varlen, which sees the keys of all ranks")
    if args.align % (2 * args.context_parallel):
        fail(
            f"--align {args.align}: must be a multiple of {2 * args.context_parallel} with {given}"
        )
    args.attention = "torch_varlen"
