"""What README.md says of other stacks: benchmarks/why.py runs them, and the kit beside them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import why


def test_examples_packed_by_the_kit_do_not_see_each_other():
    changed = why.leak()
    assert changed["kit"] == 0
    assert changed["flattening"] > 0.5  # transformers with the default cache
    assert changed["Trainer"] == 0


def test_no_row_of_the_kit_is_over_the_budget():
    found = why.budget()
    assert found["kit"]["over"] == 0
    assert found["kit"]["longest"] <= 4096
    assert found["kit"]["least_filled"] > 0.8
    assert found["flattening"]["over"] > 0.1


def test_the_gradient_is_that_of_the_token_mean():
    distance = why.loss()
    assert distance["kit"] < 1e-5
    assert distance["Trainer"] < 1e-5
    assert distance["accumulate"] > 0.1


@pytest.mark.parametrize("part", ["leak", "loss"])
def test_the_command_prints_all_three(part):
    command = [sys.executable, why.__file__, part]
    printed = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=True
    ).stdout
    lines = printed.splitlines()
    assert [line.endswith(" 0.0%") for line in lines[1:]] == [False, True, True], printed
