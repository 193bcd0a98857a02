"""examples/sft.py on a CUDA device: twenty steps in bf16, packed and padded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sft.py"


def run(folder: Path, *options: str) -> list[float]:
    arguments = ["--max-steps", "20", "--num-conversations", "700", "--output-dir", str(folder)]
    command = [sys.executable, str(EXAMPLE), *arguments, "--num-held-out", "70", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.gpu
def test_twenty_steps(tmp_path: Path) -> None:
    packed = run(tmp_path / "packed")
    padded = run(tmp_path / "padded", "--no-packing")
    assert len(packed) == len(padded) == 20
    assert packed[-1] < 0.7 * packed[0]
    assert packed[0] == pytest.approx(padded[0], rel=1e-2)  # bf16
