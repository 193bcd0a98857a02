"""The command line: ``python -m torch_collate_kit template NAME_OR_FILE``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_collate_kit.chat.preview import preview, verdict_table

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, or 1 if it failed; argparse exits with 2.

    >>> main(["template", "no_such.jinja"])
    1
    """
    parser = argparse.ArgumentParser(prog="python -m torch_collate_kit")
    commands = parser.add_subparsers(dest="command", required=True)
    template = commands.add_parser(
        "template", help="show what is trained with a chat template, and what it drops"
    )
    template.add_argument(
        "names",
        nargs="*",
        metavar="NAME_OR_FILE",
        help="a tokenizer's folder or hub name, or a .jinja file",
    )
    template.add_argument(
        "--all", type=Path, metavar="FOLDER", help="print a table of the .jinja files in a folder"
    )
    options = parser.parse_args(argv)
    names = list(options.names)
    if options.all is not None:
        names += sorted(map(str, options.all.glob("*.jinja")))
    if not names:
        template.error("no template given: name a tokenizer or a .jinja file")
    try:
        one = len(names) == 1 and options.all is None
        print(preview(names[0]) if one else verdict_table(names), end="")
    except (OSError, ValueError, ImportError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
