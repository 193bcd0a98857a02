"""examples/sft.py from start to saved model: tiny settings, in this process where that will do."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import sft
import synthetic_chat
import torch
import transformers
from PIL import Image
from transformers.integrations.peft import MIN_PEFT_VERSION

from tests.examples.runs import (
    TINY,
    read_results,
    refusal,
    run,
    scalars_of,
)
from tests.examples.test_run_log import NAMES


def test_it_trains_evaluates_and_saves(base: Path) -> None:
    steps, summary = read_results(base)
    assert [s["step"] for s in steps] == [1, 2, 3, 4]
    assert steps[-1]["loss"] < steps[0]["loss"]
    for step in steps:
        assert list(step) == NAMES  # on a CPU neither MFU nor memory is known
        assert step["padding"] == pytest.approx(1 - step["tokens"] / step["cells"])
        assert 0 <= step["wait_seconds"] <= step["seconds"]
        assert step["cost_balance"] == 1  # of one rank
    assert summary["tokens"] == sum(step["tokens"] for step in steps)
    assert summary["held_out_loss"] > 0
    assert {f"exact match, {skill.__name__}" for skill in synthetic_chat.SKILLS} <= set(summary)
    model = transformers.AutoModelForCausalLM.from_pretrained(base / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(base / "model")
    assert tokenizer.chat_template == synthetic_chat.TEMPLATE
    assert model.config.vocab_size == len(tokenizer)
    assert Image.open(base / "loss.png").size == (840, 480)


def test_tensorboard_has_what_the_file_has(base: Path) -> None:
    steps, summary = read_results(base)
    expected = {f"summary/{name}": {4: value} for name, value in summary.items()}
    for name in set(NAMES) - {"step"}:
        expected[name] = {step["step"]: step[name] for step in steps}
    scalars = scalars_of(base / "sft")
    assert set(scalars) == set(expected)
    for name, values in scalars.items():
        assert values == pytest.approx(expected[name], rel=1e-6), name
    [path] = (base / "sft").glob("*/hparams.yml")
    assert "batch_size: 6\n" in path.read_text()


@pytest.mark.parametrize("trained", ["weights", "adapters", "hybrid"])
def test_rows_one_by_one_all_at_once_or_padded_train_alike(
    trained: str, base: Path, tmp_path: Path
) -> None:
    still = f"{TINY} --max-steps 2 --max-tokens 160 --learning-rate 1e-30"  # equal weights
    if trained == "adapters":
        pytest.importorskip("peft", MIN_PEFT_VERSION)
        still += f" --model {base / 'model'} --lora 2 --gradient-checkpointing"
    if trained == "hybrid":
        still += " --arch qwen3_5"
    packed = run(still, tmp_path / "packed")
    at_once = run(f"{still} --rows-per-micro-batch 100", tmp_path / "all")
    padded = run(f"{still} --no-packing", tmp_path / "padded")
    assert min(s["packing_efficiency"] for s in packed.steps) < 1, "one row in every step"
    for other in (at_once, padded):
        assert other.losses == pytest.approx(packed.losses, rel=1e-5)
        assert other.grad_norms == pytest.approx(packed.grad_norms, rel=1e-4)
        expected = packed.summary["held_out_loss"]
        assert other.summary["held_out_loss"] == pytest.approx(expected, rel=1e-6)
        assert other.summary["tokens"] == packed.summary["tokens"]
    assert padded.summary["cells"] > 1.2 * packed.summary["cells"]


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("linear", 0.1, {0: 0.1, 4: 0.5 * 0.96, 9: 0.91, 10: 0.9, 50: 0.5, 99: 0.01}),
        ("cosine", 0.0, {0: 1, 25: (1 + 2**-0.5) / 2, 50: 0.5, 99: 2.4672e-4}),
        ("cosine", 0.1, {0: 0.1, 10: 0.97553, 50: 0.5, 75: (1 - 2**-0.5) / 2, 99: 2.4672e-4}),
    ],
)
def test_learning_rate(schedule: str, warmup: float, expected: dict[int, float]) -> None:
    """Up to the highest in warmup * num_steps steps, half of it half-way, nearly 0 in the last."""
    options = {"schedule": schedule, "warmup": warmup, "num_steps": 100, "learning_rate": 3.0}
    args = sft.argparse.Namespace(**options)
    found = {step: sft.learning_rate(step, args) / 3 for step in expected}
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_model_and_a_local_file(base: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Isolation is checked in training mode, on the two shortest examples."""
    corpus = synthetic_chat.make_corpus(40, seed=5)
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in corpus))
    checked: list[tuple[bool, int]] = []
    monkeypatch.setattr(
        sft.kit,
        "check_isolation",
        lambda model, batch: checked.append((model.training, batch.num_tokens)),
    )
    options = f"{TINY} --max-steps 1 --num-held-out 4 --dataset {path} --model {base / 'model'}"
    results = run(f"{options} --schedule linear --gradient-checkpointing", tmp_path / "out")
    assert results.steps[0]["learning_rate"] == 2e-5
    assert results.summary["held_out_loss"] > 0
    assert not any(name.startswith("exact match") for name in results.summary)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base / "model")
    lengths = [len(sft.kit.tokenize_chat(r, tokenizer)["input_ids"]) for r in corpus]
    assert checked[0][0]
    assert sum(sorted(lengths)[:2]) <= checked[0][1] <= sum(sorted(lengths)[:6])  # 4 held out


BY_ROWS = TINY.replace("--batch-size 6", "--batch-rows 2")


def test_a_step_is_so_many_full_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An epoch, stopped and resumed; each conversation once, in even steps."""
    whole = run(f"{BY_ROWS} --checkpoint-every 4", tmp_path / "out")
    assert "padded: " in capsys.readouterr().out.splitlines()[-1]
    tokens = [step["tokens"] for step in whole.steps]
    assert {step["cells"] for step in whole.steps[:8]} <= set(range(500, 513))  # a whole window
    assert whole.summary["padding"] < 0.05
    examples = datasets.load_from_disk(str(tmp_path / "out" / "examples"))
    assert sum(tokens) == sum(map(len, examples["input_ids"]))
    losses, number = whole.losses, len(whole.steps) // 2
    for step in range(number, len(losses)):
        shutil.rmtree(tmp_path / "out" / f"checkpoint-{step + 1:08d}", ignore_errors=True)
    (tmp_path / "out" / "summary.json").unlink()
    again = run(f"{BY_ROWS} --checkpoint-every 4 --resume auto", tmp_path / "out")
    assert again.losses == losses
    assert [step["tokens"] for step in again.steps] == tokens


def test_the_held_out_loss_is_that_of_each_conversation_once(base: Path, tmp_path: Path) -> None:
    """A number of rows that the last step does not fill; by hand, one at a time."""
    still = f"{TINY} --max-steps 1 --learning-rate 1e-30 --model {base / 'model'} --max-tokens 256"
    found = [
        run(f"{still} {rows}", tmp_path / rows.strip("- 0123456789")).summary["held_out_loss"]
        for rows in ("--rows-per-micro-batch 3", "--rows-multiple-of 5")
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(base / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(base / "model")
    args = argparse.Namespace(dataset=None, num_held_out=14, num_conversations=80, seed=0)
    nll, count = 0.0, 0
    with torch.no_grad():
        for record in sft.load_conversations(args)[1]:
            example = sft.kit.tokenize_chat(record, tokenizer)
            ids, trained = (torch.tensor(example[k]) for k in ("input_ids", "loss_mask"))
            logits = model(input_ids=ids[None]).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
            nll += float((losses * trained[1:]).sum())
            count += int(trained[1:].sum())
    assert found == pytest.approx([nll / count] * 2, rel=1e-5)


REFUSED = {
    "--batch-size 0": "--batch-size 0: must be 1 or more",
    "--max-steps -1": "--max-steps -1: must be 1 or more",
    "--num-held-out -3": "--num-held-out -3: must be 0 or more",
    "--learning-rate nan": "--learning-rate nan: must be 0 or more",
    "--weight-decay inf": "--weight-decay inf: must be finite",
    "--warmup 1.5": "--warmup 1.5: must be at most 1, it is a fraction of the steps",
    "--rows-multiple-of 0": "--rows-multiple-of 0: must be 1 or more",
    "--batch-rows 0": "--batch-rows 0: must be 1 or more",
    "--batch-rows 2 --no-packing": "--batch-rows 2: padded rows are as many as --batch-size",
    "--rows-multiple-of 4": "--batch-rows 2: must be a multiple of --rows-multiple-of",
    "--compile --no-packing": "--compile: padded rows",
    "--context-parallel 2": "--context-parallel 2: must divide the number of ranks, 1",
    "--context-parallel 2 --no-packing": "--context-parallel 2: the segments of packed rows",
    "--context-parallel 2 --compile": "--context-parallel 2: ranks exchange keys in every layer",
    "--context-parallel 2 --attention sdpa": "--context-parallel 2: needs --attention torch_va",
    "--context-parallel 2 --align 6": "--align 6: must be a multiple of 4 with --context-par",
    "--lora 8": "--lora 8: adapters need a trained model; pass --model",
    "--lora-alpha 8": "--lora-alpha 8: there are no adapters without --lora",
    "--lora 4 --lora-alpha 0": "--lora-alpha 0: must be 1 or more",
    "--loss-per source": "--loss-per source: the data has skill, messages",
    "--resume": "--resume: no checkpoint in",
    "--dataset no/chats.jsonl": "--dataset no/chats.jsonl: there is no such file",
    "--model no/thing/here": "--model no/thing/here: neither here nor on the hub",
}


@pytest.mark.parametrize("options", REFUSED)
def test_options_that_are_refused(options: str, tmp_path: Path) -> None:
    arguments = BY_ROWS if "rows" in options else TINY
    assert refusal(f"{arguments} {options}", tmp_path / "out").startswith(REFUSED[options])
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_a_model_without_a_chat_template(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    message = refusal(f"{TINY} --model {tmp_path / 'model'}", tmp_path / "out")
    assert "has no chat template; take its chat version" in message


def test_the_losses_of_conversations_are_written_and_the_highest_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = sft.ExampleLog.loss

    def compared(self: Any, model: Any, part: Any) -> torch.Tensor:
        expected = model(part, part.metadata["num_loss_tokens"])
        torch.testing.assert_close(found := loss(self, model, part), expected)
        return found

    monkeypatch.setattr(sft.ExampleLog, "loss", compared)
    records = synthetic_chat.make_corpus(13, 0)
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(of) + "\n" for of in records))
    options = f"--dataset {tmp_path / 'chats.jsonl'} --num-held-out 1 --batch-size 6 --max-steps 3"
    options += (
        " --epochs 2 --max-tokens 256 --rows-per-micro-batch 1 --cpu --threads 1 --log-examples"
    )
    found = run(options, tmp_path / "run")  # two steps are an epoch
    printed, path = capsys.readouterr().out, tmp_path / "run" / "examples.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["epoch"]) for line in lines] == [(1, 0), (2, 0), (3, 1)]
    for line, loss_of_step in zip(lines, found.losses, strict=True):
        assert sum(line["loss"]) / sum(line["tokens"]) == pytest.approx(loss_of_step, rel=1e-5)
    assert sorted(lines[0]["example"] + lines[1]["example"]) == list(range(12))
    means = np.array(lines[2]["loss"]) / lines[2]["tokens"]
    _, of_first, of_second = printed.split("the highest losses of epoch ")
    for epoch, shown, number in ((0, of_first, 10), (1, of_second, 6)):  # at most ten
        assert shown.startswith(f"{epoch}:\n")
        assert len([line for line in shown.splitlines() if ", example " in line]) == number
    worst = lines[2]["example"][means.argmax()]
    first = of_second.splitlines()[1]
    assert first.startswith(f"  {means.max():.2f} in ")
    assert f" tokens, example {worst}: '" in first
    assert "user" in first


def test_conversations_have_no_loss_on_a_context_rank(tmp_path: Path) -> None:
    message = "--log-examples: a context rank has parts of conversations; omit --context-parallel"
    assert refusal(f"{TINY} --log-examples --context-parallel 2", tmp_path) == message
