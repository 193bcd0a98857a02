"""A finished run of sft.py, made once; CI runs each script once, a release all tests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

IN_CI = {  # a run of each script, in which it trains, saves and goes on
    "test_it_learns_answers_and_saves",
    "test_it_plays_trains_and_saves",
    "test_it_trains_and_saves[dpo]",
    "test_it_trains_answers_and_saves",
    "test_it_trains_evaluates_and_saves",
    "test_options_that_are_refused[--batch-size 0]",
    "test_questions_and_answers",
    "test_a_resumed_run_is_exact",
    "test_two_ranks_train_as_one[ddp]",
    "test_what_it_starts[eight_gpus_fsdp2]",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_here = item.path.parent == Path(__file__).parent
        if is_here and item.name not in IN_CI and "ALL_CASES" not in os.environ:
            item.add_marker(pytest.mark.release)


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
