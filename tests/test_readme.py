"""README.md: its code prints what it shows, and its figures are those of benchmarks/why.py."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import why

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def row(fault: str) -> list[str]:
    """The percentages of a row of the first table."""
    (line,) = (line for line in README.splitlines() if line.startswith(f"| {fault}"))
    return re.findall(r"(\d+)%", line)


def test_its_code_prints_what_it_shows() -> None:
    code, shown = re.search(r"```python\n(.*?)```\n+```text\n(.*?)```", README, re.S).groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue() == shown


def test_examples_that_see_each_other_and_rows_over_the_budget() -> None:
    changed, found = why.leak(), why.budget()
    assert changed["Trainer"] == changed["kit"] == changed["hybrid in the kit"] == 0
    assert row("packed examples see") == [
        f"{100 * changed[name]:.0f}" for name in ("flattening", "hybrid in Trainer", "kit")
    ]
    kit, flattening = found["kit"], found["flattening"]
    assert kit["longest"] <= 4096
    shares = [flattening["over"], kit["over"], kit["least_filled"]]
    if "SkyRL" in found:  # in the environment of `make why`
        shares.insert(0, found["SkyRL"]["over"])
    assert row("rows over")[-len(shares) :] == [f"{100 * share:.0f}" for share in shares]


def test_a_wrong_loss(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """And the command, on what is measured already."""
    distance = why.loss()
    assert max(distance["Trainer"], distance["kit"]) < 1e-5
    assert row("a wrong loss") == [f"{100 * distance[name]:.0f}" for name in ("accumulate", "kit")]
    monkeypatch.setattr("sys.argv", ["why.py", "loss"])
    why.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith(" 0.0%") for line in lines[1:]] == [False, True, True], lines
