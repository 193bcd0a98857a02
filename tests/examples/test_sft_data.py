"""What examples/sft.py makes of a dataset: what is held out of it, and what is broken in it."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import options
import pytest
import sft
import synthetic_chat
from datasets import Dataset

RECORD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
LINE = json.dumps(RECORD) + "\n"


def arguments(monkeypatch: pytest.MonkeyPatch, *given: object) -> Any:
    monkeypatch.setattr(sys, "argv", ["sft.py", *map(str, given)])
    return options.parse_arguments(options.argument_parser(), from_scratch=3e-3)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 conversations."""
    path = tmp_path_factory.mktemp("chats") / "chats.parquet"
    Dataset.from_list(synthetic_chat.make_corpus(120, seed=5)).to_parquet(path)
    return path


@pytest.mark.parametrize(
    ("data", "options", "num_trained", "num_held_out"),
    [
        ("120 chats", "", 114, 6),  # 5%
        ("120 chats", "--num-held-out 0", 120, 0),
        ("120 chats", "--num-held-out 100", 20, 100),
        ("8000 chats", "", 7650, 350),  # and no more
        ("made up", "--num-conversations 70", 70, 350),  # nothing that was asked for is lost
        ("made up", "--num-conversations 70 --num-held-out 7", 70, 7),
    ],
)
def test_what_is_held_out(
    monkeypatch: pytest.MonkeyPatch,
    chats: Path,
    tmp_path: Path,
    data: str,
    options: str,
    num_trained: int,
    num_held_out: int,
) -> None:
    """None is in both parts."""
    Dataset.from_list([RECORD] * 8000).to_parquet(tmp_path / "8000.parquet")
    paths = {"120 chats": chats, "8000 chats": tmp_path / "8000.parquet"}
    dataset = ["--dataset", paths[data]] if data in paths else []
    parts = sft.load_conversations(arguments(monkeypatch, *dataset, *options.split()))
    assert [len(part) for part in parts] == [num_trained, num_held_out]
    both = {json.dumps(record["messages"]) for part in parts for record in part}
    assert len(both) == (1 if data == "8000 chats" else num_trained + num_held_out)


BROKEN = {
    '{"foo": "a"}\n': "example 0",
    '{"messages": null}\n': "example 0",
    '{"messages": ["a"]}\n': "example 0",
    "": "there is no record in it",
    LINE + "17\n": "line 2 is not a JSON object",
    LINE + LINE[:30]: r"--dataset .*chats.jsonl: line 2 is not JSON: ",
}


@pytest.mark.parametrize("content", BROKEN)
def test_files_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str
) -> None:
    """As a command, without a traceback; also by the tokenizer that is trained on the file."""
    (tmp_path / "chats.jsonl").write_text(content * 3)
    arguments(monkeypatch, "--dataset", tmp_path / "chats.jsonl", "--cpu", "--output-dir", tmp_path)
    with pytest.raises(SystemExit, match=f"^sft.py: .*{BROKEN[content]}"):
        runpy.run_path(sft.__file__, run_name="__main__")
