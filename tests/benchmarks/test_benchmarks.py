"""Benchmarks: pages follow from the committed figures, and the cells of benchmarks/gpu run here."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_committed_pages_are_those_of_the_committed_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise: python benchmarks/pages.py"""
    monkeypatch.syspath_prepend(FOLDER)
    pages: Any = importlib.import_module("pages")
    every = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((FOLDER / "results").glob("*.json"))
    }
    for name, results in every.items():
        page = (FOLDER / "results" / f"{name}.md").read_text(encoding="utf-8")
        assert page == pages.page(results), name
        assert "| not measured" not in page, name
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert text == pages.readme(text, every)


@pytest.mark.release
def test_a_gpu_run_saves_skips_and_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU, with tiny models."""
    run = importlib.import_module("gpu.run")
    names = ("fields", "head-loss", "hybrids", "launches", "logits-0.6B")
    options = ["--cpu", "--tiny", "--out", str(tmp_path), "--cells", ",".join(names)]
    for measured in (0, len(names)):
        assert run.main(options) == 0
        assert capsys.readouterr().out.count("measured already") == measured
    page = (tmp_path / "gpu-cpu-tiny.md").read_text(encoding="utf-8")
    assert "| Is packed attention exact on the GPU? | 23 checks pass, 0 fail |" in page
    assert "| checks of correctness that fail | 0 | at most 0 | met |" in page
