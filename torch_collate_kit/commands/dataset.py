"""The commands ``report`` and ``audit``, of a whole dataset."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from torch_collate_kit._checks import needed_package
from torch_collate_kit.commands.arguments import (
    FILES,
    add_command,
    add_data,
    as_flags,
    chat_options,
    loaded_tokenizer,
    note_unused,
    number,
    read_data,
    tokenized_chats,
    wrapped,
)
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing import ParallelLayout
from torch_collate_kit.packing.options import FP8_TOKENS, STRATEGIES
from torch_collate_kit.reporting import audit, packing_report

_OF_RECORDS = ("split", "tokenizer", "train_on", "image_root", "num_proc")


def add_report(commands: Any) -> None:
    """Add the command ``report``."""
    summary = "compare padding and packing on your data, and recommend a row length"
    parser = add_command(commands, "report", _report, summary)
    add_data(
        parser,
        "--allow-empty",
        what=f"{FILES}; or an .npy file of lengths",
        batch_size="examples packed together (all)",
        dp="data-parallel size (1)",
        tp="tensor-parallel size (1)",
        cp="context-parallel size (1)",
        num_proc="processes that tokenize",
    )
    parser.set_defaults(dp=1, tp=1, cp=1)
    parser.add_argument("--fp8", choices=FP8_TOKENS, help="recipe that rows are padded for (none)")
    parser.add_argument(
        "--max-tokens", type=number, nargs="+", metavar="N", help="row lengths to compare"
    )
    parser.add_argument(
        "--strategy",
        nargs="+",
        choices=STRATEGIES,
        metavar="NAME",
        help=f"packing strategies to compare: {', '.join(STRATEGIES)}",
    )
    parser.add_argument(
        "--batch-rows",
        type=number,
        metavar="N",
        help="rows of a step over all ranks: compares steps by examples, by rows and wrapped",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="a folder or hub name: notes where padding is wrong in it"
    )
    parser.add_argument(
        "--overflow",
        choices=("drop", "truncate", "split", "raise"),
        default="drop",
        help="what becomes of an example longer than a row (drop)",
    )


def _report(options: argparse.Namespace) -> int:
    if Path(options.data).suffix == ".npy":
        data = _lengths(options)
    else:
        data, kind = read_data(options)
        if kind in ("chats", "preferences"):
            data = tokenized_chats(data, options, num_proc=options.num_proc)
    report = packing_report(
        data,
        options.max_tokens,
        strategies=options.strategy,
        parallel=ParallelLayout(options.dp, options.tp, options.cp, options.fp8),
        overflow=options.overflow,
        batch_size=options.batch_size,
        batch_rows=options.batch_rows,
        model=_model_config(options),
        show=False,
    )
    print(json.dumps(report, indent=2) if options.json else report)
    return 0


def _model_config(options: argparse.Namespace) -> Any:
    """Load the config of ``--model``, without its weights; None if no model is named."""
    if options.model is None:
        return None
    transformers = needed_package("transformers", "--model")
    return transformers.AutoConfig.from_pretrained(options.model)


def _lengths(options: argparse.Namespace) -> Any:
    try:
        # mapped, not read: a header that lies about its size must not take that much memory
        lengths = np.load(options.data, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"{options.data}: there is no such file") from None
    except (ValueError, EOFError, OSError, OverflowError):
        lengths = None
    if not isinstance(lengths, np.ndarray):
        raise DataError(
            f"{options.data}: not a file of lengths that np.save wrote; write it with "
            'np.save("lengths.npy", lengths)'
        )
    note_unused(options, _OF_RECORDS, "lengths")
    if lengths.dtype.kind not in "iu":
        raise DataError(
            f"{options.data}: lengths must be integers, got {lengths.dtype}; save "
            "lengths.astype(int)"
        )
    if lengths.ndim != 1:
        raise DataError(f"{options.data}: lengths must be one flat array, got {lengths.ndim}-D")
    return lengths[: options.limit]


def add_audit(commands: Any) -> None:
    """Add the command ``audit``."""
    parser = add_command(
        commands,
        "audit",
        _audit,
        "find training targets that look right and are not; exit with 1 if there are any",
    )
    add_data(parser, "--train-all", max_tokens="the length at which examples are cut")


def _audit(options: argparse.Namespace) -> int:
    rows, _ = read_data(options)
    loaded = loaded_tokenizer(options)
    report = audit(
        rows,
        loaded,
        max_tokens=options.max_tokens,
        train_all=options.train_all,
        chat=chat_options(loaded, options),
    )
    print(
        json.dumps(report.to_dict(), indent=2) if options.json else wrapped(as_flags(str(report)))
    )
    return 0 if report.ok else 1
