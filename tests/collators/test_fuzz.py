"""Every collator against the oracle on drawn batches, and packed rows against laws of a plan."""

from __future__ import annotations

import itertools
from typing import Any

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
from tests.oracle import packed_batch, packed_rollouts, padded_batch, rollout_batch
from tests.rollout_strategies import packed_rollout_options, rollout_options, rollouts
from tests.strategies import FUZZ, MANY, PackedOptions, batches, packed_options, padded_options
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator, RolloutCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing import ParallelLayout


def collator_of(options: PackedOptions, pad_token_id: int = 0, **more: Any) -> PackedCollator:
    layout = ParallelLayout(**options.layout)
    return packed_collator(pad_token_id, parallel=layout, **options.collator, **more)


PAD_IDS = st.sampled_from((0, 3, 150_003))


def collated(collate: Any, given: Any) -> Batch:
    """Collate, and overwrite what was given: it is not changed, and no field is made yet."""
    before = frozen(given)
    batch = collate(given)
    assert same_value(given, before), "an argument was changed"
    overwrite(given)
    return batch


def assert_equals(batch: Batch, expected: dict[str, Any], data: st.DataObject) -> None:
    assert_equals_oracle(batch, expected)
    assert_contract_dtypes(batch)
    assert_round_trips(batch, data.draw(st.integers(0, len(batch))))


@MANY
@given(data=st.data())
def test_packed_rows_equal_the_oracle_and_keep_the_contract(data: st.DataObject) -> None:
    drawn = data.draw(batches())
    options = data.draw(packed_options(drawn.lengths))
    pad_token_id = data.draw(PAD_IDS)
    collator = collator_of(options, pad_token_id)
    batch = collated(collator, drawn.given)
    assert_plan_laws(batch, drawn.lengths, options)
    assert_equals(batch, _expected(collator, drawn.plain, options, pad_token_id), data)


@MANY
@given(data=st.data())
def test_padded_rows_equal_the_oracle_and_keep_the_contract(data: st.DataObject) -> None:
    drawn = data.draw(batches())
    options, pad_token_id = data.draw(padded_options(drawn.lengths)), data.draw(PAD_IDS)
    batch = collated(PaddedCollator(pad_token_id, **options), drawn.given)
    assert_equals(batch, padded_batch(drawn.plain, pad_token_id=pad_token_id, **options), data)


@FUZZ
@given(data=st.data())
def test_a_block_of_rollouts_equals_the_oracle(data: st.DataObject) -> None:
    images, routes = data.draw(st.booleans()), data.draw(st.booleans())
    drawn = data.draw(rollouts(images=images, pixel_values=True, rollout_expert_indices=routes))
    options, pad_token_id = data.draw(rollout_options(drawn.lengths)), data.draw(PAD_IDS)
    batch = collated(RolloutCollator(pad_token_id, **options), drawn.given)
    assert_equals(batch, rollout_batch(drawn.plain, pad_token_id=pad_token_id, **options), data)
    assert all(type(flag) is bool for flag in batch.row_metadata.get("is_last_step", []))
    uids = batch.row_metadata.get("uids", [])
    assert not any(isinstance(uid, np.generic | torch.Tensor) for uid in uids)


@FUZZ
@given(data=st.data())
def test_packed_rollouts_equal_the_oracle(data: st.DataObject) -> None:
    routes = data.draw(st.booleans())
    drawn = data.draw(rollouts(images=False, rollout_expert_indices=routes))
    options = data.draw(packed_rollout_options(drawn.lengths))
    pad_token_id = data.draw(PAD_IDS)
    collator = collator_of(options, pad_token_id)
    batch = collated(collator, drawn.given)
    assert_equals(batch, _expected(collator, drawn.plain, options, pad_token_id), data)


@FUZZ
@given(st.data())
def test_model_inputs_are_the_fields_and_flat_boundaries(data: st.DataObject) -> None:
    drawn = data.draw(batches(max_examples=6, columns=False))
    options = data.draw(packed_options(drawn.lengths))
    collator = collator_of(options, train_all=drawn.form == "none")
    expected = _expected(collator, drawn.plain, options, 0)
    for_trainer = collator.for_trainer()
    trained = expected["loss_mask"][expected["loss_mask"] != 0]
    unit = torch.tensor(1.0) / expected["metadata"]["loss_mask_divisor"]
    if (trained != unit).any():  # labels cannot carry weights
        with pytest.raises(DataError, match="passes on labels, no loss_mask"):
            for_trainer(drawn.given)
        return
    inputs = for_trainer(drawn.given)
    assert type(inputs) is dict
    num_rows, width = expected["input_ids"].shape
    flat = [0]
    for row, boundaries in enumerate(expected["cu_seq_lens"]):
        flat += [row * width + boundary for boundary in boundaries[1:]]
    longest = max(b - a for a, b in itertools.pairwise(flat))
    assert flat[-1] == num_rows * width
    most = options.collator.get("max_sequences_per_row")
    if most is not None and options.collator.get("fixed_width"):  # a promised shape
        flat += [flat[-1]] * (num_rows * (most + 1) + 1 - len(flat))
        longest = width
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        boundaries = inputs.pop(name)
        assert boundaries.dtype == torch.int32
        assert boundaries.tolist() == flat
    for name in ("max_length_q", "max_length_k"):
        assert type(inputs[name]) is int
        assert inputs.pop(name) == longest
    assert inputs.pop("use_cache") is False
    assert set(inputs) == {"input_ids", "position_ids", "labels"}
    for name, tensor in inputs.items():
        assert torch.equal(tensor, expected[name]), name


@FUZZ
@given(st.data())
def test_overflow_raise_names_the_example(data: st.DataObject) -> None:
    drawn = data.draw(batches(max_examples=4))
    options = data.draw(packed_options(drawn.lengths, overflow="drop"))
    options.collator["overflow"] = "raise"
    too_long = [i for i, n in enumerate(drawn.lengths) if n > options.capacity]
    if too_long:
        with pytest.raises(DataError, match=rf"example {too_long[0]}\b"):
            collator_of(options)(drawn.given)
    else:
        collator_of(options)(drawn.given)


def assert_plan_laws(batch: Batch, lengths: list[int], options: PackedOptions) -> None:
    """What must hold for every strategy, read from the batch alone."""
    capacity, align, dp = options.capacity, options.align, options.layout["dp"]
    overflow = options.collator["overflow"]
    pieces: dict[int, list[int]] = {}
    rows = zip(
        batch.row_metadata["example_indices"].tolist(),
        batch["sub_seq_lengths"].tolist(),
        strict=True,
    )
    for indices, row_lengths in rows:
        cells = [-(-length // align) * align for length in row_lengths]
        assert sum(cells) <= options.collator["max_tokens"]
        assert len(cells) <= (options.collator["max_sequences_per_row"] or len(cells))
        for index, length in zip(indices, row_lengths, strict=True):
            pieces.setdefault(index, []).append(length)
    over_long = {index for index, length in enumerate(lengths) if length > capacity}
    wanted = {index: [length] for index, length in enumerate(lengths)}
    for index in over_long:
        if overflow == "drop":
            del wanted[index]
        elif overflow == "truncate":
            wanted[index] = [capacity]
        elif overflow == "split":
            whole, rest = divmod(lengths[index], capacity)
            wanted[index] = [capacity] * whole + [rest] * (rest > 0)
    found = {index: sorted(sizes, reverse=True) for index, sizes in pieces.items()}
    assert found == wanted
    listed = tuple(sorted(over_long))
    assert batch.metadata["dropped"] == (listed if overflow == "drop" else ())
    assert batch.metadata["cut"] == (() if overflow == "drop" else listed)

    num_pieces = sum(len(sizes) for sizes in wanted.values())
    num_rows = len(batch)
    assert num_rows % dp == 0
    assert dp <= num_rows <= max(dp, -(-num_pieces // dp) * dp)
    assert batch.metadata["num_dummy_rows"] == max(0, num_rows - num_pieces)
    width = batch["input_ids"].shape[1]
    assert width % options.row_align == width % align == 0
    assert width <= options.collator["max_tokens"]
    if options.collator["fixed_width"]:
        assert width == capacity


def _expected(
    collator: PackedCollator,
    examples: list[dict[str, Any]],
    options: PackedOptions,
    pad_token_id: int,
) -> dict[str, Any]:
    are_rollouts = "response_ids" in examples[0]
    keys = ("prompt_ids", "response_ids") if are_rollouts else ("input_ids",)
    plan = collator.plan([sum(len(example[key]) for key in keys) for example in examples])
    return (packed_rollouts if are_rollouts else packed_batch)(
        examples,
        plan,
        pad_token_id=pad_token_id,
        align=options.align,
        row_align=options.row_align,
        **{
            name: options.collator[name] for name in ("max_tokens", "fixed_width", "normalize_loss")
        },
    )


# --- edges ---------------------------------------------------------------------------------------


def test_a_batch_of_which_all_is_dropped_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    torch.set_warn_always(True)
    try:
        batch = PackedCollator(0, max_tokens=2, overflow="drop")([{"input_ids": [1, 2, 3]}])
    finally:
        torch.set_warn_always(False)
    assert (batch.metadata["dropped"], batch["sub_seq_lengths"].tolist()) == ((0,), [[]])
    assert not recwarn.list
