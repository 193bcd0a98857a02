"""Every notebook runs in a fresh kernel and shows what is committed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from notebooks.execute import execute, notebook_paths, outputs_as_text

PATHS = notebook_paths()
NAMES = [path.stem for path in PATHS]
assert len(PATHS) == 8
MAX_CPU_SECONDS = 30  # under a minute where two others share two cores with it


def committed(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_a_notebook_shows_what_is_committed(path):
    executed, cpu_seconds = execute(path)
    expected = committed(path)
    shown = zip(expected.cells, outputs_as_text(expected), outputs_as_text(executed), strict=True)
    for number, (cell, before, now) in enumerate(shown):
        where = f"{path.name}, cell {number}, {cell.source[:60]!r} ..."
        assert now == before, f"{where} shows something else; run `make notebooks` if it is right"
    assert cpu_seconds < MAX_CPU_SECONDS, f"{path.name} took {cpu_seconds:.0f} s of CPU"


def test_the_kernel_is_this_python_whatever_is_installed(tmp_path, monkeypatch):
    kernel = tmp_path / "kernels" / "python3"
    kernel.mkdir(parents=True)
    spec = {"argv": ["/no/such/python"], "display_name": "Another", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    cell = nbformat.v4.new_code_cell("import os, sys\nprint(sys.executable)\nprint(os.getcwd())")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "n.ipynb")
    executed, cpu_seconds = execute(tmp_path / "n.ipynb")
    executable, folder = executed.cells[0].outputs[0].text.splitlines()
    assert executable == sys.executable
    assert not Path(folder).exists(), "what a notebook writes is gone"
    assert cpu_seconds > 0
