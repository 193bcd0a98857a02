"""examples/vlm_sft.py and its drawn images, from start to saved model with tiny settings."""

from __future__ import annotations

import functools
import io
import json
import shutil
from pathlib import Path
from typing import Any

import drawn_images
import pytest
import transformers
import vlm_sft
from datasets import Dataset
from PIL import Image

import torch_collate_kit as kit
from tests.examples import runs
from tests.examples.runs import TWO_RANKS, launch, read_results
from tests.examples.test_run_log import NAMES

TINY = (
    "--num-conversations 48 --num-held-out 8 --batch-size 8 --max-tokens 256 --max-patches 48 "
    "--cpu --threads 1"
)
BASE = f"{TINY} --max-steps 4 --checkpoint-every 2"


run = functools.partial(runs.run, script=vlm_sft)
refusal = functools.partial(runs.refusal, script=vlm_sft)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vlm_sft") / "base"
    run(BASE, folder)
    return folder


def test_it_trains_answers_and_saves(base: Path) -> None:
    results = read_results(base)
    assert [step["step"] for step in results.steps] == [1, 2, 3, 4]
    assert all(list(step) == NAMES for step in results.steps)
    assert results.losses[-1] < results.losses[0] - 0.5
    assert results.summary["held_out_loss"] > 0
    skills = {skill.__name__ for skill in drawn_images.SKILLS}
    for kind in ("exact match", "most frequent"):
        assert {f"{kind}, {skill}" for skill in skills} <= set(results.summary)
    assert (base / "loss.png").exists()
    processor = kit.vision.load_processor(base / "model")
    assert processor.chat_template == drawn_images.TEMPLATE
    model = transformers.AutoModelForImageTextToText.from_pretrained(base / "model")
    assert model.config.text_config.vocab_size == len(processor.tokenizer)


def test_resume_is_exact(base: Path, tmp_path: Path) -> None:
    """Four steps at once, or two, a loss of all later files, and two: the same bits."""
    expected, again = read_results(base), tmp_path / "again"
    shutil.copytree(base, again)
    for later in ("checkpoint-00000004", "model"):
        shutil.rmtree(again / later)
    resumed = run(f"{BASE} --resume", again)
    assert resumed.losses == expected.losses
    assert resumed.summary["held_out_loss"] == expected.summary["held_out_loss"]
    weights = [(f / "model" / "model.safetensors").read_bytes() for f in (base, again)]
    assert weights[0] == weights[1]
    message = refusal(f"{BASE} --resume --max-patches 49", again)
    assert message.endswith("had --max-patches 48")


@pytest.mark.parametrize("images", ["in some rows", "in no last row"])
def test_two_ranks_have_the_losses_of_one(images: str, tmp_path: Path) -> None:
    """The vision tower has gradients only from earlier rows, or none: DDP must not wait for it."""
    options = BASE
    if images == "in no last row":
        records = drawn_images.make_records(300, seed=0, turns=1)
        sparse = [r for r in records if not r["images"]][:28]
        sparse += [r for r in records if r["images"]][:4]
        Dataset.from_list(sparse).to_parquet(tmp_path / "chats.parquet")
        data = f"--dataset {tmp_path / 'chats.parquet'} --num-held-out 0 --max-tokens 64"
        options = f"{BASE} {data}"
    one = run(options, tmp_path / "one")
    two = launch(options, tmp_path / "two", *TWO_RANKS, script="vlm_sft")
    assert two.losses == pytest.approx(one.losses, rel=1e-4)
    assert two.grad_norms == pytest.approx(one.grad_norms, rel=1e-3)  # Adam would hide a factor
    expected = one.summary.get("held_out_loss", 0)
    assert two.summary.get("held_out_loss", 0) == pytest.approx(expected, rel=1e-3)
    assert two.summary["tokens"] == one.summary["tokens"]


def test_a_model_and_a_dataset_with_images(base: Path, tmp_path: Path, capsys: Any) -> None:
    """The saved model, and records whose images are paths; two do not fit, and are said to."""
    records = drawn_images.make_records(24, seed=7, turns=1)
    large = io.BytesIO()
    Image.new("RGB", (128, 128)).save(large, "PNG")  # 64 patches, and 48 are allowed
    records[0]["images"][0]["bytes"] = large.getvalue()
    records[3]["messages"][-1]["content"] = [{"type": "text", "text": "a word " * 400}]
    for i, record in enumerate(records):
        for j, image in enumerate(record["images"]):
            (tmp_path / f"{i}-{j}.png").write_bytes(image["bytes"])
        record["images"] = [f"{i}-{j}.png" for j in range(len(record["images"]))]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = f"--dataset {path} --model {base / 'model'} --image-root {tmp_path}"
    results = run(f"{TINY} --num-held-out 0 --max-steps 2 {options}", tmp_path / "out")
    assert results.steps[0]["learning_rate"] == 2e-5
    assert not any(name.startswith(("held_out", "exact match")) for name in results.summary)
    printed = capsys.readouterr().out
    assert "22 conversations to train on, 0 held out\n" in printed
    assert "2 others are left out; raise --max-tokens or --max-patches\n" in printed


REFUSED = {
    "--max-patches 0": "--max-patches 0: must be 1 or more",
    "--image-root no/folder": "--image-root no/folder: there is no such folder",
    "--dataset no.jsonl": "--dataset no.jsonl: there is no such file",
    "--model /no/model": "--model /no/model: '/no/model' is neither a folder nor a name on the hub",
    "--compile --padded": "--compile: padded rows",
    "--context-parallel 2": "--context-parallel and --align are for text",
}


@pytest.mark.parametrize("option", REFUSED)
def test_wrong_options(tmp_path: Path, option: str) -> None:
    assert refusal(f"{TINY} {option}", tmp_path / "out").startswith(REFUSED[option])


def test_a_bad_record_is_named(tmp_path: Path) -> None:
    """Before a step is trained, with its number in the dataset."""
    records = drawn_images.make_records(40, seed=0, turns=1)
    records[33]["images"] = []
    Dataset.from_list(records).to_parquet(tmp_path / "chats.parquet")
    message = "^record 33 of the dataset: the messages have 1 image parts .* there are no images"
    with pytest.raises(kit.DataError, match=message):
        run(f"{TINY} --num-held-out 0 --dataset {tmp_path / 'chats.parquet'}", tmp_path / "out")


def test_text_models_and_fsdp_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    processor = drawn_images.make_processor([])
    processor.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    message = refusal(f"{TINY} --model {tmp_path / 'model'}", tmp_path / "out")
    assert "is a text model; take a vision-language model, or use" in message
    monkeypatch.setattr(vlm_sft.sft.Accelerator, "is_fsdp2", True)
    message = refusal(f"{TINY} --max-steps 1", tmp_path / "out")
    assert "FSDP: the weights that some rank does not use cannot" in message
