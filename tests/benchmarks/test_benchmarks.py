"""Benchmarks: pages follow from the committed figures, and the cells of benchmarks/gpu run here."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
RESULTS = sorted(path.stem for path in (FOLDER / "results").glob("*.json"))


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("pages")


def results_of(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / "results" / f"{name}.json").read_text(encoding="utf-8"))


def test_committed_pages_are_those_of_the_committed_figures(pages: Any) -> None:
    """Otherwise: python benchmarks/pages.py"""
    every = {name: results_of(name) for name in RESULTS}
    for name, results in every.items():
        page = (FOLDER / "results" / f"{name}.md").read_text(encoding="utf-8")
        assert page == pages.page(results), name
        assert "| not measured" not in page, name
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert text == pages.readme(text, every)


def test_the_page_on_isolation_has_the_figures_of_hybrids() -> None:
    found = results_of("hybrids")
    steps = [found[f"leaking {width}"] for width in (2048, 8192)]
    ratios = sorted(each["isolated"]["median"] / each["leaking"]["median"] for each in steps)
    times = found["padded"]["padded"]["median"] / found["padded"]["packed"]["median"]
    text = (FOLDER.parent / "docs" / "isolation.md").read_text(encoding="utf-8")
    assert f"takes {ratios[0]:.2f} to {ratios[1]:.2f} of that" in text
    assert f"bring {times:.1f} times\nthe real tokens per second of right-padded" in text


def test_a_report_keeps_all_that_its_page_needs(pages: Any, tmp_path: Path) -> None:
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


# --- benchmarks/gpu, on the CPU with tiny models


def test_every_cell_runs_what_there_is() -> None:
    cells, speed, peers = (importlib.import_module(f"gpu.{n}") for n in ("cells", "speed", "peers"))
    assert {cell.part for cell in cells.CELLS} == set(cells.PARTS)
    for cell in cells.CELLS:
        module, _, name = cell.function.partition(":")
        assert callable(getattr(importlib.import_module(f"gpu.{module}"), name))
        assert set(cell.options.get("variants", [])) <= set(speed.VARIANTS)
        assert set(cell.options.get("trainers", [])) <= set(peers.TRAINERS)


@pytest.mark.release
def test_hybrids_are_packed_by_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    hybrids = importlib.import_module("gpu.hybrids")
    where = importlib.import_module("gpu.where").Where(torch.device("cpu"), is_tiny=True)
    monkeypatch.setattr(hybrids, "HYBRIDS", ("lfm2",))
    found = hybrids.families(where)
    names = [check["name"] for check in found["checks"] if check["is_ok"]]
    assert names == [f"lfm2 by isolate_mixers, {rows}" for rows in ("one row", "several rows")]
    assert found["left_out"] == ["lfm2 by kernels: causal_conv1d cannot be imported"]
    isolated, padded = hybrids.compare_layouts(where)["variants"]
    assert isolated["error"] is padded["error"] is None
    assert isolated["first_loss"] == pytest.approx(padded["first_loss"], rel=1e-3)


@pytest.mark.release
def test_a_run_saves_skips_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = importlib.import_module("gpu.run")
    names = ("fields", "head-loss", "hybrids", "launches", "logits-0.6B")
    options = ["--cpu", "--tiny", "--out", str(tmp_path), "--cells", ",".join(names)]
    for measured in (0, len(names)):
        assert run.main(options) == 0
        assert capsys.readouterr().out.count("measured already") == measured
    page = (tmp_path / "gpu-cpu-tiny.md").read_text(encoding="utf-8")
    for line in (
        "| fields | 12 of 12 | equal or not | - |  |",
        "| packed, torch_varlen, whole logits | ",
        "| thread collates | ",
        "| hybrids | lfm2 by kernels: causal_conv1d cannot be imported |",
        "| trainers-0.6B | left for a later run |",
        "| Is packed attention exact on the GPU? | 20 checks pass, 0 fail |",
        "| checks of correctness that fail | 0 | at most 0 | met |",
    ):
        assert line in page
    where = importlib.import_module("gpu.where").Where(torch.device("cpu"), is_tiny=True)
    results = importlib.import_module("gpu.saved").Results(tmp_path, where)
    chunked, whole = results.load("logits-0.6B")["variants"]
    assert chunked["first_loss"] == pytest.approx(whole["first_loss"], rel=1e-3)
    assert 0.5 < chunked["efficiency"] <= 1
    results.save("fields", {"error": "no kernel image"})
    assert run.main([*options[:4], "--table"]) == 1
    page = (tmp_path / "gpu-cpu-tiny.md").read_text(encoding="utf-8")
    assert "| checks of correctness that fail | 1 | at most 0 | MISSED |" in page


def test_skyrl_main_stands_in_by_its_description(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkout: the same tokens, masks and weights as ours, and the tables say so."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delenv("SKYRL_MAIN", raising=False)
    peers, ours = importlib.import_module("peers"), importlib.import_module("torch_collate_kit")
    examples = importlib.import_module("samples").examples_of(np.array([19, 14, 32, 27]))
    given = importlib.import_module("bench_skyrl").with_actions(examples)
    assert peers.skyrl_main_name() == "SkyRL main (its loops, written again)"
    assert peers.skyrl_packed(48, main=True)(given)["sequences"].shape == (2, 46)
    pairs = [(ours.PaddedCollator(0), peers.skyrl_padded(main=True), examples, given)]
    rollouts = importlib.import_module("samples").rollouts_of(np.array([19, 14, 32, 27]))
    pairs += [(ours.RolloutCollator(0), peers.skyrl_rollouts(main=True), rollouts, rollouts)]
    for mine, theirs, to_ours, to_theirs in pairs:
        batch, fields = mine(to_ours), theirs(to_theirs)
        torch.testing.assert_close(batch["input_ids"], fields["sequences"], rtol=0, atol=0)
        torch.testing.assert_close(batch["attention_mask"], fields["attention_mask"])
        torch.testing.assert_close(batch["loss_mask"], fields["loss_mask"])
