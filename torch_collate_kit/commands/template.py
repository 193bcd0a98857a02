"""``template``: what a chat template trains, and what it drops."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from torch_collate_kit.chat.preview import preview, verdict_table
from torch_collate_kit.commands.terminal import use_cache_if_offline

__all__ = ["add_template"]


def add_template(commands: Any) -> None:
    """The command's parser."""
    parser = commands.add_parser(
        "template", help="show what is trained with a chat template, and what it drops"
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME_OR_FILE",
        help="a tokenizer's folder or hub name, or a .jinja file",
    )
    parser.add_argument(
        "--all", type=Path, metavar="FOLDER", help="print a table of the .jinja files in a folder"
    )
    parser.set_defaults(run=partial(_run, parser))


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    names = list(options.names)
    if options.all is not None:
        names += sorted(map(str, options.all.glob("*.jinja")))
    if not names:
        parser.error("no template given: name a tokenizer or a .jinja file")
    use_cache_if_offline(names)
    one = len(names) == 1 and options.all is None
    print(preview(names[0]) if one else verdict_table(names), end="")
    return 0
