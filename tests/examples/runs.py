"""Run scripts of examples/ in this process or launched, and read what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import sft
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = "--num-conversations 80 --num-held-out 14 --batch-size 6 --max-tokens 256 --cpu --threads 1"
BASE = f"{TINY} --max-steps 4 --checkpoint-every 2 --log-with tensorboard"
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


class Results(NamedTuple):
    """The lines of metrics.jsonl, and summary.json."""

    steps: list[dict[str, Any]]
    summary: dict[str, Any]

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]

    @property
    def grad_norms(self) -> list[float]:
        return [step["grad_norm"] for step in self.steps]


def read_results(folder: Path) -> Results:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    summary = folder / "summary.json"
    found = json.loads(summary.read_text()) if summary.exists() else {}
    return Results([json.loads(line) for line in lines], found)


def run(arguments: str, folder: Path, script: ModuleType = sft) -> Results:
    """Call main() of a script in this process."""
    with pytest.MonkeyPatch.context() as patch:
        name = f"{script.__name__}.py"
        patch.setattr(sys, "argv", [name, *arguments.split(), "--output-dir", str(folder)])
        script.main()
    return read_results(folder)


def refusal(arguments: str, folder: Path, script: ModuleType = sft) -> str:
    """Return the one line that main() ends with, without the name of the script."""
    with pytest.raises(SystemExit) as caught:
        run(arguments, folder, script)
    name, _, message = str(caught.value).partition(": ")
    assert name == f"{script.__name__}.py"
    assert "\n" not in message
    return message


def launch(arguments: str, folder: Path, *launcher: str, script: str = "sft") -> Results:
    """Run a script in a process of its own, or under a launcher; it must exit with 0."""
    command = [sys.executable, *launcher, str(EXAMPLES / f"{script}.py"), *arguments.split()]
    done = subprocess.run(
        [*command, "--output-dir", str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_results(folder)


def wait_for_steps(folder: Path, number: int, process: Any = None) -> None:
    """Wait until a run in another process has written so many steps."""
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 600
    while not metrics.exists() or metrics.read_text().count("\n") < number:
        assert process is None or process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"no step {number} in {folder}"
        time.sleep(0.005)


def weights(folder: Path) -> torch.Tensor:
    """All weights of a saved model, in one vector."""
    tensors = load_file(folder / "model" / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


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
