"""The code of every page runs, in order, and prints what the page says that it prints.

Python blocks with ``>>>`` are run by doctest instead (``--doctest-glob=*.md``).
"""

from __future__ import annotations

import ast
import re
import shlex
import socket
from pathlib import Path

import pytest
from PIL import Image

import torch_collate_kit
from tests.command import run_command

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_BLOCK = re.compile(r"^```(?P<language>python|console)\n(?P<code>.*?)^```", re.M | re.S)
_TIME = re.compile(r"\d[\d.,]* ms")


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Language and code of the blocks that are pasted and run, without doctests."""
    text = page.read_text(encoding="utf-8")
    found = [(match["language"], match["code"]) for match in _BLOCK.finditer(text)]
    return [(language, code) for language, code in found if not code.startswith(">>> ")]


WITHOUT_STAND_INS = [DOCS / "recipes.md", DOCS / "guide" / "command_line.md"]
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if blocks_of(page)]
assert len(PAGES) >= 10


def expected_output(block: str) -> list[str]:
    """The comments right below each ``print``, in the order of the lines."""
    lines = block.splitlines()
    calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    ends = sorted(
        call.end_lineno or 0
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id == "print"
        and not any(keyword.arg == "file" for keyword in call.keywords)
    )
    expected: list[str] = []
    for end in ends:
        below = [line.strip() for line in lines[end:]]
        first = len(expected)
        while below and below[0].startswith("# "):
            expected.append(below.pop(0).removeprefix("# "))
        assert len(expected) > first, f"nothing below says what this prints: {lines[end - 1]}"
    return expected


def commands(block: str) -> list[tuple[list[str], list[str]]]:
    """Each command of a console block, and the lines that it prints."""
    found: list[tuple[list[str], list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((shlex.split(line.removeprefix("$ ")), []))
        else:
            found[-1][1].append(line)
    return found


def comparable(line: str) -> str:
    """Without what differs from run to run: times, and how wide they make a column."""
    return re.sub(r"\s+", " ", _TIME.sub("N ms", line)).rstrip()


def check_printed(expected: list[str], printed: list[str], page: Path) -> None:
    """All expected lines are there, in this order."""
    lines = iter([comparable(line) for line in printed])
    for line in expected:
        assert comparable(line) in lines, f"{page.name} says {line!r}, but printed is {printed}"


def stand_ins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pages on images load by name: a small processor, its config, and a picture."""
    processing = pytest.importorskip("transformers.models.qwen3_vl.processing_qwen3_vl")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3VLConfig()
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda name: config)
    from tests.vision.processors import qwen

    processor = qwen(processing.Qwen3VLProcessor, 16)
    monkeypatch.setattr(torch_collate_kit.vision, "load_processor", lambda name: processor)
    (folder / "images").mkdir()
    Image.new("RGB", (64, 64), (200, 1, 1)).save(folder / "images" / "cat.png")


def no_network(host, *_, **__):
    raise OSError(f"the page asks for {host}")


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(DOCS)) for page in PAGES])
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    if page not in WITHOUT_STAND_INS:
        stand_ins(tmp_path, monkeypatch)
    names: dict[str, object] = {}
    for language, block in blocks_of(page):
        if language == "python":
            exec(compile(block, str(page), "exec"), names)
            check_printed(expected_output(block), capsys.readouterr().out.splitlines(), page)
            continue
        monkeypatch.setenv("COLUMNS", "100")
        for command, expected in commands(block):
            assert command[0] == "torch-collate-kit"
            assert run_command(*command[1:]) in (0, 1)
            assert expected
            check_printed(expected, capsys.readouterr().out.splitlines(), page)


def test_output_that_is_missing_or_differs_is_found():
    assert expected_output("print(1)\n# 1\nx = 2\nprint(x)\n# 2\n# 3") == ["1", "2", "3"]
    with pytest.raises(AssertionError, match=r"nothing below says what this prints: print\(2\)"):
        expected_output("print(1)\n# 1\nprint(2)\n")
    check_printed(["a", "in 3 ms"], ["a", "b", "in 4.5 ms"], Path("page.md"))
    with pytest.raises(AssertionError, match=r"page\.md says 'b'"):
        check_printed(["a", "b"], ["b", "a"], Path("page.md"))
