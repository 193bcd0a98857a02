"""PaddedCollator against the oracle, on drawn batches and on the edges written out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batch_checks import (
    assert_contract_dtypes,
    assert_equals_oracle,
    assert_round_trips,
    frozen,
    same_value,
)
from tests.oracle import padded_batch
from tests.strategies import COUNT_COLUMNS, FORMS, FUZZ, batches, count_column, padded_options
from torch_collate_kit.collators import PaddedCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged

SIDES = ("left", "right")


@pytest.mark.parametrize("form", FORMS)
@FUZZ
@given(data=st.data())
def test_equals_the_oracle_and_keeps_the_contract(form: str, data: st.DataObject) -> None:
    drawn = data.draw(batches(form))
    options = data.draw(padded_options(drawn.lengths))
    pad_token_id = data.draw(st.sampled_from((0, 3, 150_003)))
    before = frozen(drawn.given)

    batch = PaddedCollator(pad_token_id, **options)(drawn.given)

    assert same_value(drawn.given, before), "an argument was changed"
    assert_equals_oracle(batch, padded_batch(drawn.plain, pad_token_id=pad_token_id, **options))
    assert_contract_dtypes(batch)
    assert_round_trips(batch, data.draw(st.integers(0, len(batch))))


@FUZZ
@given(st.data())
def test_normalised_loss_sums_to_the_mean_weight(data: st.DataObject) -> None:
    drawn = data.draw(batches(columns=False))
    plain = PaddedCollator(0, normalize_loss=False)(drawn.given)
    normal = PaddedCollator(0, normalize_loss=True)(drawn.given)
    divisor = normal.metadata["loss_mask_divisor"]
    assert divisor == max(1, int((plain["loss_mask"] != 0).sum()))
    assert bool(((plain["loss_mask"] / divisor) == normal["loss_mask"]).all())


def _collate(examples: list[dict[str, Any]], **options: Any) -> Any:
    batch = PaddedCollator(0, **options)(examples)
    assert_equals_oracle(batch, padded_batch(examples, pad_token_id=0, **options))
    assert_contract_dtypes(batch)
    assert_round_trips(batch, 1)
    return batch


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("multiple", "width"), [(None, 9), (1, 9), (3, 9), (4, 12), (16, 16)])
def test_pad_to_multiple_of_may_pass_max_length(side: str, multiple: int, width: int) -> None:
    examples = [{"input_ids": list(range(1, 10))}, {"input_ids": [11, 12]}]
    batch = _collate(examples, padding_side=side, pad_to_multiple_of=multiple, max_length=9)
    assert batch["input_ids"].shape == (2, width)


@pytest.mark.parametrize(
    "target",
    [
        [{"loss_mask": [1, 0, 1]}, {"loss_mask": [1, 1, 0, 0, 1]}],
        [{"loss_mask": [1, 1], "num_actions": 2}, {"loss_mask": [0], "num_actions": 1}],
        [{"labels": [-100, 0, 0]}, {"labels": [-100, 0, -100, 0, 0]}],
        [{}, {}],
    ],
)
@pytest.mark.parametrize("side", SIDES)
def test_pad_cells_are_told_from_tokens_that_equal_the_pad_id(
    target: list[dict[str, Any]], side: str
) -> None:
    examples = [{"input_ids": [0, 0, 0], **target[0]}, {"input_ids": [5, 0, 5, 0, 5], **target[1]}]
    batch = _collate(examples, padding_side=side)
    assert batch["attention_mask"].sum(dim=1).tolist() == [3, 5]


@pytest.mark.parametrize("kind", COUNT_COLUMNS)
def test_num_actions_may_be_a_column_of_any_kind(kind: str) -> None:
    examples = [
        {"input_ids": [1, 2, 3], "loss_mask": [1, 1], "num_actions": 2},
        {"input_ids": [4, 5], "loss_mask": [1], "num_actions": 1},
    ]
    columns = {
        "input_ids": Ragged.from_rows([[1, 2, 3], [4, 5]]),
        "loss_mask": Ragged.from_rows([[1, 1], [1]]),
        "num_actions": count_column(kind, [2, 1]),
    }
    assert_equals_oracle(PaddedCollator(0)(columns), padded_batch(examples, pad_token_id=0))


def test_examples_of_one_batch_share_their_target_form() -> None:
    """An example without the mask that the others have would be trained on as a whole."""
    examples = [{"input_ids": [1, 2], "loss_mask": [0, 1]}, {"input_ids": [3, 4]}]
    with pytest.raises(DataError, match=r"example 1 .*loss_mask"):
        PaddedCollator(0)(examples)


def test_an_example_longer_than_max_length_raises() -> None:
    with pytest.raises(DataError, match=r"example 1\b.*\b3\b"):
        PaddedCollator(0, max_length=2)([{"input_ids": [1, 2]}, {"input_ids": [3, 4, 5]}])
