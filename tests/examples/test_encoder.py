"""examples/encoder.py, a few of its steps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.examples.runs import EXAMPLES


def test_it_trains_and_prints_how_often_it_is_right(tmp_path: Path) -> None:
    options = "--steps 3 --batch-size 8 --most-pairs 60 --packages numpy --device cpu"
    command = [sys.executable, str(EXAMPLES / "encoder.py"), *options.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    step, counts, accuracy = done.stdout.splitlines()
    assert re.fullmatch(r"step 3: loss \d\.\d{3}, padding 0\.\d{3}", step)
    assert re.fullmatch(
        r"\d+ pairs in training; \d+ held-out docstrings, two functions each:", counts
    )
    assert re.fullmatch(
        r"accuracy [01]\.\d{3}; by chance 0\.500, before training [01]\.\d{3}", accuracy
    )
