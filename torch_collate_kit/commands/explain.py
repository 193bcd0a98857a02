"""The commands ``explain``, of a record, and ``template``, of a chat template."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_collate_kit.batch import Batch
from torch_collate_kit.chat.options import ChatSetup
from torch_collate_kit.chat.preview import preview, verdict_table
from torch_collate_kit.chat.records import without_padding
from torch_collate_kit.chat.tokenize import tokenize_records
from torch_collate_kit.collators import PackedCollator, PaddedCollator, RolloutCollator
from torch_collate_kit.commands.arguments import (
    add_command,
    add_data,
    chat_options,
    loaded_tokenizer,
    number,
    read_data,
    wrapped,
)
from torch_collate_kit.errors import DataError
from torch_collate_kit.preference.tokenize import preference_examples
from torch_collate_kit.reading.keys import PER_TOKEN
from torch_collate_kit.reading.source import are_nested

_ROW = "row 0 of 1"


def add_explain(commands: Any) -> None:
    """Add the command ``explain``."""
    summary = "show a record token by token: text, label, weight"
    parser = add_command(commands, "explain", _explain, summary)
    add_data(parser, "--train-all", "--allow-empty", max_tokens="cut it to N tokens")
    parser.add_argument("--row", type=int, default=0, metavar="N", help="which record (0)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--show", type=number, default=60, metavar="N", help="tokens to show, first and last (60)"
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
        of = f", {what} {i + 1} of {len(found)} of it" if len(found) > 1 else ""
        one.title = f"record {number:,} of {num_records:,}{of}{one.title.removeprefix(_ROW)}"
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
        {name: of if name == "weight" else of[i] for name, of in known.items()}
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
    for of in found:
        if isinstance(of, DataError):
            raise of
    kept = [of for of in found if isinstance(of, dict) and not of["skip_reason"]]
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
