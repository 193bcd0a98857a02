"""Every drop-in script trains as one example at a time does: each loss within 1e-5, in float32.

The scripts write the loss of each step and the numbers of its examples. Here the reference is
computed again, from those numbers, with plain transformers and torch.
"""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dropin.launching import load_script, run_script, skip_without

tiny = load_script("tiny")

RELEASE = pytest.mark.release
# Script, ranks, packages that the stack needs beside those of the tests.
SCRIPTS = [
    pytest.param("ddp", 2, (), id="ddp on 2 ranks", marks=RELEASE),
    pytest.param("accelerate_loader", 1, (), id="accelerate_loader"),
    pytest.param("accelerate_loader", 2, (), id="accelerate_loader on 2 ranks"),
    pytest.param("controller", 1, (), id="controller", marks=RELEASE),
    pytest.param("sft_trainer", 1, ("trl", "peft"), id="sft_trainer"),
    pytest.param("sft_trainer", 2, ("trl", "peft"), id="sft_trainer on 2 ranks", marks=RELEASE),
    pytest.param("lightning_fit", 1, ("lightning",), id="lightning_fit"),
    pytest.param("lightning_fit", 2, ("lightning",), id="lightning_fit on 2 ranks"),
    pytest.param("ray_train", 1, ("ray",), id="ray_train"),
]
STREAMS = [
    pytest.param("stateful_loader", 1, ("torchdata",), id="stateful_loader"),
    pytest.param("accelerate_stream", 1, (), id="accelerate_stream"),
    pytest.param("accelerate_stream", 2, (), id="accelerate_stream on 2 ranks", marks=RELEASE),
    pytest.param("lightning_stream", 1, ("lightning",), id="lightning_stream"),
    pytest.param("ray_data", 1, ("ray",), id="ray_data"),
]


def check_losses(result: dict[str, Any]) -> None:
    examples = tiny.make_examples()
    steps = [[examples[i] for i in numbers] for numbers in result["numbers"]]
    assert len(steps) >= 20
    assert result["losses"] == pytest.approx(tiny.reference_losses(steps), abs=1e-5)
    first, last = np.mean(result["losses"][:5]), np.mean(result["losses"][-5:])
    assert last < first - 0.1, "nothing was learnt, so a step could be wrong unseen"


def check_epoch(result: dict[str, Any]) -> None:
    """Of 20 steps of 8 examples, each once."""
    check_losses(result)
    assert [len(step) for step in result["numbers"]] == [8] * 20
    assert sorted(chain.from_iterable(result["numbers"])) == list(range(160))


@pytest.mark.parametrize(("script", "num_ranks", "packages"), SCRIPTS)
def test_losses_are_those_of_one_example_at_a_time(
    script: str, num_ranks: int, packages: tuple[str, ...], tmp_path: Path
) -> None:
    skip_without(*packages)
    check_epoch(run_script(script, tmp_path, num_ranks=num_ranks))


def printed_number(printed: str, name: str) -> float:
    found = re.search(rf"'{name}': '([\d.]+)'", printed)
    assert found is not None, printed
    return float(found[1])


@pytest.mark.parametrize(("num_ranks", "eval_loss"), [(1, 3.118), (2, 3.475)])
def test_trainer_evaluates_examples_exactly_where_eval_loss_is_not(
    num_ranks: int, eval_loss: float, tmp_path: Path
) -> None:
    """The script itself compares the examples with each alone, and fails if they differ."""
    result = run_script("trainer", tmp_path, num_ranks=num_ranks)
    check_epoch(result)
    printed = result["printed"]
    assert "evaluation: 21 examples, the largest difference is" in printed
    assert printed_number(printed, "eval_token_mean") == pytest.approx(3.145, abs=2e-3)
    assert printed_number(printed, "eval_loss") == pytest.approx(eval_loss, abs=2e-3)


@pytest.mark.parametrize(("script", "num_ranks", "packages"), STREAMS)
def test_losses_of_streams_are_those_of_one_example_at_a_time(
    script: str, num_ranks: int, packages: tuple[str, ...], tmp_path: Path
) -> None:
    skip_without(*packages)
    result = run_script(script, tmp_path, num_ranks=num_ranks)
    check_losses(result)
    given = list(chain.from_iterable(result["numbers"]))
    assert len(set(given)) == len(given), "no example twice"
    if script in ("accelerate_stream", "lightning_stream"):  # they stop after 20 steps
        assert len(given) > 100
    else:
        assert sorted(given) == list(range(160))
