"""What examples/sft.py makes of a dataset: what is held out of it, and what is broken in it."""

from __future__ import annotations

import functools
import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import options
import pytest
import sft
import synthetic_chat
import torch
import transformers
from datasets import Dataset
from safetensors.torch import load_file
from transformers.integrations.peft import MIN_PEFT_VERSION

from tests.chat.chats import THINKS
from tests.examples.runs import refusal, run

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


# --- examples/sft.py --train-on each: conversations whose contexts share what they begin with


@pytest.fixture
def talks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
    talks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = f"--dataset {talks} --train-on each --num-held-out 2 --batch-size 6 --max-steps 3"
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


def test_conversations_that_are_longer_than_a_row_are_not_cut(talks: Path, tmp_path: Path) -> None:
    options = f"--dataset {talks} --train-on each --num-held-out 2 --batch-rows 4 --max-steps 2"
    message = refusal(f"{options} --max-tokens 128 --cpu --threads 1", tmp_path)
    assert "no conversation fits in --max-tokens 128; raise it" in message


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


# --- Adapters in examples/sft.py: trained alone, saved alone, and resumed exactly


SMALL = "--num-conversations 60 --num-held-out 10 --batch-size 6 --max-tokens 256 --cpu --threads 1"


def test_a_run_saves_its_adapter_and_resumes_exactly(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft", MIN_PEFT_VERSION)
    options = f"{SMALL} --model {base / 'model'} --lora 2 --max-steps 4 --checkpoint-every 2"
    options += " --learning-rate 0.02 --gradient-checkpointing"
    out = tmp_path / "out"
    found = run(options, out)
    assert sum(name.startswith("exact match") for name in found.summary) >= 3
    assert not (out / "model" / "model.safetensors").exists()
    config = json.loads((out / "model" / "adapter_config.json").read_text())
    expected = (2, 4, str(base / "model"))
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == expected
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    saved = load_file(out / "model" / "adapter_model.safetensors")
    in_checkpoint = load_file(out / "checkpoint-00000004" / "model.safetensors")
    own = dict(loaded.named_parameters())
    for name, value in saved.items():
        name = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        assert torch.equal(own[name], value)
        assert torch.equal(in_checkpoint[f"model.{name}"], value)
    assert max(value.abs().max() for name, value in saved.items() if "lora_B" in name) > 0
    optimizer = torch.load(out / "checkpoint-00000004" / "optimizer.bin", weights_only=True)
    assert len(saved) == len(in_checkpoint) == len(optimizer["state"]) == 2 * 14
    for later in ("checkpoint-00000004", "model"):
        shutil.rmtree(out / later)
    assert run(f"{options} --resume", out).losses == found.losses
    again = load_file(out / "model" / "adapter_model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in saved.items())
