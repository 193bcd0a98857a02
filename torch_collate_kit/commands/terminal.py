"""What a command says beside its result: progress, warnings and errors, on stderr."""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch_collate_kit.loading.dataset.files import is_hub_name

__all__ = ["one_line", "quiet", "use_cache_if_offline"]

_MOST = 600
_ERRORS_ONLY = {"TRANSFORMERS_VERBOSITY": "error", "DATASETS_VERBOSITY": "critical"}
_NO_BARS = {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
_FLAGS = {"train_all=True": "--train-all"}  # as messages of the library name it
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
_SETTINGS = (*_ERRORS_ONLY, *_NO_BARS, *_OFFLINE)
_HUB = "huggingface.co"
_OTHER_WAYS = ("HF_ENDPOINT", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", *_OFFLINE)
_SECONDS = 5


@contextmanager
def quiet() -> Iterator[None]:
    """Progress bars only on a terminal, and no chatter of the libraries underneath."""
    before = {name: os.environ.get(name) for name in _SETTINGS}
    shown = {} if sys.stderr.isatty() else _NO_BARS
    os.environ.update({**_ERRORS_ONLY, **shown})  # read when these libraries are imported
    datasets: Any = sys.modules.get("datasets")  # imported before, by a program
    had_bars = bool(datasets and shown and not datasets.are_progress_bars_disabled())
    if had_bars:
        datasets.disable_progress_bars()
    handler = logging.StreamHandler()  # on stderr
    handler.setFormatter(logging.Formatter("note: %(message)s"))
    logger = logging.getLogger("torch_collate_kit")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
    finally:
        logger.removeHandler(handler)
        if had_bars:
            datasets.enable_progress_bars()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def use_cache_if_offline(names: Iterable[str | None]) -> None:
    """Where a name is of the hub, and the hub cannot be reached, read what is in the cache.

    The libraries underneath would try again for half a minute, for each of many files. To be called
    before they are imported.
    """
    if not any(name and is_hub_name(name) for name in names) or any(map(os.getenv, _OTHER_WAYS)):
        return
    try:
        socket.create_connection((_HUB, 443), timeout=_SECONDS).close()
    except OSError:
        os.environ.update(_OFFLINE)
        print(f"note: {_HUB} cannot be reached; only what is in the cache is read", file=sys.stderr)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"note: {message}", file=sys.stderr)


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks, and without what would fill the screen.

    >>> one_line(ValueError("one\\n  two: pass train_all=True"))
    'one two: pass --train-all'
    """
    text = " ".join(str(error).split()) or type(error).__name__
    for argument, flag in _FLAGS.items():
        text = text.replace(argument, flag)
    return text if len(text) <= _MOST else text[:_MOST] + "..."
