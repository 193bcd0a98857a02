"""Checkpoints of examples/sft.py, and what stops a run: Ctrl-C, kills, a folder in use."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sft
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = (
    "--num-conversations 80 --num-held-out 0 --batch-size 6 --max-tokens 256 --cpu --threads 1 "
    "--checkpoint-every 2"
)
SHORT = f"{TINY} --max-steps 4"
LONG = f"{TINY} --epochs 100 --num-workers 1"  # 1,400 steps: it does not end before it is stopped


def run(arguments: str, folder: Path) -> list[str]:
    """Call sft.main() in this process; the lines of its metrics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sft.py", *arguments.split(), "--output-dir", str(folder)])
        sft.main()
    return (folder / "metrics.jsonl").read_text().splitlines()


def losses(lines: list[str]) -> list[float]:
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    folder = tmp_path_factory.mktemp("sft") / "base"
    return run(SHORT, folder), folder


@pytest.fixture
def half(base: tuple[list[str], Path], tmp_path: Path) -> Path:
    """The folder of the run without its last checkpoint: two of its four steps are left."""
    shutil.copytree(base[1], tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoint-00000004")
    return tmp_path / "half"


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run at its fourth step or later, in a process group of its own, as a shell starts one."""
    folder = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "sft.py"), *LONG.split(), "--output-dir", str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 600
    try:
        while not metrics.exists() or metrics.read_text().count("\n") < 4:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "no step 4"
            time.sleep(0.005)
        yield process, folder
    finally:
        process.kill()  # nothing, if it has ended
        process.communicate()


def test_ctrl_c_says_how_to_go_on(started: tuple[subprocess.Popen[str], Path]) -> None:
    process, folder = started
    os.killpg(process.pid, signal.SIGINT)  # it reaches the workers too
    _, text = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "Traceback" not in text
    expected = "stopped; --resume goes on from the last checkpoint, if --checkpoint-every saved one"
    assert text.endswith(f"\nsft.py: {expected}\n")  # on a line of its own, below the bar
    assert sft.checkpoints(sft.argparse.Namespace(output_dir=folder))


def test_one_run_at_a_time_uses_a_folder(started: tuple[subprocess.Popen[str], Path]) -> None:
    """Others are refused and change nothing; a kill frees it, though a worker may live on."""
    process, folder = started
    for options in ("", "--resume"):
        before = (folder / "metrics.jsonl").read_text()
        with pytest.raises(SystemExit) as caught:
            run(f"{LONG} {options}", folder)
        expected = f"--output-dir {folder}: another run is using it; choose another folder"
        assert str(caught.value) == f"sft.py: {expected}"
        assert (folder / "metrics.jsonl").read_text().startswith(before)
    process.kill()
    process.wait()
    with pytest.raises(SystemExit, match="has checkpoints of an earlier run; --resume it"):
        run(LONG, folder)


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_an_output_folder_that_cannot_be_made(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(SystemExit) as caught:
        run(SHORT, tmp_path / name)
    message = str(caught.value)
    assert message.startswith(f"sft.py: --output-dir {tmp_path / name}: cannot be made and locked:")
    assert "\n" not in message
    assert (tmp_path / "file").read_text() == "not a folder"


def test_the_bar_begins_at_the_step_resumed(
    base: tuple[list[str], Path], half: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert losses(run(f"{SHORT} --resume", half)) == losses(base[0])
    text = capsys.readouterr().err
    assert " 2/4 " in text
    assert " 4/4 " in text
    for other in (" 0/4 ", " 1/4 ", " 0/2 "):
        assert other not in text


def test_a_checkpoint_loads_as_plain_data(
    base: tuple[list[str], Path], half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in it is unpickled, so a checkpoint of somebody else cannot run code."""
    load, loaded = torch.load, {}

    def watch(file: Any, *arguments: Any, **options: Any) -> Any:
        loaded[Path(file).name] = options.get("weights_only", True)
        return load(file, *arguments, **options)

    monkeypatch.setattr(torch, "load", watch)
    assert losses(run(f"{SHORT} --resume", half)) == losses(base[0])
    assert loaded == {"optimizer.bin": True, "random_states_0.pkl": True}
    state = json.loads((half / "checkpoint-00000002" / "run.json").read_text())
    assert (state["loader"]["sampler"]["epoch"], state["loader"]["sampler"]["step"]) == (0, 2)


def test_a_checkpoint_of_an_older_script_is_refused(half: Path) -> None:
    path = half / "checkpoint-00000002" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 3}))
    with pytest.raises(SystemExit, match=r"is of another run, which had version 3$"):
        run(f"{SHORT} --resume", half)


def test_a_checkpoint_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files and the folder before the rename, the output folder after it."""
    before: set[str] = set()
    after: set[str] = set()
    fsync = os.fsync

    def watch(descriptor: int) -> None:
        fsync(descriptor)
        is_renamed = (tmp_path / "out" / "checkpoint-00000002").exists()
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        (after if is_renamed else before).add(str(Path(path).relative_to(tmp_path.resolve())))

    monkeypatch.setattr(os, "fsync", watch)
    run(f"{TINY} --max-steps 2", tmp_path / "out")
    names = {path.name for path in (tmp_path / "out" / "checkpoint-00000002").iterdir()}
    assert {"model.safetensors", "optimizer.bin", "run.json"} <= names
    expected = {f"out/unfinished/{name}" for name in names}
    assert before == expected | {"out/unfinished", "out/metrics.jsonl"}
    assert after == {"out"}


def test_metrics_are_replaced_as_a_whole(base: tuple[list[str], Path], half: Path) -> None:
    """Who has the file open sees no shorter one: a kill while it is rewritten loses no line."""
    with (half / "metrics.jsonl").open() as old:
        run(f"{SHORT} --resume", half)
        assert old.read().splitlines() == base[0]
    assert len((half / "metrics.jsonl").read_text().splitlines()) == 4
    assert not list(half.glob("metrics.*.*")) + list(half.glob("metrics.new"))


def test_sigterm_saves_and_the_run_goes_on(
    base: tuple[list[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the third step, between two checkpoints: it is finished, saved, and gone on from."""
    whole, num_steps = sft.train_step, 0

    def told_in_the_third(*arguments: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(sft, "train_step", told_in_the_third)
        run(SHORT, tmp_path / "out")  # ends as a whole run does: with 0
    assert (num_steps, (tmp_path / "out" / "checkpoint-00000003").exists()) == (3, True)
    assert losses(run(f"{SHORT} --resume", tmp_path / "out")) == losses(base[0])


def test_sigterm_ends_the_command_with_0(started: tuple[subprocess.Popen[str], Path]) -> None:
    """Also where every process of the job gets it, as from Slurm: DataLoader workers too."""
    process, folder = started
    os.killpg(process.pid, signal.SIGTERM)
    _, text = process.communicate(timeout=600)
    assert process.returncode == 0, text
    assert "Traceback" not in text
    num_steps = (folder / "metrics.jsonl").read_text().count("\n")
    latest = sft.checkpoints(sft.argparse.Namespace(output_dir=folder))[-1]
    assert latest.name == f"checkpoint-{num_steps:08d}"


@pytest.mark.parametrize("number", [1, 3])
def test_the_latest_checkpoints_are_kept(number: int, tmp_path: Path) -> None:
    options = f"{TINY} --max-steps 4 --checkpoint-every 1 --keep-checkpoints {number}"
    run(options, tmp_path / "out")
    names = [path.name for path in sorted((tmp_path / "out").glob("checkpoint-*"))]
    assert names == [f"checkpoint-{step:08d}" for step in range(5 - number, 5)]


def test_resume_auto_begins_and_goes_on(base: tuple[list[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert losses(run(f"{SHORT} --resume auto", folder)) == losses(base[0])
    shutil.rmtree(folder / "checkpoint-00000004")
    assert losses(run(f"{SHORT} --resume auto", folder)) == losses(base[0])


@pytest.mark.parametrize("has_one", [True, False])
def test_a_full_disk_leaves_the_last_checkpoint(
    has_one: bool, half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    folder = half if has_one else tmp_path / "new"
    with monkeypatch.context() as patch:
        patch.setattr(sft.Accelerator, "save_state", full)
        with pytest.raises(SystemExit) as caught:
            run(f"{SHORT} --resume auto", folder)
    step, rest = (
        (4, "checkpoint-00000002 is whole, --resume goes on from it")
        if has_one
        else (
            2,
            "there is no other",
        )
    )
    expected = f"checkpoint of step {step} could not be saved: [Errno 28] No space left on device"
    assert str(caught.value) == f"sft.py: {expected}; {rest}"
    assert not (folder / "unfinished").exists()
    if has_one:
        assert len(run(f"{SHORT} --resume", folder)) == 4


def test_a_loss_that_is_not_finite_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sft.kit.token_loss
    monkeypatch.setattr(sft.kit, "token_loss", lambda *a, **k: whole(*a, **k) * float("nan"))
    message = (
        r"step 1 has loss nan and gradient norm nan, and is not saved; begin anew with a lower "
        r"--learning-rate, or look at its examples: \[(\d+, ){5}\d+\] \(epoch 0, step 0\)"
    )
    with pytest.raises(SystemExit, match=message):
        run(f"{TINY} --max-steps 4 --checkpoint-every 1", tmp_path / "out")
    assert not list((tmp_path / "out").glob("checkpoint-*"))
