"""The code of every page runs, in order, and prints what the page says that it prints.

Python blocks with ``>>>`` are run by doctest instead (``--doctest-glob=*.md``).
"""

from __future__ import annotations

import ast
import base64
import importlib.util
import math
import re
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
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


PAGE = DOCS / "guide" / "preference.md"


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def answer(model: Any, example: Any, side: int) -> list[float]:
    """The log-prob of each token of an answer, from a call with that side alone."""
    ids, mask = (torch.tensor(example[name][side]) for name in ("input_ids", "loss_mask"))
    logps = model(ids[None]).logits[0].double().log_softmax(-1)
    return [logps[i - 1, ids[i]].item() for i in range(1, len(ids)) if mask[i]]


@torch.no_grad()
def test_losses_of_the_page_equal_each_pair_alone() -> None:
    names: dict[str, Any] = {}
    blocks = [block for _, block in blocks_of(PAGE)]
    rated = next(i for i, block in enumerate(blocks) if '"label": i' in block)
    with torch.enable_grad():
        exec(compile("\n".join(blocks[:rated]), str(PAGE), "exec"), names)
        exec(compile("\n".join(blocks[rated + 1 :]), str(PAGE), "exec"), names)
    batch = names["batch"]
    names["model"].eval()  # called without segments
    order = batch.row_metadata["example_indices"].values[::2].tolist()
    assert sorted(order) == list(range(12))
    for place, i in enumerate(order):
        chosen, rejected = (answer(names["model"], names["examples"][i], side) for side in (0, 1))
        base = [sum(answer(names["reference"], names["examples"][i], side)) for side in (0, 1)]
        ratio = sum(chosen) - base[0] - (sum(rejected) - base[1])
        means = [sum(logps) / len(logps) for logps in (chosen, rejected)]
        odds = [mean - math.log(1 - math.exp(mean)) for mean in means]
        expected = {
            "ipo": (ratio - 1 / (2 * 0.1)) ** 2,
            "simpo": -log_sigmoid(2.0 * (means[0] - means[1]) - 0.5),
            "orpo": -means[0] - 0.1 * log_sigmoid(odds[0] - odds[1]),
        }
        for name, loss in expected.items():
            assert names[name][place].item() == pytest.approx(loss, rel=2e-4), (name, i)


def code(source: str, *outputs: dict[str, Any]) -> dict[str, Any]:
    return {"cell_type": "code", "source": [source], "outputs": list(outputs)}


def test_text_code_pictures_and_html() -> None:
    """Pictures are files of their own; HTML goes before its plain text, on one line."""
    spec = importlib.util.spec_from_file_location(
        "notebook_pages", ROOT / "website" / "notebook_pages.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = {"cell_type": "markdown", "source": ["# Rows\n", "Text."]}
    printed = {"output_type": "stream", "name": "stdout", "text": ["1\n", "2\n"]}
    picture = {"data": {"image/png": base64.b64encode(b"PNG").decode(), "text/plain": "<Figure>"}}
    shown = {"data": {"text/html": ["<table>\n", "\n", "<tr></tr></table>"], "text/plain": "Batch"}}
    cells = [text, code("print(1)\nprint(2)", printed), code("draw()", picture), code("b", shown)]
    pages = dict(module.pages_of({"cells": cells}, "01_rows"))
    page = pages["01_rows.md"]
    start = "# Rows\nText.\n\n````python\nprint(1)\nprint(2)\n````\n\n````text\n1\n2\n````\n"
    assert page.startswith(start)
    assert pages["01_rows_0.png"] == b"PNG"
    assert page.count("](01_rows_") == 1
    assert "<div class='output'><table> <tr></tr></table></div>" in page
    assert "Batch" not in page
    assert "<Figure>" not in page
