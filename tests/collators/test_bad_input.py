"""Bad input is refused with a message that ends the search, as docs/contract.md prints it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.collators.bad_inputs import BAD_INPUTS, BadInput
from torch_collate_kit.collators import PackedCollator, PaddedCollator, RolloutCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import TokenizedDataset
from torch_collate_kit.packing import pack
from torch_collate_kit.ragged import Ragged

CONTRACT = Path(__file__).parents[2] / "docs" / "contract.md"


@pytest.mark.parametrize("case", BAD_INPUTS, ids=lambda case: case.given)
def test_bad_input_raises_what_the_contract_says(case: BadInput):
    shown = CONTRACT.read_text(encoding="utf-8")
    with pytest.raises((TypeError, ValueError)) as caught:
        case.call()
    message = str(caught.value).replace("|", "\\|")
    assert f"| {case.given} | `{caught.type.__name__}`: {message} |" in shown


PADDED = PaddedCollator(0)
SPLIT = PackedCollator(0, max_tokens=4, overflow="split")
FOR_TRAINER = PackedCollator(0, max_tokens=8).for_trainer()
LONG_ROW = {"input_ids": [1, 2, 3, 4, 5, 6, -9]}
ACTIONS = {"input_ids": [5, 6, 7, 8], "loss_mask": [1, -2], "num_actions": 2}
SEVERAL = r"example 0: num_actions is .* it must be an integer"
MASKED = np.ma.array([5, 6, 7], mask=[False, True, False])
COLUMNS = {"input_ids": [[5, 6], [7, 8]], "loss_mask": [[1], [1]]}
LOST = "is a masked array, whose mask would be lost"
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: SPLIT([{"input_ids": [1]}, LONG_ROW]), "example 1: input_ids is -9 at token 6"),
    (lambda: PADDED([ACTIONS]), r"example 0: loss_mask is -2\.0 at response token 1"),
    (lambda: PADDED([ACTIONS | {"num_actions": np.array([1, 2])}]), SEVERAL),
    (lambda: PADDED([ACTIONS | {"num_actions": torch.tensor([1, 2])}]), SEVERAL),
    (lambda: PADDED([ACTIONS | {"num_actions": np.array([])}]), SEVERAL),
    (lambda: FOR_TRAINER([{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0.25]}]),
     r"no loss_mask, but a token has weight 0\.25; give masks"),
    (lambda: PADDED({"input_ids": 5}), "collate one example as a list"),
    (lambda: PADDED({"input_ids": torch.tensor([5, 6])}), "collate one example as a list"),
    (lambda: PADDED(iter([])), "is a list_iterator; pass a list of examples, a mapping of columns"),
    (lambda: PADDED([{"input_ids": [5], "attention_mask": 1}]), "attention_mask is int; give a"),
    (lambda: PADDED([{"input_ids": np.array([5, 6]), "attention_mask": torch.tensor([0, 1])}]),
     "attention_mask contains a 0"),
    (lambda: PADDED({**COLUMNS, "num_actions": MASKED[:2]}), f"column num_actions {LOST}"),
    (lambda: PADDED({**COLUMNS, "loss_mask": MASKED[:2, None]}), f"column loss_mask {LOST}"),
    (lambda: Ragged(MASKED, [0, 3]), r"values are a masked array.*pass \.filled"),
    (lambda: Ragged.from_rows([[1], MASKED]), r"row 1 is a masked array.*pass \.compressed"),
    (lambda: TokenizedDataset([{"input_ids": [1]}, {"input_ids": MASKED}]),
     r"example 1: input_ids is a masked array.*\.compressed"),
    (lambda: pack(MASKED, 8), r"lengths is a masked array.*pass \.compressed"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_else_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((DataError, TypeError), match=words):
        call()


def test_weights_of_0_and_1_are_passed_on_as_labels() -> None:
    assert "loss_mask" not in FOR_TRAINER([{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]}])


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
