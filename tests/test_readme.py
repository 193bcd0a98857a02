"""README.md: short, its code prints what it shows, and its figures are those of the commands."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import why

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def row(fault: str) -> list[str]:
    """The percentages of a row of the first table."""
    (line,) = (line for line in README.splitlines() if line.startswith(f"| {fault}"))
    return re.findall(r"(\d+)%", line)


def test_it_is_short() -> None:
    assert len(README.splitlines()) < 110


def test_its_code_prints_what_it_shows() -> None:
    code, shown = re.search(r"```python\n(.*?)```\n+```text\n(.*?)```", README, re.S).groups()
    assert len(code.strip().splitlines()) <= 10
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue() == shown


def test_its_figures_are_those_of_the_commands() -> None:
    changed, distance, found = why.leak(), why.loss(), why.budget()
    assert max(changed["Trainer"], distance["Trainer"]) < 1e-5, "exact, as the table says"
    assert row("packed examples see") == [
        f"{100 * changed[name]:.0f}" for name in ("flattening", "kit")
    ]
    assert row("a wrong loss") == [f"{100 * distance[name]:.0f}" for name in ("accumulate", "kit")]
    kit, flattening = found["kit"], found["flattening"]
    shares = [flattening["over"], kit["over"], kit["least_filled"]]
    if "SkyRL" in found:  # in the environment of `make why`
        shares.insert(0, found["SkyRL"]["over"])
    assert row("rows over")[-len(shares) :] == [f"{100 * share:.0f}" for share in shares]


def test_what_it_points_to_is_there() -> None:
    paths = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"make (\w+)", README)):
        assert f"\n{target}:" in makefile, target
