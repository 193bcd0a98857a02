"""PaddedCollator against the oracle, on drawn batches and on the edges written out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.batch_checks import (
    assert_contract_dtypes,
    assert_equals_oracle,
    assert_round_trips,
    frozen,
    overwrite,
    same_value,
)
from tests.oracle import padded_batch
from tests.strategies import MANY, batches, padded_options
from torch_collate_kit.collators import PaddedCollator


@MANY
@given(data=st.data())
def test_equals_the_oracle_and_keeps_the_contract(data: st.DataObject) -> None:
    drawn = data.draw(batches())
    options = data.draw(padded_options(drawn.lengths))
    pad_token_id = data.draw(st.sampled_from((0, 3, 150_003)))
    before = frozen(drawn.given)

    batch = PaddedCollator(pad_token_id, **options)(drawn.given)

    assert same_value(drawn.given, before), "an argument was changed"
    overwrite(drawn.given)  # no field is made yet
    assert_equals_oracle(batch, padded_batch(drawn.plain, pad_token_id=pad_token_id, **options))
    assert_contract_dtypes(batch)
    assert_round_trips(batch, data.draw(st.integers(0, len(batch))))
