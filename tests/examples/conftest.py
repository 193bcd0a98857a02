"""A finished run of sft.py, made once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four steps, with a checkpoint after two and after four of them."""
    from tests.examples.runs import BASE, run

    folder = tmp_path_factory.mktemp("examples") / "base"
    run(BASE, folder)
    return folder


@pytest.fixture
def half(base: Path, tmp_path: Path) -> Path:
    """The folder of that run as a kill after two of its four steps leaves it."""
    folder = tmp_path / "half"
    shutil.copytree(base, folder)
    for later in ("checkpoint-00000004", "model"):
        shutil.rmtree(folder / later)
    for later in ("summary.json", "loss.png"):
        (folder / later).unlink()
    return folder
