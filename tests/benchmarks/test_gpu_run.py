"""benchmarks/gpu/run.py on the CPU with tiny models: what it saves, skips, stops and shows."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import gpu.run as run
from gpu.cells import CELLS, Cell
from gpu.saved import Results
from gpu.tables import write_page
from gpu.where import Where

pytestmark = pytest.mark.release

WHERE = Where(torch.device("cpu"), is_tiny=True)
MEASURED = ("fields", "head-loss", "launches", "logits-0.6B")


def called(folder: Path, *options: str) -> int:
    return run.main(["--cpu", "--tiny", "--out", str(folder), *options])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of a few cells."""
    folder = tmp_path_factory.mktemp("results")
    assert called(folder, "--cells", ",".join(MEASURED)) == 0
    return folder


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path, WHERE)


# --- a run ---------------------------------------------------------------------------------------


def test_every_cell_is_saved_with_what_it_was_measured_with(measured: Path) -> None:
    results = Results(measured, WHERE)
    assert {path.stem for path in results.folder.glob("*")} == {*MEASURED, "logs"}
    for name in MEASURED:
        found = results.load(name)
        assert found is not None
        assert "error" not in found, found
        assert found["key"]["device"] == "CPU"
        assert found["key"]["torch"] == metadata.version("torch")


def test_variants_of_one_model_have_one_loss(measured: Path) -> None:
    found = Results(measured, WHERE).load("logits-0.6B")
    assert found is not None
    chunked, whole = found["variants"]
    assert [chunked["variant"], whole["variant"]] == [
        "packed, torch_varlen",
        "packed, torch_varlen, whole logits",
    ]
    assert chunked["first_loss"] == pytest.approx(whole["first_loss"], rel=1e-3)
    for variant in (chunked, whole):
        assert variant["error"] is None
        assert variant["tokens_per_second"] > 0
        assert 0.5 < variant["efficiency"] <= 1
        assert 0 <= variant["wait_share"] < 1
        assert variant["graphs_after_warm_up"] == 0
        assert len(variant["seconds"]) == variant["steps"] == 2
        assert variant["mfu"] is None  # the peak of a CPU is not known


def test_launches_are_told_apart(measured: Path) -> None:
    found = Results(measured, WHERE).load("launches")
    assert found is not None
    names = ["no loader", "thread collates", "thread has nothing to do", "worker process collates"]
    assert [row["name"] for row in found["rows"]] == names
    assert all(row["launches"] > 0 and row["median"] > 0 for row in found["rows"])
    assert found["rows"][0]["over_alone"] == 1
    assert found["rows"][1]["collate_seconds"] > 0


def test_the_page_has_what_was_measured_and_what_was_not(measured: Path) -> None:
    page = (measured / "gpu-cpu-tiny.md").read_text(encoding="utf-8")
    assert "| fields | 12 of 12 | equal or not | - |  |" in page
    assert "| packed, torch_varlen, whole logits | " in page
    assert "| thread collates | " in page
    assert "| trainers-0.6B | left for a later run |" in page
    assert "| Is packed attention exact on the GPU? | 14 checks pass, 0 fail |" in page
    assert "| checks of correctness that fail | 0 | at most 0 | met |" in page
    whole = json.loads((measured / "gpu-cpu-tiny.json").read_text(encoding="utf-8"))
    pages = importlib.import_module("pages")
    assert pages.page(whole) == page


def test_what_is_measured_is_skipped_until_the_code_changes(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Results(measured, WHERE)
    before = {name: results.load(name) for name in MEASURED}
    path = results.folder / "fields.json"
    path.write_text(
        json.dumps({**before["fields"], "key": {**results.key("fields"), "code": "older"}})
    )
    assert results.load("fields") is None
    assert results.any("fields")["key"]["code"] == "older"
    assert called(measured, "--cells", ",".join(MEASURED)) == 0
    printed = capsys.readouterr().out
    assert printed.count("measured already") == len(MEASURED) - 1
    assert "[1/4] fields: 12 checks passed" in printed
    for name in MEASURED[1:]:
        assert results.load(name) == before[name]


def test_no_cell_is_begun_without_the_time_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(tmp_path, "--minutes", "0", "--parts", "launch") == 0
    assert "[1/1] launches: -5 s are left, left for the next run" in capsys.readouterr().out
    assert "| launches | left for a later run |" in (tmp_path / "gpu-cpu-tiny.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cpu"], "--cpu and --tiny go together"),
        (["--cpu", "--tiny", "--parts", "sped"], "there is no part 'sped'; there are correctness,"),
        (["--cpu", "--tiny", "--cells", "padding"], "there is no cell 'padding'; there are atten"),
    ],
)
def test_wrong_options_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run.main(options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_results_need_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gpu").write_text("a file")
    with pytest.raises(SystemExit) as stopped:
        called(tmp_path)
    assert stopped.value.code == 2
    assert "cpu-tiny: Not a directory; pass --out with a folder to" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        run.main([])
    assert "there is no CUDA GPU; --cpu --tiny runs" in capsys.readouterr().err


# --- what goes wrong -----------------------------------------------------------------------------


@pytest.fixture
def process(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., bool]:
    """A cell whose process is a script."""

    def run_cell(script: str, *, limit: int, left: float) -> bool:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        given = run._parser().parse_args(["--cpu", "--tiny"])
        cell = Cell("fields", "correctness", "batches:dense_fields", limit=limit)
        return run._in_a_process(cell, results, given, tmp_path, left)

    return run_cell


def test_a_crash_is_a_result(process: Callable[..., bool], results: Results) -> None:
    assert process("echo before; kill -SEGV $$", limit=20, left=20)
    found = results.load("fields")
    assert found is not None
    assert found["error"] == "the process ended with -11"
    assert found["output"] == "before\n"


def test_a_crash_takes_the_place_of_an_older_result(
    process: Callable[..., bool], results: Results
) -> None:
    results.save("fields", {"checks": []})
    assert process("exit 3", limit=20, left=20)
    assert results.load("fields")["error"] == "the process ended with 3"


def test_a_cell_that_does_not_end_is_stopped(
    process: Callable[..., bool], results: Results
) -> None:
    assert process("sleep 60", limit=1, left=20)
    assert results.load("fields")["error"] == "stopped after 1 s"


def test_a_cell_that_the_budget_stops_is_not_saved(
    process: Callable[..., bool], results: Results
) -> None:
    assert not process("sleep 60", limit=20, left=0.5)
    assert results.load("fields") is None


def test_a_stopped_run_stops_its_cell_and_writes_the_page(tmp_path: Path) -> None:
    cell = tmp_path / "python"
    cell.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    cell.chmod(0o755)
    code = f"import sys, runpy; sys.executable = {str(cell)!r}; sys.argv[1:] = "
    code += f"['--cpu', '--tiny', '--cells', 'fields', '--out', {str(tmp_path)!r}]; "
    code += f"runpy.run_path({run.__file__!r}, run_name='__main__')"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert "stopped; what was measured is saved" in process.communicate(timeout=300)[0]
    assert process.returncode == 0
    assert "| fields | left for a later run |" in (tmp_path / "gpu-cpu-tiny.md").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("CUDA: 9 GiB"), "out of memory: OutOfMemoryError: CUDA: 9 GiB"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), "out of memory: RuntimeError: CUBLAS_"),
        (RuntimeError("CUDA error: out of memory"), "out of memory: RuntimeError: CUDA error"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "out of memory: RuntimeError: Tri"),
        (ValueError("wrong"), "ValueError: wrong"),
    ],
)
def test_an_error_is_a_result(
    error: Exception, message: str, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = importlib.import_module("gpu.batches")
    monkeypatch.setattr(batches, "head_loss", lambda where: (_ for _ in ()).throw(error))
    assert run._measure(Cell("x", "correctness", "batches:head_loss"), WHERE, results) == 0
    found = results.load("x")
    assert found is not None
    assert found["error"].startswith(message)
    assert "Traceback" in found["output"]


def test_a_file_is_written_whole_or_not_at_all(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    results.save("x", {"value": 1})
    with pytest.raises(TypeError):
        results.save("x", {"value": object()})
    assert results.load("x")["value"] == 1


def test_a_failed_check_is_on_the_page_and_in_the_exit_code(tmp_path: Path) -> None:
    results = Results(tmp_path, WHERE)
    checks = [{"name": "a", "is_ok": True}, {"name": "b", "is_ok": False, "different": ["labels"]}]
    results.save("fields", {"checks": checks})
    page, failed = write_page(tmp_path, results, WHERE)
    assert failed == 1
    assert '| b | {"is_ok": false, "different": ["labels"]} |' in page.read_text()
    assert "| checks of correctness that fail | 1 | at most 0 | MISSED |" in page.read_text()
    assert called(tmp_path, "--table") == 1


def test_an_error_in_a_cell_of_correctness_is_a_failed_check(tmp_path: Path) -> None:
    results = Results(tmp_path, WHERE)
    results.save("fields", {"checks": [{"name": "a", "is_ok": True}]})
    results.save("head-loss", {"error": "RuntimeError: no kernel image"})
    results.save("logits-0.6B", {"error": "out of memory: 9 GiB"})  # of speed: not measured
    page, failed = write_page(tmp_path, results, WHERE)
    assert failed == 1
    text = page.read_text()
    assert '| head-loss | {"error": "RuntimeError: no kernel image"} |' in text
    assert "| checks of correctness that fail | 1 | at most 0 | MISSED |" in text
    assert "1 checks pass, 1 fail" in text
    assert "| logits-0.6B | out of memory: 9 GiB |" in text
    assert called(tmp_path, "--table") == 1


def test_what_changed_is_measured_again_and_nothing_else(tmp_path: Path) -> None:
    """A repair of one part of a first run does not throw the rest of it away."""
    saved = importlib.import_module("gpu.saved")
    for folder in ("torch_collate_kit", "benchmarks", "examples", "tests"):
        for source in (saved.ROOT / folder).rglob("*.py"):
            copy = tmp_path / source.relative_to(saved.ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())
    names = [cell.name for cell in CELLS]

    def changed_by(path: str) -> set[str]:
        before = {name: saved.code_digest(name, tmp_path) for name in names}
        with open(tmp_path / path, "a") as file:
            file.write("# another line\n")
        return {name for name in names if saved.code_digest(name, tmp_path) != before[name]}

    peers = {"trainers-0.6B", "trainers-1.7B", "liger-0.6B"}
    assert changed_by("benchmarks/gpu/peers.py") == peers
    assert changed_by("benchmarks/gpu/tables.py") == set()
    assert changed_by("tests/gpu/test_batch_gpu.py") == {"gpu-tests"}
    assert changed_by("tests/batch_samples.py") == {"fields", "gpu-tests"}
    for path in ("torch_collate_kit/losses/linear_nll.py", "benchmarks/gpu/training.py"):
        assert changed_by(path) == set(names), path
    assert len({saved.code_digest(name) for name in ("padding-0.6B", "prefetch-0.6B")}) == 2


def test_a_cell_sees_one_gpu_and_says_what_it_printed_when_it_is_stopped(
    process: Callable[..., bool], results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert process("echo device $CUDA_VISIBLE_DEVICES; sleep 60", limit=1, left=20)
    assert results.load("fields")["output"] == "device 2\n"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert process("echo device $CUDA_VISIBLE_DEVICES; exit 3", limit=20, left=20)
    assert results.load("fields")["output"] == "device 0\n"


def test_the_tests_of_the_gpu_are_counted(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = importlib.import_module("gpu.batches")
    found = batches.gpu_tests(WHERE)
    assert found["counts"].keys() == {"skipped"}
    assert found["counts"]["skipped"] > 100
    assert found["checks"][0]["is_ok"]
    assert "test_the_detector_detects SKIPPED" in capfd.readouterr().out  # in the cell's log
    monkeypatch.setattr(Where, "is_cuda", True)
    for lines, is_ok in (
        (["== 300 skipped in 3 s =="], False),  # no success on a GPU
        (["== 299 passed, 1 skipped in 3 s ==", "a warning at the end"], True),
    ):
        monkeypatch.setattr(batches, "_echoed", lambda *_, lines=lines: (0, lines))
        assert batches.gpu_tests(WHERE)["checks"][0]["is_ok"] is is_ok
