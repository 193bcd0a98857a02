"""The Python blocks of every page run, in order, and print what the comment below a print says.

Blocks with ``>>>`` are run by doctest instead (``--doctest-glob=*.md``).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from PIL import Image

import torch_collate_kit

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```", re.M | re.S)


def blocks_of(page: Path) -> list[str]:
    """The blocks that are pasted and run, without doctests."""
    found = [match["code"] for match in _BLOCK.finditer(page.read_text(encoding="utf-8"))]
    return [block for block in found if not block.startswith(">>> ")]


PAGES = [page for page in sorted(DOCS.rglob("*.md")) if blocks_of(page)]


def expected_output(block: str) -> list[str]:
    """The comments right below each ``print``, in the order of the lines."""
    lines = block.splitlines()
    calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    ends = sorted(
        call.end_lineno or 0
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "print"
    )
    expected: list[str] = []
    for end in ends:
        below = [line.strip() for line in lines[end:]]
        first = len(expected)
        while below and below[0].startswith("# "):
            expected.append(below.pop(0).removeprefix("# "))
        assert len(expected) > first, f"nothing below says what this prints: {lines[end - 1]}"
    return expected


def stand_ins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page on images loads by name: a small processor, and a picture."""
    processing = pytest.importorskip("transformers.models.qwen3_vl.processing_qwen3_vl")
    from tests.vision.processors import qwen

    processor = qwen(processing.Qwen3VLProcessor, 16)
    monkeypatch.setattr(torch_collate_kit, "load_processor", lambda name: processor)
    (folder / "images").mkdir()
    Image.new("RGB", (64, 64), (200, 1, 1)).save(folder / "images" / "cat.png")


def test_pages_with_code_are_found():
    assert DOCS / "guide" / "packing.md" in PAGES
    assert len(PAGES) >= 10


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(DOCS)) for page in PAGES])
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    stand_ins(tmp_path, monkeypatch)
    names: dict[str, object] = {}
    for block in blocks_of(page):
        exec(compile(block, str(page), "exec"), names)
        printed = capsys.readouterr().out.splitlines()
        lines = iter(printed)
        for line in expected_output(block):
            assert line in lines, f"{page.name} says {line!r}, but what is printed is {printed}"


def test_a_print_without_its_output_is_found():
    assert expected_output("print(1)\n# 1\nx = 2\nprint(x)\n# 2\n# 3") == ["1", "2", "3"]
    with pytest.raises(AssertionError, match=r"nothing below says what this prints: print\(2\)"):
        expected_output("print(1)\n# 1\nprint(2)\n")
