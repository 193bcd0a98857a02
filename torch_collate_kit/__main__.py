"""The command line: ``python -m torch_collate_kit report | audit | explain | step | template``."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from torch_collate_kit._version import __version__
from torch_collate_kit.commands.audit import add_audit
from torch_collate_kit.commands.explain import add_explain
from torch_collate_kit.commands.report import add_report
from torch_collate_kit.commands.step import add_step
from torch_collate_kit.commands.template import add_template
from torch_collate_kit.commands.terminal import one_line, quiet
from torch_collate_kit.errors import StateError

__all__ = ["main"]

_CLOSED_PIPE, _INTERRUPTED = 141, 130  # what a shell says of a process that such a signal ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: it did what it should. 1: the audit found errors or warnings. 2: wrong usage, or data that
    cannot be read (argparse exits with it, too).

    >>> main(["template", "no_such.jinja"])
    2
    """
    parser = argparse.ArgumentParser(
        prog="python -m torch_collate_kit",
        description="What packing saves, what a dataset hides, what a step and a template train.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (add_report, add_audit, add_explain, add_step, add_template):
        add(commands)
    options = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that is not UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with quiet():
            code: int = options.run(options)
        if sys.stdout is not None:  # closed by the shell: `>&-`
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except (OSError, ValueError, TypeError, ImportError, OverflowError, StateError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
