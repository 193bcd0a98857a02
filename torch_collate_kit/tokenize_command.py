"""The command ``tokenize``, of chats, pairs or texts, into a folder."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_collate_kit._checks import plural
from torch_collate_kit._version import __version__
from torch_collate_kit.chat import tokenize_chat_dataset, tokenize_documents
from torch_collate_kit.chat.cache_keys import cache_key
from torch_collate_kit.commands import (
    FILES,
    add_command,
    add_data,
    chat_options,
    loaded_tokenizer,
    note_unused,
    read_rows,
)
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import read_records
from torch_collate_kit.preference import tokenize_preferences

_NOTE = "tokenize.json"


def add_tokenize(commands: Any) -> None:
    """Add the command ``tokenize``."""
    summary = "tokenize pairs, chats or texts into a folder; nothing, if it is up to date"
    parser = add_command(commands, "tokenize", _tokenize, summary)
    add_data(
        parser,
        "--allow-empty",
        what=f"{FILES}pairs, chats or texts; or a .txt file, which is one document",
        max_length="the most tokens of an example",
        num_proc="processes",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="where to write")
    parser.add_argument("--text", metavar="COLUMN", help="tokenize this column of texts (text)")


def _tokenize(options: argparse.Namespace) -> int:
    rows, kind = read_rows(options)
    text = options.text or "text"
    if options.text or (kind is None and text in rows.column_names):
        kind = "texts"
        note_unused(options, ("train_on", "max_length", "image_root"), kind)
    if kind not in ("preferences", "chats", "texts"):
        raise DataError(
            f"{options.data} holds {kind or f'the columns {rows.column_names}'}; tokenize takes "
            "pairs, chats and texts: name a column of texts with --text"
        )
    if options.tokenizer is None:
        raise DataError(f"{options.data} holds {kind}; name a tokenizer with --tokenizer")
    loaded = loaded_tokenizer(options)
    chat = replace(chat_options(loaded, options), pixels=True, max_length=options.max_length)
    of_key = {"kind": kind, "text": text, "version": __version__, "options": [*vars(chat).items()]}
    note: dict[str, Any] = {"key": cache_key("tokenize", loaded, of_key), "content": _digest(rows)}
    out = options.out.resolve()  # a link to a folder stays one
    found = _note_in(out)
    if note.items() <= found.items():
        read_records(out)  # its files are there
        print(json.dumps(found) if options.json else f"{options.out} is up to date")
        return 0
    if out.exists() and not found and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists, and tokenize did not write it; name another --out")
    how: Any = {"num_proc": options.num_proc}
    if kind == "texts":
        tokens, skipped = tokenize_documents(rows, loaded, text=text, **how)
    else:
        make: Any = tokenize_chat_dataset if kind == "chats" else tokenize_preferences
        tokens, skipped = make(rows, loaded, chat, **how)
    note |= {"kind": kind, "examples": len(tokens), "skipped": dict(skipped)}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        half = Path(folder, "half")  # a folder is whole, or not there
        tokens.save_to_disk(half)
        (half / _NOTE).write_text(json.dumps(note, indent=2))
        shutil.rmtree(out, ignore_errors=True)
        os.replace(half, out)
    done = f"{options.out}: {plural(len(tokens), 'example')} of {kind}"
    print(json.dumps(note) if options.json else done)
    return 0


def _note_in(out: Path) -> dict[str, Any]:
    """Return the note in a folder that the command wrote; none where there is no such folder."""
    path = out / _NOTE
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text()).items())
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path}: is not what tokenize wrote; remove {out}") from error


def _digest(rows: Any) -> str:
    """Return a digest of the rows' content, whatever files they are in."""
    digest = hashlib.sha256(str(rows.features).encode())
    for part in rows.with_format("arrow").iter(1000):
        for batch in part.combine_chunks().to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()
