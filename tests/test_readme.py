"""The README's Python blocks run, one after the other, as a newcomer pastes them."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_blocks_of_the_readme_run(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) >= 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    printed = capsys.readouterr().out
    for comment in re.findall(r"^ *# (torch\.Size.*)$", "\n".join(blocks), re.M):
        assert comment in printed, f"the README says {comment!r}, but what is printed is {printed}"
    assert float(re.search(r"loss (\S+)", printed)[1]) < 1
