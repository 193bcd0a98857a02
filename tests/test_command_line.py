"""python -m torch_collate_kit report, audit, explain: what they print, exit codes, errors."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from tests.command import as_flags, byte_tokenizer, preview, run_command
from torch_collate_kit.reporting import audit, packing_report

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = "chats.jsonl --tokenizer tokenizer"
Run = Callable[..., tuple[int, str, str]]


def chat(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)]}


CHATS = [chat("2+2?", "4"), chat("3+3?", "6", "sure?", "yes"), chat("hello there", "good day")]
TOKENS = [
    {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
    {"input_ids": [5, 6], "labels": [-100, 6]},
]
ROLLOUTS = [
    {"prompt_ids": [5, 6], "response_ids": [7, 8], "rewards": 1.0, "loss_mask": [1, 1]},
    {"prompt_ids": [5], "response_ids": [7, 8, 9], "rewards": 0.0, "loss_mask": [1, 0, 1]},
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data of every kind, made once."""
    return write_data(tmp_path_factory.mktemp("data"))


def write_data(at: Path, **more: list[dict[str, Any]]) -> Path:
    for name, rows in {"chats": CHATS, "tokens": TOKENS, "rollouts": ROLLOUTS, **more}.items():
        (at / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    np.save(at / "lengths.npy", np.array([5, 3, 9, 2]))
    byte_tokenizer(TEMPLATE).save_pretrained(at / "tokenizer")
    return at


@pytest.fixture(autouse=True)
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a copy of the data."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def called(*arguments: str) -> tuple[int, str, str]:
        code = int(run_command(*arguments) or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return called


# ---- report


def test_a_report_as_json_is_that_of_the_function(run: Run) -> None:
    options = ("--max-tokens", "10", "--strategy", "sequential", "balanced", "--dp", "2")
    code, out, err = run("report", "lengths.npy", "--json", *options, "--overflow", "split")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert [c["strategy"] for c in report["candidates"]] == ["padded", "sequential", "balanced"]
    assert report["options"]["dp"] == 2
    assert report["options"]["overflow"] == "split"
    for name in ("tokens", "rollouts"):
        code, out, _ = run("report", f"{name}.jsonl", "--json", "--max-tokens", "10")
        rows = {"tokens": [4, 2], "rollouts": [4, 4]}[name]
        expected = packing_report(rows, 10, show=False)
        timeless = [{**c, "plan_seconds": 0} for c in expected["candidates"]]
        found = [{**c, "plan_seconds": 0} for c in json.loads(out)["candidates"]]
        assert found == timeless
        assert json.loads(out)["data"] == expected["data"]


# ---- audit


def test_an_audit_says_by_its_exit_code_whether_there_are_findings(run: Run) -> None:
    code, out, err = run(*f"audit {CHAT} --max-tokens 99".split())
    assert (code, err) == (0, "")
    assert out.startswith("audit of 3 rows (")
    code, out, _ = run(*f"audit {CHAT} --max-tokens 12".split())
    assert code == 1
    assert "warning: prompt_longer_than_row" in out
    code, out, _ = run("audit", "tokens.jsonl", "--json")
    assert code == 0
    assert json.loads(out)["num_tokens"] == 6


def test_compressed_files_are_read_as_what_is_in_them(run: Run) -> None:
    """gzip and Zstandard, in several frames as parallel compressors write them."""
    lines = [json.dumps(row).encode() + b"\n" for row in CHATS]
    zstd = partial(pa.compress, codec="zstd", asbytes=True)
    for name, pack in {"gz": gzip.compress, "zst": zstd}.items():
        Path(f"chats.jsonl.{name}").write_bytes(pack(lines[0]) + pack(lines[1] + lines[2]))
        Path(f"chats.json.{name}").write_bytes(pack(b"[" + b",".join(lines) + b"]"))
    for command in (("audit",), ("explain", "--row", "2")):
        plain = run(*command, "chats.jsonl", "--tokenizer", "tokenizer")
        for name in ("jsonl.gz", "jsonl.zst", "json.gz", "json.zst"):
            assert run(*command, f"chats.{name}", "--tokenizer", "tokenizer") == plain, name


def test_audit_and_template_fit_80_columns_and_break_no_word(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("one.jinja").write_text(TEMPLATE)
    long = "x" * 90
    rows = [chat(f"a-b {long} " + "some words " * 9, text) for text in ("a", "b")]
    Path("two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for columns, width in (("200", 80), ("60", 60)):
        monkeypatch.setenv("COLUMNS", columns)
        report = as_flags(str(audit(rows, AutoTokenizer.from_pretrained("tokenizer"))))
        for printed, whole in (
            (run("audit", "two.jsonl", "--tokenizer", "tokenizer")[1], f"{report}\n"),
            (run("template", "one.jinja")[1], preview("one.jinja")),
        ):
            lines = printed.splitlines()
            assert max(map(len, whole.splitlines())) > 80
            assert all(len(line) <= width or " " not in line.strip() for line in lines), printed
            assert printed.split() == whole.split()


# ---- pairs


def test_pairs_are_reported_audited_and_explained(run: Run, folder: Path) -> None:
    pair = {"input_ids": [[5, 6, 7, 8], [5, 6, 9]], "loss_mask": [[0, 0, 1, 1], [0, 0, 1]]}
    rated = {"label": True, "weight": 0.5}
    rows = [pair | rated | {"input_ids": [[5, 6, 7, 8 + i], [5, 6, 9]]} for i in range(3)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for command, start in (
        ("report pairs.jsonl --max-tokens 14", "3 examples of 6 segments, 21 tokens"),
        ("audit pairs.jsonl", "audit of 3 rows (21 tokens): nothing found"),
        ("explain pairs.jsonl --row 2", "record 2 of 3, segment 1 of 2"),
    ):
        code, out, err = run(*command.split())
        assert (code, err, out.startswith(start)) == (0, "", True)
    titles = [line for line in out.splitlines() if line.startswith("record")]
    of, weight = "record 2 of 3, segment {} of 2 of it: ", ", weight 0.5 of the record"
    assert titles == [
        f"{of.format(1)}4 tokens in 4 cells, 2 trained{weight}",
        f"{of.format(2)}3 tokens in 3 cells, 1 trained{weight}",
    ]


# ---- explain


def test_a_chat_is_explained(run: Run) -> None:
    code, out, err = run(*f"explain {CHAT} --row 1 --all".split())
    assert (code, err) == (0, "")
    title, header, *lines = out.splitlines()
    assert title.startswith("record 1 of 3: ")
    assert title.endswith(" trained")
    assert header.split() == ["cell", "id", "text", "position", "label", "weight"]
    trained = [line.split()[2] for line in lines if line.split()[-1] == "1"]
    assert trained == ["'6'", "'<|im_end|>'", "'y'", "'e'", "'s'", "'<|im_end|>'"]
    last = run(*f"explain {CHAT} --row -1 --show 4".split())[1]
    assert last.startswith("record 2 of 3: ")
    assert len(last.splitlines()) == 2 + 4 + 1


def test_tokens_and_rollouts_are_explained(run: Run) -> None:
    assert run("explain", "tokens.jsonl", "--row", "1")[:2] == (
        0,
        "record 1 of 2: 2 tokens in 2 cells, 1 trained\n"
        "cell  id  position  label  weight\n"
        "   0   5         0      -       -\n"
        "   1   6         1      6       1\n",
    )
    assert run("explain", "tokens.jsonl", "--max-tokens", "3")[1].startswith(
        "record 0 of 2: 3 tokens in 3 cells, 1 trained\n"
    )
    assert "rewards" in run("explain", "rollouts.jsonl", "--row", "1")[1]
    record = {"messages": [{"role": role, "content": "a"} for role in ("user", "assistant")]}
    Path("weighted.jsonl").write_text(json.dumps(record | {"weight": 0.5}))
    title, _, *lines = run("explain", "weighted.jsonl", "--tokenizer", "tokenizer")[1].splitlines()
    assert title.endswith(" trained, weight 0.5 of the record")
    assert [line.split()[-1] for line in lines if line.split()[-1] != "-"] == ["0.5", "0.5"]
    code, out, _ = run("explain", "tokens.jsonl", "--tokenizer", "tokenizer", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["record"] == 0
    assert [token["id"] for token in found["examples"][0]["tokens"]] == [5, 6, 7, 8]
    assert found["examples"][0]["tokens"][3]["label"] == 8
    texts = [token["text"] for token in found["examples"][0]["tokens"]]
    assert texts == [repr(byte_tokenizer(TEMPLATE).decode([i])) for i in (5, 6, 7, 8)]


# ---- what goes wrong: one line that names the way out

# The command, and how its message begins; "CHAT" names the tokenizer
ERRORS = {
    "no file": ("report no.jsonl", "no.jsonl: there is no such file"),
    "no lengths": ("report no.npy", "no.npy: there is no such file"),
    "no folder": ("report ./no", "./no: there is no such file or folder"),
    "an empty file": ("audit nothing.jsonl", "nothing.jsonl: there is no record in it"),
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
    "pairs without a tokenizer": ("audit pairs.jsonl", "pairs.jsonl holds preferences, which need"),
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
    Path("nothing.jsonl").touch()
    Path("pairs.jsonl").write_text('{"prompt": "Is it?", "chosen": "Yes", "rejected": "No"}')
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


# ---- the process


ASKED = """
import sys
def asked(event, arguments):
    if event.startswith("socket.getaddrinfo"):
        print("asked for", arguments[0], file=sys.stderr)
sys.addaudithook(asked)
"""


def command(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(
        [sys.executable, "-m", "torch_collate_kit", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def test_a_process_of_its_own_says_nothing_beside_its_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it asks for no address: datasets would count the reading of a local file."""
    monkeypatch.delenv("HF_UPDATE_DOWNLOAD_COUNTS")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(ASKED)
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"))
    with command("report", "chats.jsonl", "--tokenizer", "tokenizer", "--json") as process:
        out, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["data"]["num_examples"] == 3


def test_a_pipe_that_is_closed_early() -> None:
    Path("long.jsonl").write_text(json.dumps({"input_ids": [*range(20_000)]}))
    with command("explain", "long.jsonl", "--all") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("record 0 of 1: 20,000 tokens")
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=600) == 141


def test_an_interrupt() -> None:
    """A fifo without a writer: the command waits in open() until it is interrupted."""
    os.mkfifo("lengths.fifo.npy")
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's "&" ignores it
    with command("report", "lengths.fifo.npy", preexec_fn=default) as process:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:  # until Python is in the command
            try:
                descriptor = os.open("lengths.fifo.npy", os.O_WRONLY | os.O_NONBLOCK)
                break
            except OSError:
                time.sleep(0.05)
        process.send_signal(signal.SIGINT)  # while it reads: without the writer, the file would end
        out, err = process.communicate(timeout=600)
        os.close(descriptor)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
