"""What examples/sft.py records: a line per step, a tracker, the bar, a summary and a plot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import run_log
import sft
import vlm_sft
from PIL import Image
from run_log import checked_tracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.examples.test_run_log import NAMES, records_of, summary_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = (
    "--num-conversations 80 --num-held-out 0 --batch-size 6 --max-tokens 256 --cpu --threads 1 "
    "--max-steps 4"
)
TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def run(arguments: str, folder: Path, module: Any = sft) -> list[dict[str, Any]]:
    """Call main() in this process; the lines of its metrics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sft.py", *arguments.split(), "--output-dir", str(folder)])
        module.main()
    return records_of(folder)


def scalars_of(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard shows: by name, the value of each step."""
    events = EventAccumulator(str(folder))
    events.Reload()
    found = {}
    for name in events.Tags()["scalars"]:
        points = [(event.step, event.value) for event in events.Scalars(name)]
        assert len(dict(points)) == len(points), f"a step of {name} is there twice"
        found[name] = dict(points)
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log") / "base"
    run(f"{TINY} --checkpoint-every 3 --log-with tensorboard", folder)
    return folder


@pytest.fixture
def half(base: Path, tmp_path: Path) -> Path:
    """The folder of a run that was killed between its third and its fourth step."""
    shutil.copytree(base, tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoint-00000004")
    for name in ("summary.json", "loss.png"):
        (tmp_path / "half" / name).unlink()
    return tmp_path / "half"


def test_a_run(base: Path) -> None:
    """Names, and numbers that follow from others; on a CPU neither MFU nor memory is known."""
    records, summary = records_of(base), summary_of(base)
    for record in records:
        assert list(record) == NAMES
        assert record["padding"] == pytest.approx(1 - record["tokens"] / record["cells"])
        assert 0 <= record["wait_seconds"] <= record["seconds"]
        assert record["cost_balance"] == 1  # of one rank
    assert summary["tokens"] == sum(record["tokens"] for record in records)
    assert summary["train_seconds"] == pytest.approx(sum(r["seconds"] for r in records))
    assert Image.open(base / "loss.png").size == (840, 480)


def test_tensorboard_has_what_the_file_has(base: Path) -> None:
    expected = {f"summary/{name}": {4: value} for name, value in summary_of(base).items()}
    for name in set(NAMES) - {"step"}:
        expected[name] = {record["step"]: record[name] for record in records_of(base)}
    scalars = scalars_of(base / "sft")
    assert set(scalars) == set(expected)
    for name, values in scalars.items():
        assert values == pytest.approx(expected[name], rel=1e-6), name
    [path] = (base / "sft").glob("*/hparams.yml")
    assert "batch_size: 6\n" in path.read_text()


def test_a_resumed_run_goes_on_in_every_log(base: Path, half: Path) -> None:
    """The fourth step is done again, and is there once."""
    records = run(f"{TINY} --checkpoint-every 3 --log-with tensorboard --resume", half)
    assert [record["loss"] for record in records] == [r["loss"] for r in records_of(base)]
    assert summary_of(half)["tokens"] == summary_of(base)["tokens"]
    assert summary_of(half)["train_seconds"] == pytest.approx(sum(r["seconds"] for r in records))
    losses = scalars_of(half / "sft")["loss"]
    assert losses == pytest.approx({r["step"]: r["loss"] for r in records}, rel=1e-6)


@pytest.mark.parametrize("resume", ["--resume", "--resume auto"])
def test_a_finished_run_is_left_alone(
    resume: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "finished"
    shutil.copytree(base, folder)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    run(f"{TINY} --checkpoint-every 3 {resume}", folder)
    assert capsys.readouterr().out.endswith(f"{folder}: this run is already finished\n")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_killed_before_its_results(base: Path, tmp_path: Path) -> None:
    """All steps are trained, but there is no summary: only the results are made."""
    folder = tmp_path / "killed"
    shutil.copytree(base, folder)
    expected = summary_of(folder)
    shutil.rmtree(folder / "model")
    (folder / "summary.json").unlink()
    run(f"{TINY} --checkpoint-every 3 --resume auto", folder)
    assert summary_of(folder) == expected
    assert (folder / "model").is_dir()


@pytest.mark.release
def test_two_ranks_write_one_log(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    options = f"{TINY} --checkpoint-every 3 --log-with tensorboard --output-dir {folder}"
    command = [sys.executable, *TWO_RANKS, str(EXAMPLES / "sft.py"), *options.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    again = [*command, "--resume", "auto"]
    done, finished = (
        subprocess.run(c, env=environment, capture_output=True, text=True, timeout=600)
        for c in (command, again)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count(" 0/4 ") == 1  # where a bar begins
    records = records_of(folder)
    assert [record["tokens"] for record in records] == [r["tokens"] for r in records_of(base)]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    balance = [record["cost_balance"] for record in records]
    assert all(1 <= value < 2 for value in balance)
    assert max(balance) > 1
    events = [path for path in (folder / "sft").glob("events*") if path.stat().st_size]
    assert len(events) == 1
    assert set(scalars_of(folder / "sft")["loss"]) == {1, 2, 3, 4}
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("this run is already finished") == 1
    assert records_of(folder) == records


def test_the_vision_language_script_has_the_same_log(tmp_path: Path) -> None:
    options = (
        "--num-conversations 24 --num-held-out 0 --batch-size 8 --max-tokens 256 --max-patches 48 "
        "--cpu --threads 1 --max-steps 2 --checkpoint-every 2"
    )
    records = run(options, tmp_path, vlm_sft)
    assert [list(record) for record in records] == [NAMES] * 2
    assert (tmp_path / "loss.png").exists()
    assert run(f"{options} --resume", tmp_path, vlm_sft) == records


# --- what is said --------------------------------------------------------------------------------


def test_a_tracker_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is made, and not at the first step."""
    monkeypatch.setattr(run_log, "get_available_trackers", lambda: [])
    with pytest.raises(SystemExit) as caught:
        run(f"{TINY} --log-with wandb", tmp_path / "out")
    assert str(caught.value) == "sft.py: --log-with wandb: it is not installed; pip install wandb"
    assert not (tmp_path / "out").exists()
    assert checked_tracker(None) is None


def test_a_tracker_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(f"{TINY} --log-with tensorbord", tmp_path / "out")
    assert "argument --log-with: invalid choice: 'tensorbord'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--learning-rate", "--weight-decay"])
def test_settings_that_are_not_finite(option: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        run(f"{TINY} {option} inf", tmp_path / "out")
    assert str(caught.value) == f"sft.py: {option} inf: must be finite"
