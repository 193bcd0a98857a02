"""examples/sft.py --train-on each: conversations whose contexts share what they begin with."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import sft
import synthetic_chat

from tests.chat.chats import THINKS
from tests.examples.runs import refusal, run


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Conversations of three turns, for a template that drops the thinking of earlier ones."""
    train = functools.partial(synthetic_chat.train_tokenizer, chat_template=THINKS)
    monkeypatch.setattr(sft.synthetic_chat, "train_tokenizer", train)
    turns = [
        {"role": "user", "content": "Which number is next?"},
        {"role": "assistant", "content": "It is this one.", "reasoning_content": "Easy."},
    ]
    path = tmp_path / "chats.jsonl"
    records = [
        {"messages": [*turns * 3, {**turns[0], "content": f"{n}?"}, turns[1]]} for n in range(20)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_losses_are_those_without_sharing(
    chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = f"--dataset {chats} --train-on each --num-held-out 2 --batch-size 6 --max-steps 3"
    options += " --max-tokens 512 --cpu --threads 1 --share-prefixes"
    shared, plain = (run(f"{options} {how}", tmp_path / how) for how in ("auto", "no"))
    printed = capsys.readouterr().out
    assert "72 contexts of turns: " in printed
    assert "each; prefixes are shared\n" in printed
    assert "each; prefixes are not shared\n" in printed
    assert shared.losses == pytest.approx(plain.losses, rel=1e-5)
    assert shared.grad_norms == pytest.approx(plain.grad_norms, rel=1e-4)
    assert shared.summary["held_out_loss"] == pytest.approx(
        plain.summary["held_out_loss"], rel=1e-5
    )
    assert [s["tokens"] for s in shared.steps] == [s["tokens"] for s in plain.steps]
    assert shared.summary["tokens_per_cell"] > 1.5
    assert 0 <= shared.summary["padding"] < 1
    assert "tokens_per_cell" not in plain.summary


def test_large_conversations_are_cut_between_turns(
    chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = f"--dataset {chats} --train-on each --num-held-out 2 --batch-rows 4 --max-steps 2"
    small = run(f"{options} --max-tokens 128 --cpu --threads 1", tmp_path)
    assert (
        "18 conversations are longer than a row, and cut between turns" in capsys.readouterr().out
    )
    assert small.summary["tokens_per_cell"] > 1.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--share-prefixes yes", "contexts share them in packed rows, with --train-on each"),
        ("--share-prefixes yes --train-on each --no-packing", "contexts share them in packed rows"),
        ("--train-on each --compile", "paths of shared prefixes differ in size; pass --share-pre"),
    ],
)
def test_options_that_contradict_each_other(tmp_path: Path, options: str, message: str) -> None:
    assert message in refusal(options, tmp_path)
