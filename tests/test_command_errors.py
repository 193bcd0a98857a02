"""What goes wrong on the command line: an error of one line that names the way out."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from tests.command import byte_tokenizer
from tests.test_command_line import CHATS, Run, chat, folder, run

__all__ = ["folder", "run"]  # fixtures

# The command, and how its message begins; "CHAT" names the tokenizer
ERRORS = {
    "no file": ("report no.jsonl", "no.jsonl: there is no such file"),
    "no lengths": ("report no.npy", "no.npy: there is no such file"),
    "no folder": ("report ./no", "./no: there is no such file or folder"),
    "an empty file": ("audit empty.jsonl", "empty.jsonl: there is no record in it"),
    "a broken line": ("report broken.jsonl CHAT", "broken.jsonl: line 2 is not JSON: "),
    "a broken line of a gz": ("report broken.jsonl.gz", "broken.jsonl.gz: line 2 is not JSON: "),
    "a gz that is none": ("report none.jsonl.gz", "none.jsonl.gz: cannot be decompressed: Not a"),
    "a cut gz": ("report cut.json.gz", "cut.json.gz: cannot be decompressed: Compressed"),
    "a zst that is none": ("report none.jsonl.zst", "none.jsonl.zst: cannot be decompressed: zstd"),
    "no compressed file": ("report no.jsonl.zst", "no.jsonl.zst: there is no such file"),
    "another kind of file": ("report data.csv", "data.csv: not a kind of file that is read (.json"),
    "other columns": ("report text.jsonl", "text.jsonl: has the columns text; it must hold chats "),
    "no array": ("report junk.npy", "junk.npy: not a file of lengths that np.save wrote; write it"),
    "one number": ("report one.npy", "one.npy: lengths must be one flat array, got 0-D"),
    "lengths that are not whole": ("report floats.npy", "floats.npy: lengths must be integers, go"),
    "no tokenizer": ("explain chats.jsonl", "chats.jsonl holds chats, which need a tokenizer; pas"),
    "a folder without a tokenizer": (
        "report chats.jsonl --tokenizer folder",
        "the folder 'folder' holds no processor or tokenizer that can be loaded: ",
    ),
    "a template in such a folder": ("template folder", "'folder' is not a .jinja file, and a toke"),
    "a folder without templates": ("template --all folder", "folder: there is no .jinja file in i"),
    "a tokenizer that is not there": (
        "report chats.jsonl --tokenizer ./none",
        "'./none' is neither a folder nor a name on the hub with a processor or tokenizer ",
    ),
    "no template": ("explain chats.jsonl --tokenizer bare", ""),
    "no such record": ("explain tokens.jsonl --row 2", "--row 2: tokens.jsonl has 2 records, 0 to"),
    "a record that is not trained": ("explain question.jsonl CHAT", "record 0: it is skipped, as"),
    "a record that is refused": ("explain target.jsonl", "record 0: has 'extra' and no loss targe"),
    "images without a processor": (
        "audit chats.jsonl CHAT --image-root .",
        "--image-root is for images, and tokenizer is a tokenizer alone; ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(ERRORS))
def test_errors_are_one_line_that_names_the_way_out(name: str, run: Run) -> None:
    Path("empty.jsonl").touch()
    Path("folder").mkdir()
    Path("broken.jsonl").write_text(json.dumps(CHATS[0]) + '\n{"messages": [\n')
    Path("broken.jsonl.gz").write_bytes(gzip.compress(b'{"input_ids": [5]}\n{"input_ids"\n'))
    Path("cut.json.gz").write_bytes(gzip.compress(b'[{"input_ids": [5]}]')[:-9])
    for packed in ("none.jsonl.gz", "none.jsonl.zst"):
        Path(packed).write_text(json.dumps({"input_ids": [5]}))
    Path("data.csv").write_text("a,b\n")
    Path("text.jsonl").write_text('{"text": "hi"}\n')
    Path("junk.npy").write_text("junk")
    Path("question.jsonl").write_text(json.dumps(chat("who?")))
    Path("target.jsonl").write_text('{"input_ids": [5, 6], "extra": 1}')
    np.save("floats.npy", np.array([1.5]))
    np.save("one.npy", np.array(5))
    bare = byte_tokenizer("")
    bare.chat_template = None
    bare.save_pretrained("bare")
    arguments, message = ERRORS[name]
    code, out, err = run(*arguments.replace("CHAT", "--tokenizer tokenizer").split())
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    if name == "no template":
        assert "has no chat_template; use the tokenizer of the model's chat version" in err
    if name == "a record that is refused":
        assert "pass --train-all to train every token" in err
        assert run("explain", "target.jsonl", "--train-all")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "required: command"),
        (("report",), "required: DATA"),
        (("report", "lengths.npy", "--max-tokens", "0"), "'0' is not a whole number of at least 1"),
        (("report", "lengths.npy", "--max-tokens", "4k"), "'4k' is not a whole number"),
        (("report", "--dp", "lengths.npy"), "at least 1; name the file before the options"),
        (("report", "lengths.npy", "--strategy", "best"), "invalid choice: 'best'"),
        (("explain", "tokens.jsonl", "--all", "--show", "3"), "not allowed with"),
        (("unknown",), "invalid choice: 'unknown'"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str, run: Run) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        ("report lengths.npy --split test --num-proc 2", "holds lengths; not used: --split, --num"),
        ("audit tokens.jsonl --train-on last", "holds tokenized rows; not used: --train-on\n"),
        ("explain rollouts.jsonl --image-root .", "holds rollouts; not used: --image-root\n"),
        ("audit tokens.jsonl --max-tokens 9", ""),
    ],
)
def test_options_that_change_nothing_are_named(arguments: str, note: str, run: Run) -> None:
    err = run(*arguments.split())[2]
    assert (note in err) if note else not err
