"""Bad input is refused with a message that ends the search, as docs/contract.md prints it."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.collators.bad_inputs import BAD_INPUTS, BadInput
from torch_collate_kit.collators import PackedCollator, PaddedCollator, RolloutCollator
from torch_collate_kit.errors import DataError

CONTRACT = Path(__file__).parents[2] / "docs" / "contract.md"


@pytest.mark.parametrize("case", BAD_INPUTS, ids=lambda case: case.given)
def test_bad_input_raises_what_the_contract_says(case: BadInput):
    shown = CONTRACT.read_text(encoding="utf-8")
    with pytest.raises((TypeError, ValueError)) as caught:
        case.call()
    message = str(caught.value).replace("|", "\\|")
    assert f"| {case.given} | `{caught.type.__name__}`: {message} |" in shown


def test_the_message_names_the_token_of_the_example_after_a_split():
    collate = PackedCollator(0, max_tokens=4, overflow="split")
    with pytest.raises(DataError, match="example 1: input_ids is -9 at token 6"):
        collate([{"input_ids": [1]}, {"input_ids": [1, 2, 3, 4, 5, 6, -9]}])


def test_the_message_names_the_response_token_of_a_response_mask():
    example = {"input_ids": [5, 6, 7, 8], "loss_mask": [1, -2], "num_actions": 2}
    with pytest.raises(DataError, match=r"example 0: loss_mask is -2\.0 at response token 1"):
        PaddedCollator(0)([example])


@pytest.mark.parametrize("mask", [[0, 1, 1], np.array([0, 1, 1]), torch.tensor([0, 1, 1])])
def test_padded_examples_are_refused_in_every_form(mask):
    with pytest.raises(DataError, match="attention_mask contains a 0"):
        PaddedCollator(0)([{"input_ids": [5, 6, 7], "attention_mask": mask}])


def test_arguments_are_never_changed():
    examples = [
        {"input_ids": [5, 6, 7], "loss_mask": [1, 0.5], "num_actions": 2},
        {"input_ids": np.array([8, 9]), "loss_mask": np.array([1.0]), "num_actions": 1},
        {
            "input_ids": torch.tensor([3, 2, 1]),
            "loss_mask": torch.tensor([1.0, 1.0], requires_grad=True),
            "num_actions": torch.tensor(2),
        },
    ]
    before = copy.deepcopy(examples)
    for collate in (PaddedCollator(0), PackedCollator(0, max_tokens=8)):
        batch = collate(examples)
        batch["input_ids"].fill_(-1)  # what comes out shares no memory with what went in
        batch["loss_mask"].fill_(-1)
    for example, old in zip(examples, before, strict=True):
        assert example.keys() == old.keys()
        for key, value in example.items():
            assert type(value) is type(old[key])
            assert np.array_equal(_plain(value), _plain(old[key]))


def _plain(value):
    return value.detach().numpy() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("counts", [torch.tensor([1, 2]), np.array([1, 2]), np.array([])])
def test_several_numbers_of_actions_in_one_example_are_refused(counts):
    example = {"input_ids": [5, 6, 7], "loss_mask": [1, 1], "num_actions": counts}
    with pytest.raises(DataError, match=r"example 0: num_actions is .* it must be an integer"):
        PaddedCollator(0)([example])


def test_weights_are_refused_where_only_labels_are_passed_on():
    collate = PackedCollator(0, max_tokens=8).for_trainer()
    with pytest.raises(DataError, match=r"no loss_mask, but a token has weight 0\.25; give masks"):
        collate([{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0.25]}])
    assert "loss_mask" not in collate([{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]}])


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ({"input_ids": 5}, "collate one example as a list"),
        ({"input_ids": torch.tensor([5, 6])}, "collate one example as a list"),
        (iter([]), "examples is a list_iterator; pass a list of examples, a mapping of columns"),
        ([{"input_ids": [5], "attention_mask": 1}], "example 0: attention_mask is int; give a lis"),
    ],
)
def test_near_misses_name_the_way_out(examples, message):
    with pytest.raises((DataError, TypeError), match=message):
        PaddedCollator(0)(examples)


# --- rows of more cells than int32 counts --------------------------------------------------------

LONG = np.broadcast_to(np.int64(5), 2**31 + 5)  # takes no memory
LONG_ROLLOUT = {"rewards": 1.0, "loss_mask": np.broadcast_to(True, 2**31 + 5)}
WIDE = {
    "padded": (PaddedCollator(0), {"input_ids": LONG}, "2147483653.*shorten example 1 when"),
    "rounded up": (PaddedCollator(0, pad_to_multiple_of=2**31), {"input_ids": [5, 6, 7]},
     "2147483648 cells, more than the 2147483647 that"),
    "packed": (PackedCollator(0, max_tokens=2**32), {"input_ids": LONG},
     "example 1 has 2147483653 tokens, more than the 2147483647 that fit.*int32 counts.*shorten"),
    "fixed width": (PackedCollator(0, max_tokens=2**32, fixed_width=True), {"input_ids": [5, 6, 7]},
     "row would have 4294967296 cells.*lower max_tokens=4294967296"),
    "rollouts": (RolloutCollator(0), {**LONG_ROLLOUT, "prompt_ids": [5, 6, 7],
     "response_ids": LONG}, "2147483656 cells.*filter out example 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", WIDE)
def test_rows_of_more_cells_than_int32_counts_are_refused(name):
    collate, long, message = WIDE[name]
    good = {key: np.array(value[:3]) if np.ndim(value) else value for key, value in long.items()}
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    try:  # an allocation of such a row fails, rather than fill the memory of the machine
        most = pages * resource.getpagesize() + 2**30
        resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
        with pytest.raises(DataError, match=message):
            collate([good, long])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
