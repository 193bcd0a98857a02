"""The command line: ``torch-collate-kit report | audit | explain | template | tokenize``."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch_collate_kit._version import __version__
from torch_collate_kit.chat.dataset import bars_of_rank_0
from torch_collate_kit.commands import add_audit, add_explain, add_report, add_template, as_flags
from torch_collate_kit.errors import StateError
from torch_collate_kit.tokenize_command import add_tokenize

__all__ = ["main", "parser"]

_CLOSED_PIPE, _INTERRUPTED = 141, 130  # what a shell says of a process that such a signal ended
_MOST = 600  # letters of an error
_SETTINGS = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "critical",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",  # else datasets sends a request per file it reads
}
_NO_BARS = {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their options."""
    found = argparse.ArgumentParser(
        prog="torch-collate-kit",
        description="What packing saves, what a dataset hides, what a chat template trains.",
    )
    found.add_argument("--version", action="version", version=__version__)
    commands = found.add_subparsers(dest="command", required=True)
    for add in (add_report, add_audit, add_explain, add_template, add_tokenize):
        add(commands)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: it did what it should. 1: the audit found errors or warnings. 2: wrong usage, or data that
    cannot be read (argparse exits with it, too).

    >>> main(["template", "no_such.jinja"])
    2
    """
    options = parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that is not UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _quiet():
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
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 2
    return code


@contextmanager
def _quiet() -> Iterator[None]:
    """Progress bars only on a terminal, and no chatter of the libraries underneath."""
    settings = _SETTINGS | ({} if sys.stderr.isatty() else _NO_BARS)
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)  # read when these libraries are imported
    handler = logging.StreamHandler()  # on stderr
    handler.setFormatter(logging.Formatter("note: %(message)s"))
    logger = logging.getLogger("torch_collate_kit")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(), bars_of_rank_0(hide=not sys.stderr.isatty()):
            warnings.showwarning = _show_warning
            yield
    finally:
        logger.removeHandler(handler)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"note: {message}", file=sys.stderr)


def _one_line(error: BaseException) -> str:
    """Return the message of an error in one line, cut to what fits on a screen."""
    text = as_flags(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= _MOST else text[:_MOST] + "..."


if __name__ == "__main__":
    sys.exit(main())
