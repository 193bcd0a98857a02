"""Pages of results follow from the JSON of the runs, and answer first what a user asks."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = sorted(path.stem for path in (BENCHMARKS / "results").glob("*.json"))
RUN = {
    "name": "collate",
    "claim": "Fast.",
    "command": "python benchmarks/bench_collate.py",
    "cpu": "two cores",
    "versions": {"python": "3.11", "torch": "2.13"},
    "targets": [
        {"what": "a", "measured": "3x", "wanted": "at least 2x", "verdict": "met"},
        {"what": "b", "measured": "1x", "wanted": "at least 2x", "verdict": "MISSED"},
    ],
    "parts": [
        {"heading": "Sizes", "note": "ms.", "header": ["", "ms"], "rows": [["x", "1"]]},
        {"text": "A remark."},
    ],
}


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("pages")


def results_of(name: str) -> dict[str, Any]:
    found = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("name", RESULTS)
def test_committed_pages_are_those_of_the_committed_figures(name: str, pages: Any) -> None:
    """Otherwise: python benchmarks/pages.py"""
    page = (BENCHMARKS / "results" / f"{name}.md").read_text(encoding="utf-8")
    assert page == pages.page(results_of(name))
    assert "| question | measured |" in page.split("## ")[0]
    assert "| not measured" not in page
    assert all(target["what"] in page for target in results_of(name)["targets"])


def test_the_readme_has_the_tables_of_all_pages(pages: Any) -> None:
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    every = {name: results_of(name) for name in RESULTS}
    assert text == pages.readme(text, every)
    missed = [t for run in every.values() for t in run["targets"] if t["verdict"] == "MISSED"]
    assert len(missed) > 0
    assert all(f"| {target['what']} | {target['measured']} |" in text for target in missed)


def test_questions_come_first_then_what_was_missed(pages: Any) -> None:
    page = pages.page(RUN)
    places = [
        page.index(text) for text in ("| question |", "| b |", "| a |", "## Sizes", "A remark.")
    ]
    assert places == sorted(places)
    assert "1 of 2 are met. What was aimed at: Fast." in page
    assert "| How long does packing a batch of 1,024 examples take? | not measured from" in page
    assert "- versions: python 3.11, torch 2.13" in page


def test_a_report_keeps_all_that_its_page_needs(
    pages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = importlib.import_module("harness")
    report = harness.Report("sums", "Quick.")
    report.target("time", 1.5, "< ms", 1, aim=0.5)
    report.target("factor", 3, "x", 2)
    report.table("Sums", ["", "ms"], [["x", "1.5"]], "Two rounds.")
    report.text("More.")
    report.times("sums", {"x": harness.Times.of([0.0015, 0.0015])})
    report.write(tmp_path)
    written = json.loads((tmp_path / "sums.json").read_text())
    assert written["sums"]["x"]["median"] == 0.0015
    page = (tmp_path / "sums.md").read_text()
    assert page == pages.page(written)
    for line in (
        "| time | 1.5 ms | at most 1 ms, aim 0.5 ms | MISSED |",
        "| factor | 3x | at least 2x | met |",
        "## Sums\n\nTwo rounds.\n\n|  | ms |\n| --- | --- |\n| x | 1.5 |\n\nMore.\n",
    ):
        assert line in page


def test_a_readme_without_its_marks_is_refused(pages: Any) -> None:
    with pytest.raises(ValueError, match=r"README\.md has no <!-- made by pages\.py -->"):
        pages.readme("# Benchmarks", {})
