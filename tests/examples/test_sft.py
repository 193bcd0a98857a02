"""examples/sft.py from start to saved model: tiny settings, in this process where that will do."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sft
import synthetic_chat
import torch
import transformers
from datasets import Dataset
from safetensors.torch import load_file

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = "--num-conversations 80 --num-held-out 14 --batch-size 6 --max-tokens 256 --cpu --threads 1"
BASE = f"{TINY} --max-steps 4 --checkpoint-every 2"

TWO_RANKS = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]

Run = Callable[..., dict[str, Any]]


def read_results(folder: Path) -> dict[str, Any]:
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    return {"steps": steps, "losses": [s["loss"] for s in steps], "summary": summary}


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Call sft.main() with these arguments in this process; what it wrote."""
    patch = pytest.MonkeyPatch()

    def call(arguments: str, folder: Path) -> dict[str, Any]:
        patch.setattr(sys, "argv", ["sft.py", *arguments.split(), "--output-dir", str(folder)])
        sft.main()
        return read_results(folder)

    yield call
    patch.undo()


@pytest.fixture(scope="module")
def base(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("sft") / "base"
    return run(BASE, folder), folder


def launch(command: list[str], folder: Path, *options: str) -> dict[str, Any]:
    arguments = [str(EXAMPLES / "sft.py"), *BASE.split(), "--output-dir", str(folder), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, "-m", *command, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_results(folder)


def test_it_trains_evaluates_and_saves(base: tuple[dict[str, Any], Path]) -> None:
    results, folder = base
    assert [s["step"] for s in results["steps"]] == [1, 2, 3, 4]
    assert results["losses"][-1] < results["losses"][0]
    for step in results["steps"]:
        assert 0 < step["packing_efficiency"] <= 1
        assert {"learning_rate", "grad_norm", "tokens_per_second", "wait_seconds"} <= set(step)
    assert results["summary"]["held_out_loss"] > 0
    skills = {f"exact match, {skill.__name__}" for skill in synthetic_chat.SKILLS}
    assert skills <= set(results["summary"])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.chat_template == synthetic_chat.TEMPLATE
    assert model.config.vocab_size == len(tokenizer)


def test_some_step_accumulates_over_rows(run: Run, tmp_path: Path) -> None:
    """Rows one by one give the losses of all rows at once, and there is more than one."""
    wide = f"{TINY} --max-steps 3 --max-tokens 160"
    one_by_one = run(wide, tmp_path / "one")
    at_once = run(f"{wide} --rows-per-micro-batch 100", tmp_path / "all")
    assert min(s["packing_efficiency"] for s in one_by_one["steps"]) < 1, "one row in every step"
    assert one_by_one["losses"] == pytest.approx(at_once["losses"], rel=1e-5)


def test_packed_and_padded_train_the_same_examples(run: Run, tmp_path: Path) -> None:
    still = f"{TINY} --max-steps 1 --learning-rate 1e-30"  # so that evaluation sees equal weights
    packed = run(still, tmp_path / "packed")
    padded = run(f"{still} --no-packing", tmp_path / "padded")
    assert padded["losses"] == pytest.approx(packed["losses"], rel=1e-5)
    assert padded["steps"][0]["grad_norm"] == pytest.approx(
        packed["steps"][0]["grad_norm"], rel=1e-4
    )
    assert padded["summary"]["held_out_loss"] == pytest.approx(
        packed["summary"]["held_out_loss"], rel=1e-6
    )
    assert padded["summary"]["tokens"] == packed["summary"]["tokens"]
    assert padded["summary"]["cells"] > 1.2 * packed["summary"]["cells"]


def test_accelerate_launch(base: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    config = str(EXAMPLES / "configs" / "cpu.yaml")
    found = launch(["accelerate.commands.launch", "--config_file", config], tmp_path / "out")
    assert found["losses"] == pytest.approx(base[0]["losses"], rel=1e-6)


def test_two_ranks_have_the_losses_of_one(
    base: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    found = launch(TWO_RANKS, tmp_path / "out")
    assert found["losses"] == pytest.approx(base[0]["losses"], rel=1e-5)
    norms, expected = ([s["grad_norm"] for s in r["steps"]] for r in (found, base[0]))
    assert norms == pytest.approx(expected, rel=1e-4)  # Adam would hide a factor in the losses
    expected = base[0]["summary"]["held_out_loss"]
    assert found["summary"]["held_out_loss"] == pytest.approx(expected, rel=1e-4)
    assert found["summary"]["tokens"] == base[0]["summary"]["tokens"]
    for later in ("checkpoint-00000004", "model"):
        shutil.rmtree(tmp_path / "out" / later)
    resumed = launch(TWO_RANKS, tmp_path / "out", "--resume")
    assert resumed["losses"] == found["losses"]
    assert resumed["summary"]["held_out_loss"] == found["summary"]["held_out_loss"]


def test_resume_is_exact(base: tuple[dict[str, Any], Path], run: Run, tmp_path: Path) -> None:
    """Four steps at once, or two, a loss of all later files, and two: the same bits."""
    results, folder = base
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    for later in ("checkpoint-00000004", "model"):
        shutil.rmtree(again / later)
    resumed = run(f"{BASE} --resume", again)
    assert resumed["losses"] == results["losses"]
    assert resumed["summary"]["held_out_loss"] == results["summary"]["held_out_loss"]
    weights = [(f / "model" / "model.safetensors").read_bytes() for f in (folder, again)]
    assert weights[0] == weights[1]


def test_killed_at_any_step_and_resumed(run: Run, tmp_path: Path) -> None:
    """SIGKILL at some step: the losses are those of a run that was let alone, to the last bit.

    Over the end of an epoch, with batches in flight in a worker, and without prefetch afterwards.
    """
    options = f"{TINY} --epochs 2 --batch-size 26 --num-held-out 0"
    expected = run(options, tmp_path / "quiet")["losses"]
    assert len(expected) == 8
    folder, step = tmp_path / "killed", random.SystemRandom().randint(2, 7)
    arguments = f"{options} --checkpoint-every 1 --num-workers 1 --output-dir {folder}"
    command = [sys.executable, str(EXAMPLES / "sft.py"), *arguments.split()]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 600
    while not metrics.exists() or metrics.read_text().count("\n") < step:
        assert process.poll() is None, f"the run ended before step {step}"
        assert time.monotonic() < deadline, f"no step {step}"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    resumed = run(f"{options} --checkpoint-every 1 --resume --no-prefetch", folder)
    assert resumed["losses"] == expected, f"killed at step {step}"


def test_prefetch_and_workers_change_nothing(
    base: tuple[dict[str, Any], Path], run: Run, tmp_path: Path
) -> None:
    without = run(f"{BASE} --no-prefetch", tmp_path / "without")
    assert without["losses"] == base[0]["losses"]
    with_workers = run(f"{BASE} --num-workers 2", tmp_path / "workers")
    assert with_workers["losses"] == base[0]["losses"]


def test_a_kill_while_saving_leaves_the_last_checkpoint(
    run: Run, base: tuple[dict[str, Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_state, saved = sft.Accelerator.save_state, []

    def killed_the_second_time(self: Any, folder: str) -> None:
        save_state(self, folder)
        saved.append(folder)
        if len(saved) == 2:
            os.truncate(Path(folder) / "optimizer.bin", 100)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sft.Accelerator, "save_state", killed_the_second_time)
        with pytest.raises(KeyboardInterrupt):
            run(BASE, tmp_path)
    resumed = run(f"{BASE} --resume", tmp_path)
    assert resumed["losses"] == base[0]["losses"]


def test_resume_refuses_another_run(
    base: tuple[dict[str, Any], Path], run: Run, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    shutil.copytree(base[1], again)
    with pytest.raises(SystemExit, match="is of another run, which had --seed 0, tokens in"):
        run(f"{BASE} --seed 1 --resume", again)
    with pytest.raises(SystemExit, match=r"is of another run, which had --max-steps 4$"):
        run(f"{BASE} --max-steps 3 --resume", again)
    with pytest.raises(SystemExit, match="has checkpoints of an earlier run"):
        run(BASE, again)


def test_resume_with_other_threads(
    base: tuple[dict[str, Any], Path], run: Run, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    shutil.copytree(base[1], again)
    shutil.rmtree(again / "checkpoint-00000004")
    resumed = run(f"{BASE} --threads 2 --resume", again)
    assert resumed["losses"] == pytest.approx(base[0]["losses"], rel=1e-4)
    sft.torch.set_num_threads(1)


def test_resume_without_checkpoint(run: Run, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--resume: no checkpoint in"):
        run(f"{TINY} --resume", tmp_path)


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.parquet"])
def test_missing_dataset_file(run: Run, tmp_path: Path, name: str) -> None:
    with pytest.raises(SystemExit, match=rf"--dataset \S*{name}: there is no such file"):
        run(f"{TINY} --dataset {tmp_path / name}", tmp_path / "out")


def test_missing_model(run: Run, tmp_path: Path) -> None:
    name = str(tmp_path / "nothing" / "here")
    with pytest.raises(SystemExit, match=f"--model {name}: neither here nor on the hub") as caught:
        run(f"{TINY} --model {name}", tmp_path / "out")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "option", ["--batch-size 0", "--rows-per-micro-batch 0", "--epochs 0", "--max-steps -1"]
)
def test_counts_below_one(run: Run, tmp_path: Path, option: str) -> None:
    with pytest.raises(SystemExit, match=f"{option}: must be 1 or more"):
        run(f"{TINY} {option}", tmp_path / "out")


@pytest.mark.parametrize(
    ("option", "limit"),
    [
        ("--num-held-out -3", "0 or more"),
        ("--learning-rate -0.001", "0 or more"),
        ("--learning-rate nan", "0 or more"),
        ("--warmup -0.1", "0 or more"),
        ("--warmup 1.5", "at most 1, it is a fraction of the steps"),
        ("--weight-decay -1.0", "0 or more"),
        ("--max-grad-norm -1.0", "0 or more"),
        ("--checkpoint-every -2", "0 or more"),
    ],
)
def test_settings_out_of_range(run: Run, tmp_path: Path, option: str, limit: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run(f"{TINY} {option}", tmp_path / "out")
    assert str(caught.value) == f"sft.py: {option}: must be {limit}"
    assert not (tmp_path / "out").exists()


def weights(run: Run, folder: Path, options: str) -> torch.Tensor:
    """All weights after one step, in one vector."""
    results = run(f"{TINY} --num-held-out 0 --max-steps 1 {options}", folder)
    assert results["steps"][0]["learning_rate"] == float(options.split()[1])
    tensors = load_file(folder / "model" / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def test_clipping_and_weight_decay(run: Run, tmp_path: Path) -> None:
    """One step of AdamW that gradients of no size cannot move, and that decay alone can."""
    at_first = weights(run, tmp_path / "first", "--learning-rate 0")
    moved = weights(run, tmp_path / "moved", "--learning-rate 0.1")
    assert (moved - at_first).abs().max() > 0.05
    clipped = weights(run, tmp_path / "clipped", "--learning-rate 0.1 --max-grad-norm 1e-15")
    torch.testing.assert_close(clipped, at_first, rtol=0, atol=1e-6)
    options = "--learning-rate 0.1 --max-grad-norm 1e-15 --weight-decay 0.5"
    decayed = weights(run, tmp_path / "decayed", options)
    torch.testing.assert_close(decayed, at_first * 0.95, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("linear", 0.0, {0: 1, 50: 0.5, 99: 0.01}),
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


def test_isolation_is_checked_as_the_model_is_trained(
    base: tuple[dict[str, Any], Path],
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In training mode, also after from_pretrained(), on the two shortest of the examples."""
    checked = []

    def check(model: Any, batch: Any) -> None:
        checked.append((model.training, batch.metadata["num_tokens"]))

    with monkeypatch.context() as patch:
        patch.setattr(sft.kit, "check_isolation", check)
        options = f"{TINY} --num-held-out 0 --max-steps 1"
        run(f"{options} --model {base[1] / 'model'}", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(base[1] / "model")
    corpus = synthetic_chat.make_corpus(80, seed=0)
    lengths = sorted(len(sft.kit.tokenize_chat(r, tokenizer)["input_ids"]) for r in corpus)
    assert checked == [(True, sum(lengths[:2]))]


def test_a_model_and_a_local_file(
    base: tuple[dict[str, Any], Path], run: Run, tmp_path: Path
) -> None:
    corpus = synthetic_chat.make_corpus(40, seed=5)
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in corpus))
    options = f"{TINY} --max-steps 2 --dataset {path} --model {base[1] / 'model'}"
    results = run(f"{options} --schedule linear --gradient-checkpointing", tmp_path / "out")
    assert len(results["losses"]) == 2
    assert results["steps"][0]["learning_rate"] == 2e-5
    assert results["summary"]["held_out_loss"] > 0
    assert not any(name.startswith("exact match") for name in results["summary"])


def test_every_kind_of_local_dataset(tmp_path: Path) -> None:
    data = Dataset.from_list(synthetic_chat.make_corpus(10, seed=5))
    data.to_parquet(tmp_path / "chats.parquet")
    data.to_json(tmp_path / "chats.jsonl")
    data.save_to_disk(tmp_path / "saved")
    for name in ("chats.parquet", "chats.jsonl", "saved"):
        found = sft.read_dataset(str(tmp_path / name), "train")
        assert len(found) == 10
        assert found[0]["messages"][0]["content"] == data[0]["messages"][0]["content"]


def test_model_without_chat_template(
    base: tuple[dict[str, Any], Path], run: Run, tmp_path: Path
) -> None:
    shutil.copytree(base[1] / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    with pytest.raises(SystemExit, match="has no chat template; take its chat version"):
        run(f"{TINY} --model {tmp_path / 'model'}", tmp_path / "out")


def test_linear_attention_is_refused(
    base: tuple[dict[str, Any], Path], run: Run, tmp_path: Path
) -> None:
    shutil.copytree(base[1] / "model", tmp_path / "model")
    config = transformers.Lfm2Config(
        vocab_size=700,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    transformers.Lfm2ForCausalLM(config).save_pretrained(tmp_path / "model")
    with pytest.raises(
        sft.kit.IsolationError, match="Lfm2ForCausalLM on packed rows, use --no-packing"
    ):
        run(f"{TINY} --model {tmp_path / 'model'}", tmp_path / "out")
