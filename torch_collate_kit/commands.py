"""The commands ``report``, ``audit``, ``explain`` and ``template``."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from torch_collate_kit._checks import needed_package
from torch_collate_kit.batch import Batch
from torch_collate_kit.chat import ChatOptions, tokenize_chat_dataset
from torch_collate_kit.chat.options import ChatSetup
from torch_collate_kit.chat.preview import preview, verdict_table
from torch_collate_kit.chat.records import without_padding
from torch_collate_kit.chat.tokenize import tokenize_records
from torch_collate_kit.collators import PackedCollator, PaddedCollator, RolloutCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import TokenizedDataset, read_records
from torch_collate_kit.packing import ParallelLayout
from torch_collate_kit.packing.options import FP8_TOKENS, STRATEGIES
from torch_collate_kit.preference import tokenize_preferences
from torch_collate_kit.preference.tokenize import preference_examples
from torch_collate_kit.reading.keys import PER_TOKEN
from torch_collate_kit.reading.source import are_nested, are_preferences, kind_of
from torch_collate_kit.reporting import audit, packing_report
from torch_collate_kit.vision import load_processor

FILES = (
    "a .jsonl or .json file (also with .gz or .zst), a .parquet or .arrow file, a saved dataset "
    "folder or a hub name, of "
)
_ROWS = f"{FILES}chats, tokenized rows or rollouts"
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
    "pass text=": "pass --text",
}
_OF_RECORDS = ("split", "tokenizer", "train_on", "image_root", "num_proc")
_ROW = "row 0 of 1"


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


def whole_number(text: str) -> int:
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
    "--limit": {"type": whole_number, "metavar": "N", "help": "read only the first N records"},
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
    parser: argparse.ArgumentParser,
    *others: str,
    what: str = _ROWS,
    **numbers: str,
) -> None:
    """Add DATA, the options with which it is read, ``others``, and options that are ``numbers``."""
    parser.add_argument("data", metavar="DATA", help=what)
    for name in (*_ALWAYS, *others):
        parser.add_argument(name, **_SHARED[name])
    for name, text in numbers.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=whole_number, metavar="N", help=text
        )


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
            f"{options.data} holds {kind}, which need a tokenizer; pass "
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


def add_report(commands: Any) -> None:
    """Add the command ``report``."""
    summary = "compare padding and packing on your data, and recommend a row length"
    parser = add_command(commands, "report", _report, summary)
    add_data(
        parser,
        "--allow-empty",
        what=f"{_ROWS}; or an .npy file of lengths",
        batch_size="examples packed together (all)",
        dp="data-parallel size (1)",
        tp="tensor-parallel size (1)",
        cp="context-parallel size (1)",
        num_proc="processes that tokenize",
    )
    parser.set_defaults(dp=1, tp=1, cp=1)
    parser.add_argument("--fp8", choices=FP8_TOKENS, help="recipe that rows are padded for (none)")
    parser.add_argument(
        "--max-tokens", type=whole_number, nargs="+", metavar="N", help="row lengths to compare"
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
        type=whole_number,
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
    except Exception:  # a broken header raises many types, on Python 3.12 tokenize's own
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


def add_explain(commands: Any) -> None:
    """Add the command ``explain``."""
    summary = "show a record token by token: text, label, weight"
    parser = add_command(commands, "explain", _explain, summary)
    add_data(parser, "--train-all", "--allow-empty", max_tokens="cut it to N tokens")
    parser.add_argument("--row", type=int, default=0, metavar="N", help="which record (0)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--show",
        type=whole_number,
        default=60,
        metavar="N",
        help="tokens to show, first and last (60)",
    )
    shown.add_argument("--all", action="store_true", help="show all tokens")


def _explain(options: argparse.Namespace) -> int:
    rows, kind = read_data(options)
    num_records = len(rows)
    if not -num_records <= options.row < num_records:
        raise DataError(
            f"--row {options.row}: {options.data} has {num_records:,} records, 0 to "
            f"{num_records - 1:,}"
        )
    number = options.row % num_records
    tokenizer = loaded_tokenizer(options)
    most = None if options.all else options.show
    (record,), _ = without_padding([rows[number]], rows.features)
    batches = _batches(record, kind, number, options, tokenizer)
    found = [batch.explain(0, tokenizer, max_tokens=most) for batch in batches]
    is_one = kind != "preferences" and not _is_of_segments(rows[number])
    what = "example" if is_one else "segment"
    weight = rows[number].get("weight")
    for i, one in enumerate(found):
        place = f", {what} {i + 1} of {len(found)} of it" if len(found) > 1 else ""
        one.title = f"record {number:,} of {num_records:,}{place}{one.title.removeprefix(_ROW)}"
        one.title += "" if weight is None else f", weight {weight:g} of the record"
        for name in ("example", "segment"):  # the row holds nothing else
            one.columns.pop(name, None)
    if options.json:
        examples = [{"title": one.title, "tokens": one.records()} for one in found]
        print(json.dumps({"record": number, "examples": examples}, indent=2))
    else:
        print("\n\n".join(map(str, found)))
    return 0


def _batches(
    record: Any, kind: str, number: int, options: argparse.Namespace, tokenizer: Any
) -> list[Batch]:
    """Return a batch of one row for each example that the record makes."""
    try:
        if kind == "rollouts":
            if options.max_tokens is not None:
                note = "note: rollouts are never cut, so --max-tokens changes nothing"
                print(note, file=sys.stderr)
            return [RolloutCollator(0)([record])]
        examples = [record]
        if kind == "chats":
            examples = _tokenized(record, ChatSetup(tokenizer, chat_options(tokenizer, options)))
        shared: dict[str, Any] = {"train_all": options.train_all}
        collate: Any = PaddedCollator(0, **shared)
        if kind == "preferences":
            setup = ChatSetup(tokenizer, chat_options(tokenizer, options))
            record = _kept(preference_examples([record], setup, from_arrow=False))[0]
        if _is_of_segments(record):
            examples = _segments(record, collate)
        if options.max_tokens is not None:
            shared |= {"max_tokens": options.max_tokens, "overflow": "truncate"}
            collate = PackedCollator(0, **shared)
        return [collate([example]) for example in examples]
    except DataError as error:
        text = str(error).removeprefix("example 0: ").removeprefix("example 0 ")
        raise DataError(f"record {number}: {text}") from error


def _is_of_segments(record: Any) -> bool:
    return are_nested([record.get("input_ids", ())])


def _segments(record: Mapping[str, Any], collate: Any) -> list[dict[str, Any]]:
    """Return each segment of an example as one of its own."""
    known = {name: record[name] for name in (*PER_TOKEN, "weight") if name in record}
    collate([known])  # refuses what does not belong together
    return [
        {name: values if name == "weight" else values[i] for name, values in known.items()}
        for i in range(len(known["input_ids"]))
    ]


def _tokenized(record: Mapping[str, Any], setup: ChatSetup) -> list[dict[str, Any]]:
    """Return the examples of a chat that are trained."""
    (found,) = tokenize_records([record], setup, from_arrow=False)
    kept = _kept([found] if isinstance(found, DataError) else found)
    names = ("input_ids", "loss_mask", "weight")
    return [{name: example[name] for name in names if name in example} for example in kept]


def _kept(found: Sequence[dict[str, Any] | DataError]) -> list[dict[str, Any]]:
    """Return the examples of a record that are trained."""
    for example in found:
        if isinstance(example, DataError):
            raise example
    kept = [
        example for example in found if isinstance(example, dict) and not example["skip_reason"]
    ]
    if not kept and isinstance(found[0], dict):
        raise DataError(f"it is skipped, as nothing of it is trained: {found[0]['skip_reason']}")
    return kept


def add_template(commands: Any) -> None:
    """Add the command ``template``."""
    summary = "show what is trained with a chat template, and what it drops"
    parser = add_command(commands, "template", _template, summary)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME_OR_FILE",
        help="a tokenizer's folder or hub name, or a .jinja file",
    )
    parser.add_argument(
        "--all", type=Path, metavar="FOLDER", help="print a table of the .jinja files in a folder"
    )


def _template(options: argparse.Namespace) -> int:
    names = list(options.names)
    if options.all is not None:
        found = sorted(map(str, options.all.glob("*.jinja")))
        if not found:
            raise DataError(f"{options.all}: there is no .jinja file in it")
        names += found
    if not names:
        raise DataError("no template given: name a tokenizer or a .jinja file")
    one = len(names) == 1 and options.all is None
    print(wrapped(preview(names[0])) if one else verdict_table(names), end="")
    return 0
