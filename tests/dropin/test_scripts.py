"""Every drop-in script trains as one example at a time does: each loss within 1e-5, in float32.

The scripts write the loss of each step and the numbers of its examples. Here the reference is
computed again, from those numbers, with plain transformers and torch. `make dropin` runs them all.
"""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from tests.dropin.launching import load_script, run_on_two_ranks, run_script, skip_without

tiny = load_script("tiny")

SCRIPTS = {  # ranks, and packages that the stack needs beside those of the tests
    "trainer": ((1, 2), ()),
    "ddp": ((2,), ()),
    "accelerate_loader": ((1, 2), ()),
    "controller": ((1,), ()),
    "sft_trainer": ((1, 2), ("trl", "peft")),
    "lightning_fit": ((1, 2), ("lightning",)),
    "ray_train": ((1,), ("ray",)),
    "stateful_loader": ((1,), ("torchdata",)),  # from here on streams
    "accelerate_stream": ((1, 2), ("torchdata",)),
    "lightning_stream": ((1,), ("lightning", "torchdata")),
    "ray_data": ((1,), ("ray",)),
}
OF_ROWS = (
    "trainer",
    "sft_trainer",
)  # 24 steps of four rows: two epochs, each in an order of its own
STOP_AFTER_20 = ("accelerate_stream", "lightning_stream")
CASES = [(name, num) for name, (ranks, _) in SCRIPTS.items() for num in ranks]
FORKED = [("accelerate_loader", 2), ("trainer", 2)]  # ranks without torchrun


@pytest.mark.parametrize(("script", "num_ranks"), CASES)
def test_losses_are_those_of_one_example_at_a_time(
    script: str, num_ranks: int, tmp_path: Path
) -> None:
    skip_without(*SCRIPTS[script][1])
    if (script, num_ranks) in FORKED:
        result = run_on_two_ranks(script, tmp_path)
    else:
        result = run_script(script, tmp_path, num_ranks=num_ranks)
    examples, numbers = tiny.make_examples(), result["numbers"]
    assert len(numbers) >= 20
    steps = [[examples[i] for i in step] for step in numbers]
    assert result["losses"] == pytest.approx(tiny.reference_losses(steps), abs=1e-5)
    first, last = np.mean(result["losses"][:5]), np.mean(result["losses"][-5:])
    assert last < first - 0.1, "nothing was learnt, so a step could be wrong unseen"
    seen = list(chain.from_iterable(numbers))
    if script in OF_ROWS:
        epochs = [list(chain(*numbers[:12])), list(chain(*numbers[12:]))]
        assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(160))
        assert epochs[0] != epochs[1]
        assert numbers[0] != sorted(numbers[0])
    else:
        assert len(set(seen)) == len(seen), "no example twice"
        assert len(seen) > 100 if script in STOP_AFTER_20 else sorted(seen) == list(range(160))
        if list(SCRIPTS).index(script) < list(SCRIPTS).index("stateful_loader"):
            assert [len(step) for step in numbers] == [8] * 20
    if script == "trainer":
        check_evaluation(result["printed"], {1: 3.106, 2: 3.103}[num_ranks])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_dpo_in_a_trainer_is_one_pair_at_a_time(num_ranks: int, tmp_path: Path) -> None:
    """The script has the reference, and ends with an error where a loss differs by 1e-5."""
    if num_ranks == 1:
        result = run_script("dpo_trainer", tmp_path)
    else:
        result = run_on_two_ranks("dpo_trainer", tmp_path)
    losses, numbers = result["losses"], result["numbers"]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6)
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.1
    assert set(chain.from_iterable(numbers)) == set(range(160))


def check_evaluation(printed: str, eval_loss: float) -> None:
    """The script compares each example with itself alone; the mean of Trainer is not exact."""
    assert "evaluation: 21 examples, the largest difference is" in printed
    for name, expected in (("eval_token_mean", 3.104), ("eval_loss", eval_loss)):
        found = re.search(rf"'{name}': '([\d.]+)'", printed)
        assert found is not None, printed
        assert float(found[1]) == pytest.approx(expected, abs=1e-3)
