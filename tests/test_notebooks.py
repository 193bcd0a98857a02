"""Every notebook runs in a fresh kernel and shows what is committed."""

from __future__ import annotations

import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from notebooks.execute import METADATA, execute, notebook_paths, outputs_as_text

PATHS = notebook_paths()
NAMES = [path.stem for path in PATHS]
MAX_CPU_SECONDS = 30  # under a minute where two others share two cores with it
MAX_BYTES = 300_000
MAX_CELL_LINES = 21


def committed(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def test_all_six_are_found():
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04", "05", "06"]


@pytest.mark.parametrize(
    "path",
    [*PATHS[:2], *(pytest.param(path, marks=pytest.mark.release) for path in PATHS[2:])],
    ids=NAMES,
)
def test_a_notebook_shows_what_is_committed(path):
    executed, cpu_seconds = execute(path)
    expected = committed(path)
    shown = zip(expected.cells, outputs_as_text(expected), outputs_as_text(executed), strict=True)
    for number, (cell, before, now) in enumerate(shown):
        where = f"{path.name}, cell {number}, {cell.source[:60]!r} ..."
        assert now == before, f"{where} shows something else; run `make notebooks` if it is right"
    assert cpu_seconds < MAX_CPU_SECONDS, f"{path.name} took {cpu_seconds:.0f} s of CPU"


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_a_committed_notebook_is_clean(path):
    """All cells ran, in order and without warnings; nothing of a machine is in the file."""
    notebook = committed(path)
    nbformat.validate(notebook)
    assert notebook.metadata == METADATA
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for number, cell in enumerate(notebook.cells):
        assert cell.id == f"cell-{number + 1:02d}"
        assert not cell.metadata, f"{cell.id} has metadata {cell.metadata}"
        assert len(cell.source.splitlines()) <= MAX_CELL_LINES, f"{cell.id} is too long"
    kinds = {kind for texts in outputs_as_text(notebook) for kind in texts}
    assert not kinds & {"stderr", "error"}, "a cell warns or raises"
    assert "image/png" in kinds, "there is no plot"
    assert path.stat().st_size < MAX_BYTES
    assert " object at 0x" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_a_notebook_says_what_it_teaches_and_where_to_go_next(path):
    texts = [cell.source for cell in committed(path).cells if cell.cell_type == "markdown"]
    assert "After this notebook you can" in texts[0]
    assert texts[-1].startswith("## Where to go next")
    readme = (path.parent / "README.md").read_text(encoding="utf-8")
    assert f"({path.name})" in readme


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_a_code_cell_follows_a_sentence(path):
    """One idea per cell: what a cell does is said before it, not found out from it."""
    cells = committed(path).cells
    for before, cell in pairwise(cells):
        if cell.cell_type == "code" and before.cell_type == "code":
            defines = before.source.lstrip().startswith(("def ", "@", "NUM_STEPS"))
            assert defines or before.outputs == [], f"{cell.id} is not introduced"


@pytest.mark.parametrize("path", [*PATHS, PATHS[0].with_name("README.md")], ids=[*NAMES, "README"])
def test_links_of_notebooks_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)(#[^)]*)?\)", path.read_text(encoding="utf-8"))
    assert links
    for target, anchor in links:
        found = path.parent / target
        assert found.exists(), f"{path.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.M)
            anchors = ["#" + re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]
            assert anchor in anchors, f"{path.name} links to {target}{anchor}"


def written(path: Path, *sources: str) -> Path:
    """A notebook with these code cells."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def test_the_kernel_is_this_python_whatever_is_installed(tmp_path, monkeypatch):
    kernel = tmp_path / "kernels" / "python3"
    kernel.mkdir(parents=True)
    spec = {"argv": ["/no/such/python"], "display_name": "Another", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    path = written(
        tmp_path / "n.ipynb", "import os, sys\nprint(sys.executable)\nprint(os.getcwd())"
    )
    executed, cpu_seconds = execute(path)
    executable, folder = executed.cells[0].outputs[0].text.splitlines()
    assert executable == sys.executable
    assert not Path(folder).exists(), "what a notebook writes is gone"
    assert len(executed.cells) == 1
    assert cpu_seconds > 0


def test_a_cell_that_raises_stops_the_execution(tmp_path):
    path = written(tmp_path / "n.ipynb", "print('before')", "1 / 0")
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute(path)


def test_times_and_the_contents_of_images_are_not_compared():
    def shown(*outputs: dict[str, Any]) -> list[dict[str, str]]:
        cell = nbformat.v4.new_code_cell("")
        cell.outputs = [nbformat.v4.new_output("display_data", data) for data in outputs]
        return outputs_as_text(nbformat.v4.new_notebook(cells=[cell]))

    table = "rows     plan\n   3   1.5 ms"
    assert shown({"text/plain": table}) == [{"text/plain": "rows plan\n 3 (time)"}]
    assert shown({"text/plain": table}) == shown({"text/plain": "rows  plan\n   3  2.0 s"})
    assert shown({"text/plain": table}) != shown({"text/plain": "rows  plan\n   4  2.0 s"})
    assert shown({"text/plain": "0.25"}) != shown({"text/plain": "0.26"})
    assert shown({"image/png": "a"}) == shown({"image/png": "b"}) == [{"image/png": "(image)\n"}]
    assert shown({"image/png": "a"}, {"image/png": "b"}) != shown({"image/png": "a"})
