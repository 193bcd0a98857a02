"""examples/minimal.py, run whole as a command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.examples.runs import EXAMPLES


def test_it_learns_answers_and_saves(tmp_path: Path) -> None:
    """The conversation it is asked about is held out."""
    script = EXAMPLES / "minimal.py"
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    *steps, answer = done.stdout.splitlines()
    found = [re.fullmatch(r"step (\d+): loss (\d\.\d{4})", line) for line in steps]
    losses = {int(match[1]): float(match[2]) for match in found if match}
    assert list(losses) == [20, 40, 60, 80, 100]
    assert losses[100] < 0.05 < losses[20]
    assert answer.endswith("assistant It is red . <end>")
    AutoModelForCausalLM.from_pretrained(tmp_path / "outputs" / "minimal")
    assert AutoTokenizer.from_pretrained(tmp_path / "outputs" / "minimal").chat_template
