"""examples/minimal.py and examples/encoder.py, which run when they are imported."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.examples.runs import EXAMPLES


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a script in the folder of the test; the lines that it prints."""
    monkeypatch.chdir(tmp_path)

    def of(script: str, options: str = "") -> list[str]:
        monkeypatch.setattr(sys, "argv", [script, *options.split()])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return of


def test_it_learns_answers_and_saves(run, tmp_path: Path) -> None:
    """The conversation it is asked about is held out."""
    *steps, answer = run("minimal.py")
    found = [re.fullmatch(r"step (\d+): loss (\d\.\d{4})", line) for line in steps]
    losses = {int(match[1]): float(match[2]) for match in found if match}
    assert list(losses) == [20, 40, 60, 80, 100]
    assert losses[100] < 0.05 < losses[20]
    assert answer.endswith("assistant It is red . <end>")
    AutoModelForCausalLM.from_pretrained(tmp_path / "outputs" / "minimal")
    assert AutoTokenizer.from_pretrained(tmp_path / "outputs" / "minimal").chat_template


def test_it_trains_and_prints_how_often_it_is_right(run) -> None:
    options = "--steps 3 --batch-size 8 --most-pairs 60 --packages numpy --device cpu"
    step, counts, accuracy = run("encoder.py", options)
    assert re.fullmatch(r"step 3: loss \d\.\d{3}, padding 0\.\d{3}", step)
    words = r"\d+ pairs in training; \d+ held-out docstrings, two functions each:"
    assert re.fullmatch(words, counts)
    words = r"accuracy [01]\.\d{3}; by chance 0\.500, before training [01]\.\d{3}"
    assert re.fullmatch(words, accuracy)
