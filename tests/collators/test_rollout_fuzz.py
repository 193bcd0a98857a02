"""RolloutCollator, and PackedCollator on rollouts, against the oracle: drawn batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
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
from tests.building import packed_collator
from tests.oracle import packed_rollouts, rollout_batch
from tests.rollout_strategies import packed_rollout_options, rollout_options, rollouts
from tests.strategies import FUZZ, PackedOptions
from torch_collate_kit.collators import PackedCollator, RolloutCollator
from torch_collate_kit.packing import ParallelLayout

PAD_IDS = st.sampled_from((0, 3, 150_003))


@pytest.mark.parametrize("routes", [False, True])
@pytest.mark.parametrize("images", [False, True])
@FUZZ
@given(data=st.data())
def test_one_block_equals_the_oracle(images: bool, routes: bool, data: st.DataObject) -> None:
    drawn = data.draw(rollouts(images=images, pixel_values=True, rollout_expert_indices=routes))
    options = data.draw(rollout_options(drawn.lengths))
    pad_token_id = data.draw(PAD_IDS)
    before = frozen(drawn.given)

    batch = RolloutCollator(pad_token_id, **options)(drawn.given)

    assert same_value(drawn.given, before), "an argument was changed"
    overwrite(drawn.given)  # no field is made yet
    assert_equals_oracle(batch, rollout_batch(drawn.plain, pad_token_id=pad_token_id, **options))
    assert_contract_dtypes(batch)
    assert_round_trips(batch, data.draw(st.integers(0, len(batch))))
    assert all(type(flag) is bool for flag in batch.row_metadata.get("is_last_step", []))
    uids = batch.row_metadata.get("uids", [])
    assert not any(isinstance(uid, np.generic | torch.Tensor) for uid in uids)


@pytest.mark.parametrize("routes", [False, True])
@FUZZ
@given(data=st.data())
def test_packed_rows_equal_the_oracle(routes: bool, data: st.DataObject) -> None:
    drawn = data.draw(rollouts(images=False, rollout_expert_indices=routes))
    options = data.draw(packed_rollout_options(drawn.lengths))
    pad_token_id = data.draw(PAD_IDS)
    collator = _packed_collator(options, pad_token_id)
    before = frozen(drawn.given)

    batch = collator(drawn.given)

    assert same_value(drawn.given, before), "an argument was changed"
    overwrite(drawn.given)  # no field is made yet
    expected = packed_rollouts(
        drawn.plain,
        collator.plan(drawn.lengths),
        pad_token_id=pad_token_id,
        max_tokens=options.collator["max_tokens"],
        align=options.align,
        row_align=options.row_align,
        fixed_width=options.collator["fixed_width"],
        normalize_loss=options.collator["normalize_loss"],
    )
    assert_equals_oracle(batch, expected)
    assert_contract_dtypes(batch)
    assert_round_trips(batch, data.draw(st.integers(0, len(batch))))


def _packed_collator(options: PackedOptions, pad_token_id: int, **more: bool) -> PackedCollator:
    layout = ParallelLayout(**options.layout)
    return packed_collator(pad_token_id, parallel=layout, **options.collator, **more)
