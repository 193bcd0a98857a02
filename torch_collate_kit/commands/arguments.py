"""Arguments that several commands share, and the data read with them."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from torch_collate_kit.chat import ChatOptions, tokenize_chat_dataset
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import TokenizedDataset, read_records
from torch_collate_kit.preference import tokenize_preferences
from torch_collate_kit.reading.source import are_preferences, kind_of
from torch_collate_kit.vision import load_processor

FILES = (
    "a .jsonl or .json file (also with .gz or .zst), a .parquet or .arrow file, a saved dataset "
    "folder or a hub name, of chats, tokenized rows or rollouts"
)
_FORMS = (
    "chats (messages, conversations, prompt and completion, instruction and output), pairs "
    "(chosen and rejected), tokenized rows (input_ids) or rollouts (prompt_ids, response_ids)"
)
_OF_CHATS = ("train_on", "image_root", "num_proc", "max_length")
_FLAGS = {  # of arguments that messages of the library name
    "train_all=True": "--train-all",
    "train_on=": "--train-on ",
    "max_tokens=:": "--max-tokens:",
    "image_root=": "--image-root ",
    "pass image_root": "pass --image-root",
    "another image_root": "another --image-root",
}


def as_flags(text: str) -> str:
    """Return a message of the library with its arguments named as options of a command."""
    for argument, flag in _FLAGS.items():
        text = text.replace(argument, flag)
    return text


def wrapped(text: str) -> str:
    """Return text in lines of at most 80 columns, or of a narrower terminal; words stay whole."""
    width = max(40, min(80, shutil.get_terminal_size().columns))
    fill = partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    return re.sub(
        r"(?m)^( *)(.+)$",
        lambda line: fill(line[2], initial_indent=line[1], subsequent_indent=f"{line[1]}  "),
        text,
    )


def number(text: str) -> int:
    """Return a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        hint = "; name the file before the options" if Path(text).exists() else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1{hint}")
    return value


_SHARED: dict[str, dict[str, Any]] = {  # options of several commands
    "--split": {"default": "train", "help": "of a dataset with several (train)"},
    "--limit": {"type": number, "metavar": "N", "help": "read only the first N records"},
    "--tokenizer": {
        "metavar": "NAME",
        "help": "a folder or hub name: tokenizes chats, and shows tokens as text",
    },
    "--train-on": {
        "choices": ("all", "last", "each"),
        "default": "all",
        "help": "the turns of a chat that are trained (all)",
    },
    "--image-root": {"metavar": "FOLDER", "help": "where paths of images start"},
    "--json": {"action": "store_true", "help": "print JSON"},
    "--allow-empty": {"action": "store_true", "help": "answers without text are trained, too"},
    "--train-all": {"action": "store_true", "help": "rows without a loss target are meant"},
}
_ALWAYS = ("--split", "--limit", "--tokenizer", "--train-on", "--image-root", "--json")


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    """Return the parser of a new command."""
    about = f"{summary[0].upper()}{summary[1:]}."
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=about)
    parser.set_defaults(run=run)
    return parser


def add_data(
    parser: argparse.ArgumentParser, *others: str, what: str = FILES, **numbers: str
) -> None:
    """Add DATA, the options with which it is read, ``others``, and options that are ``numbers``."""
    parser.add_argument("data", metavar="DATA", help=what)
    for name in (*_ALWAYS, *others):
        parser.add_argument(name, **_SHARED[name])
    for name, text in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=number, metavar="N", help=text)


def read_rows(options: argparse.Namespace) -> tuple[Any, str | None]:
    """Return the ``datasets.Dataset``, and the kind of its rows if their columns tell."""
    try:
        rows = read_records(options.data, split=options.split)
    except DataError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.filename not in (None, options.data):
            where = "its copy goes to the cache of datasets; set HF_HOME to a folder to write to"
            raise DataError(f"{error}; {where}") from error
        raise
    if not len(rows):
        raise DataError(f"{options.data}: there is no record in it")
    if options.limit is not None:
        rows = rows.select(range(min(options.limit, len(rows))))
    kind: str | None = kind_of(rows.column_names)
    if are_preferences(rows.column_names):
        kind = "preferences"
    return rows, kind


def read_data(options: argparse.Namespace) -> tuple[Any, str]:
    """Return the ``datasets.Dataset``: "chats", "preferences", "tokens" or "rollouts"."""
    rows, kind = read_rows(options)
    if kind is None:
        names = ", ".join(rows.column_names)
        raise DataError(f"{options.data}: has the columns {names}; it must hold {_FORMS}")
    is_text = kind in ("chats", "preferences")
    if is_text and options.tokenizer is None:
        raise DataError(
            f"{options.data} holds {kind}, which only a tokenizer makes tokens of; pass "
            "--tokenizer with a folder or hub name"
        )
    if not is_text:
        note_unused(options, _OF_CHATS, {"tokens": "tokenized rows"}.get(kind, kind))
    return rows, kind


def note_unused(options: argparse.Namespace, names: Iterable[str], kind: str) -> None:
    """Print a note if options were given that change nothing for data of this ``kind``."""
    given = [name for name in names if getattr(options, name, None) not in (None, "all", "train")]
    if given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        print(f"note: {options.data} holds {kind}; not used: {flags}", file=sys.stderr)


def loaded_tokenizer(options: argparse.Namespace) -> Any:
    """Load the tokenizer or processor of the arguments; None if they name none."""
    if options.tokenizer is None:
        return None
    loaded = load_processor(options.tokenizer)
    if options.image_root is not None and not hasattr(loaded, "image_processor"):
        raise ValueError(
            f"--image-root is for images, and {options.tokenizer} is a tokenizer alone; name the "
            "folder or model of a processor"
        )
    return loaded


def chat_options(loaded: Any, options: argparse.Namespace) -> ChatOptions:
    """Return the chat options of the arguments, for the tokenizer or processor ``loaded``."""
    return ChatOptions(
        train_on=options.train_on,
        allow_empty=getattr(options, "allow_empty", False),
        image_root=options.image_root,
        pixels=not hasattr(loaded, "image_processor"),
    )


def tokenized_chats(
    rows: Any, options: argparse.Namespace, num_proc: int | None = None
) -> TokenizedDataset:
    """Return the dataset of chats or pairs as tokens, made in ``num_proc`` processes."""
    loaded = loaded_tokenizer(options)
    chosen = chat_options(loaded, options)
    are_pairs = are_preferences(rows.column_names)
    tokenize: Any = tokenize_preferences if are_pairs else tokenize_chat_dataset
    tokenized, _ = tokenize(rows, loaded, chosen, num_proc=num_proc)
    is_processor = hasattr(loaded, "image_processor")
    return TokenizedDataset(tokenized, vision=loaded if is_processor else None)
