"""``audit``: supervision that looks healthy and is not."""

from __future__ import annotations

import argparse
import json
from typing import Any

from torch_collate_kit.commands.arguments import (
    add_data_arguments,
    chat_options,
    number,
    read_data,
)
from torch_collate_kit.reporting import audit

__all__ = ["add_audit"]


def add_audit(commands: Any) -> None:
    """The command's parser."""
    parser = commands.add_parser(
        "audit",
        help="find training targets that look right and are not",
        description="Find training targets that look right and are not. Exits with 1 if there "
        "are errors or warnings.",
    )
    add_data_arguments(parser)
    parser.add_argument(
        "--max-tokens", type=number, metavar="N", help="the length at which examples are cut"
    )
    parser.add_argument(
        "--train-all", action="store_true", help="tokenized rows without a loss target are meant"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    data = read_data(options)
    chosen: dict[str, Any] = {}
    if options.tokenizer is not None:
        loaded = chat_options(options)
        chosen["tokenizer"] = loaded.get("processor", loaded.get("tokenizer"))
    report = audit(
        data.rows,
        max_tokens=options.max_tokens,
        train_all=options.train_all,
        train_on=options.train_on,
        image_root=options.image_root,
        **chosen,
    )
    print(json.dumps(report.to_dict(), indent=2) if options.json else report)
    return 0 if report.ok else 1
