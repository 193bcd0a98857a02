"""examples/preference.py with tiny settings; micro-batches and two ranks train as one process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import preference
import pytest
import synthetic_chat
import transformers

from tests.examples.fsdp_on_cpu import shard_on_cpu
from tests.examples.rank_server import fsdp2
from tests.examples.runs import Results, read_results, refusal, run
from tests.ranks import on_two_ranks

TINY = (
    "--num-pairs 48 --num-held-out 12 --warm-start-steps 2 --batch-size 16 --max-tokens 256 "
    "--max-grad-norm 1000 --cpu --threads 1"
)
LOSSES = ["dpo", "kto", "reward"]
FIGURES = ("loss", "accuracy", "margin")
make_model = synthetic_chat.make_model


def train(arguments: str, folder: Path) -> Results:
    """Call preference.main() in this process with a small model."""
    with pytest.MonkeyPatch.context() as patch:
        small = {"hidden_size": 32}
        patch.setattr(synthetic_chat, "make_model", lambda t, **of: make_model(t, **of | small))
        return run(arguments, folder, preference)


class Trained(dict[str, tuple[Results, Path]]):
    """A run for each loss and its folder, made where a test asks for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, loss: str) -> tuple[Results, Path]:
        folder = self.folder / loss
        self[loss] = train(f"{TINY} --loss {loss}", folder), folder
        return self[loss]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("preference"))


def check_same(found: Results, expected: Results) -> None:
    for name in FIGURES:
        assert [s[name] for s in found.steps] == pytest.approx(
            [s[name] for s in expected.steps], abs=1e-5
        )
    assert [s["grad_norm"] for s in found.steps] == pytest.approx(
        [s["grad_norm"] for s in expected.steps], rel=1e-4
    )
    for name in FIGURES:
        key = f"held_out_{name}"
        assert found.summary[key] == pytest.approx(expected.summary[key], abs=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_it_trains_and_saves(loss: str, trained: Trained) -> None:
    results, folder = trained[loss]
    assert len(results.steps) == (6 if loss == "kto" else 3)
    first = {"dpo": 0.6931, "kto": 0.5}.get(loss)  # the policy is the reference
    if first is not None:
        assert results.losses[0] == pytest.approx(first, abs=1e-4)
        assert "preferred answers written" in results.summary
        assert results.losses[-1] < results.losses[0]
    assert 0.6 < results.losses[0] < 0.8 or loss == "kto"
    kind = transformers.AutoModelForSequenceClassification
    kind = kind if loss == "reward" else transformers.AutoModelForCausalLM
    model, info = kind.from_pretrained(folder / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert model.config.vocab_size == len(
        transformers.AutoTokenizer.from_pretrained(folder / "model")
    )


def on_rank(arguments: str, folder: str, sharded: bool) -> None:
    if sharded:
        os.environ |= fsdp2()
        shard_on_cpu()
    train(arguments, Path(folder))


@pytest.mark.parametrize(
    ("loss", "sharded"), [("dpo", False), ("dpo", True), ("kto", False), ("reward", True)]
)
def test_two_ranks_train_as_one(loss: str, sharded: bool, trained: Trained, tmp_path: Path) -> None:
    on_two_ranks(on_rank, f"{TINY} --loss {loss}", str(tmp_path), sharded)
    check_same(read_results(tmp_path), trained[loss][0])


def test_pairs_of_a_file_train_a_model_of_a_folder(trained: Trained, tmp_path: Path) -> None:
    pairs = [{**pair, "margin": 0.5} for pair in synthetic_chat.make_pairs(24, seed=1)]
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(map(json.dumps, pairs)))
    model = trained["dpo"][1] / "model"
    options = f"{TINY} --dataset {data} --model {model} --num-held-out 4 --loss reward"
    found = train(options, tmp_path / "out")
    assert len(found.steps) == 2
    margins = [step["loss"] for step in found.steps]
    assert min(margins) > 0.7, "a margin of 0.5 is demanded"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--batch-size 0", "--batch-size 0: must be 1 or more"),
        ("--learning-rate nan", "--learning-rate nan: must be 0 or more, and finite"),
        ("--beta -1", "--beta -1.0: must be 0 or more"),
        ("--dataset nowhere.jsonl", "--dataset nowhere.jsonl"),
    ],
)
def test_settings_that_cannot_be(options: str, message: str, tmp_path: Path) -> None:
    assert refusal(f"{TINY} {options}", tmp_path, preference).startswith(message)
