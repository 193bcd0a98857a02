"""sft.py on another number of ranks, and what a saved run tells of its steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sft

from tests.examples.test_sft import BASE, TWO_RANKS, Run, launch, run
from torch_collate_kit.__main__ import main

__all__ = ["run"]  # a fixture

OPTIONS = ("--checkpoint-every", "1", "--keep-checkpoints", "9", "--max-steps", "6")


def forget(folder: Path, step: int) -> None:
    """As if the run had been killed after the checkpoint of this step."""
    for path in folder.glob("checkpoint-*"):
        if int(path.name.partition("-")[2]) > step:
            shutil.rmtree(path)
    (folder / "summary.json").unlink()


@pytest.fixture(scope="module")
def one_rank(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("elastic") / "one"
    return run(f"{BASE} {' '.join(OPTIONS)}", folder), folder


@pytest.mark.release
def test_from_one_rank_to_two_and_back(
    one_rank: tuple[dict[str, Any], Path], run: Run, tmp_path: Path
) -> None:
    expected, folder = one_rank
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    forget(again, 2)
    on_two = launch(TWO_RANKS, again, *OPTIONS, "--resume")
    forget(again, 4)
    back = run(f"{BASE} {' '.join(OPTIONS)} --resume", again)
    for found in (on_two, back):
        assert len(found["losses"]) == 6
        assert found["losses"][:2] == expected["losses"][:2]
        assert np.abs(np.array(found["losses"]) - expected["losses"]).max() < 1e-6
    state = json.loads((again / "checkpoint-00000006" / "run.json").read_text())
    layouts = state["loader"]["sampler"]["layouts"]
    ranks = [(epoch, step, changed["dp"]) for epoch, step, changed in layouts]
    assert ranks == [(0, 0, 1), (0, 2, 2), (0, 4, 1)]


def test_the_examples_of_a_step_are_printed(
    one_rank: tuple[dict[str, Any], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    results, folder = one_rank
    arguments = ["step", folder / "checkpoint-00000006", folder / "examples", "--json"]
    tokenizer = ["--tokenizer", folder / "model"]
    for step, record in enumerate(results["steps"]):
        assert main([*map(str, [*arguments, *tokenizer, "--step", step])]) == 0
        found = json.loads(capsys.readouterr().out)["examples"]
        assert len(found) == 6
        assert sum(one["num_tokens"] for one in found) == record["tokens"]
        assert all(one["text"].strip() for one in found)


@pytest.mark.release
def test_rows_planned_for_more_ranks(run: Run, tmp_path: Path) -> None:
    """On two ranks the rows, and so the padding of every step, that one rank has."""
    options = ("--max-steps", "3", "--rows-multiple-of", "4")
    alone = run(f"{BASE} {' '.join(options)}", tmp_path / "alone")
    on_two = launch(TWO_RANKS, tmp_path / "two", *options)
    assert [s["cells"] for s in on_two["steps"]] == [s["cells"] for s in alone["steps"]]
    assert np.abs(np.array(on_two["losses"]) - alone["losses"]).max() < 1e-6
    with pytest.raises(SystemExit, match=r"--rows-multiple-of 0: must be 1 or more"):
        run(f"{BASE} --rows-multiple-of 0", tmp_path / "none")


def test_ranks_that_do_not_divide_the_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class TwoRanks(sft.Accelerator):
        num_processes = 2

    monkeypatch.setattr(sft, "Accelerator", TwoRanks)
    arguments = ["sft.py", *BASE.split(), "--rows-multiple-of", "3", "--output-dir", str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(
        SystemExit, match=r"--rows-multiple-of 3: must be a multiple of the 2 ranks"
    ):
        sft.main()
