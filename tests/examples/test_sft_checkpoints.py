"""Checkpoints of examples/sft.py, and what stops a run: Ctrl-C, kills, a folder in use."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sft
import torch

from tests.examples.runs import (
    BASE,
    EXAMPLES,
    TINY,
    read_results,
    refusal,
    run,
    scalars_of,
    wait_for_steps,
)

LONG = f"{TINY} --num-held-out 0 --checkpoint-every 2 --epochs 100 --num-workers 1"  # 1,400 steps


def test_a_resumed_run_is_exact(base: Path, half: Path, monkeypatch: Any, capsys: Any) -> None:
    """To the last bit, with workers and without prefetch; and of a checkpoint nothing is unpickled,
    so that of somebody else cannot run code."""
    load, loaded = torch.load, {}

    def watch(file: Any, *arguments: Any, **options: Any) -> Any:
        loaded[Path(file).name] = options.get("weights_only", True)
        return load(file, *arguments, **options)

    monkeypatch.setattr(torch, "load", watch)
    capsys.readouterr()
    expected = read_results(base)
    with (half / "metrics.jsonl").open() as old:
        found = run(f"{BASE} --resume --num-workers 2 --no-prefetch", half)
        assert len(old.read().splitlines()) == 4  # who has it open sees no shorter file
    assert found.losses == expected.losses
    assert found.summary["held_out_loss"] == expected.summary["held_out_loss"]
    for name in ("tokens", "cells"):
        assert found.summary[name] == expected.summary[name]
    files = [folder / "model" / "model.safetensors" for folder in (half, base)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert loaded == {"optimizer.bin": True, "random_states_0.pkl": True}
    bar = capsys.readouterr().err
    assert ("\r1/4 " in bar, "\r2/4 " in bar, "\r4/4 " in bar) == (False, True, True)
    logged = scalars_of(half / "sft")["loss"]
    assert logged == pytest.approx(dict(enumerate(found.losses, start=1)), rel=1e-6)
    assert not list(half.glob("metrics.*.*")) + list(half.glob("metrics.new"))


def test_other_runs_are_refused(half: Path) -> None:
    assert "is of another run, which had --seed 0, tokens in" in refusal(
        f"{BASE} --seed 1 --resume", half
    )
    expected = "is of another run, which had --max-steps 4"
    assert refusal(f"{BASE} --max-steps 3 --resume", half).endswith(expected)
    assert "has checkpoints of an earlier run; --resume it" in refusal(BASE, half)
    path = half / "checkpoint-00000002" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 3}))
    assert refusal(f"{BASE} --resume", half).endswith("is of another run, which had version 3")


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
    try:
        wait_for_steps(folder, 4, process)
        yield process, folder
    finally:
        process.kill()  # nothing, if it has ended
        process.communicate()


def test_one_run_at_a_time_and_ctrl_c(started: tuple[subprocess.Popen[str], Path]) -> None:
    """Others are refused and change nothing; Ctrl-C says how to go on."""
    process, folder = started
    for options in ("", "--resume"):
        before = (folder / "metrics.jsonl").read_text()
        expected = f"--output-dir {folder}: another run is using it; choose another folder"
        assert refusal(f"{LONG} {options}", folder) == expected
        assert (folder / "metrics.jsonl").read_text().startswith(before)
    os.killpg(process.pid, signal.SIGINT)  # it reaches the workers too
    _, text = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "Traceback" not in text
    expected = "stopped; --resume goes on from the last checkpoint, if --checkpoint-every saved one"
    assert text.endswith(f"\nsft.py: {expected}\n")  # on a line of its own, below the bar
    assert list(folder.glob("checkpoint-*"))


def test_a_kill_while_saving_leaves_the_last_checkpoint(base: Path, half: Path) -> None:
    save_state = sft.Accelerator.save_state

    def killed(self: Any, folder: str) -> None:
        save_state(self, folder)
        os.truncate(Path(folder) / "optimizer.bin", 100)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft.Accelerator, "save_state", killed)
        with pytest.raises(KeyboardInterrupt):
            run(f"{BASE} --resume", half)
    assert run(f"{BASE} --resume", half).losses == read_results(base).losses


def test_a_full_disk_leaves_the_last_checkpoint(half: Path, monkeypatch: Any) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sft.Accelerator, "save_state", full)
    assert refusal(f"{BASE} --resume auto", half) == (
        "checkpoint of step 4 could not be saved: [Errno 28] No space left on device; "
        "checkpoint-00000002 is whole, --resume goes on from it"
    )
    assert not (half / "unfinished").exists()
    assert (half / "checkpoint-00000002").is_dir()


def test_a_checkpoint_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: Any) -> None:
    """All files and the folder before the rename, the output folder after it."""
    before: set[str] = set()
    after: set[str] = set()
    fsync = os.fsync

    def watch(descriptor: int) -> None:
        fsync(descriptor)
        is_renamed = (tmp_path / "out" / "checkpoint-00000001").exists()
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        (after if is_renamed else before).add(str(Path(path).relative_to(tmp_path.resolve())))

    monkeypatch.setattr(os, "fsync", watch)
    run(f"{TINY} --num-held-out 0 --checkpoint-every 1 --max-steps 1", tmp_path / "out")
    names = {path.name for path in (tmp_path / "out" / "checkpoint-00000001").iterdir()}
    assert {"model.safetensors", "optimizer.bin", "run.json"} <= names
    expected = {f"out/unfinished/{name}" for name in names}
    assert before == expected | {"out/unfinished", "out/metrics.jsonl"}
    assert after == {"out"}


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    whole = sft.kit.token_loss
    monkeypatch.setattr(sft.kit, "token_loss", lambda *a, **k: whole(*a, **k) * float("nan"))
    message = (
        r"step 1 has loss nan and gradient norm nan, and is not saved; begin anew with a lower "
        r"--learning-rate, or look at its examples: \[(\d+, ){5}\d+\] \(epoch 0, step 0\)"
    )
    with pytest.raises(SystemExit, match=message):
        run(f"{TINY} --max-steps 4 --checkpoint-every 1", tmp_path)
    assert not list(tmp_path.glob("checkpoint-*"))
