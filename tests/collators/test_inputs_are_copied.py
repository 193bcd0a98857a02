"""A batch holds copies: inputs may be changed after collation, before a field is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from torch_collate_kit.collators import PackedCollator, PaddedCollator, RolloutCollator
from torch_collate_kit.ragged import Ragged

LENGTHS, RESPONSES = [3, 4, 2], [2, 3, 1]


def column(
    lengths: list[int], dtype: Any, row_shape: tuple[int, ...] = (), *, one: int = 1
) -> Ragged:
    count = sum(lengths) * int(np.prod(row_shape))
    return Ragged.from_lengths(
        (np.arange(count) % 2 * one).astype(dtype).reshape(-1, *row_shape), lengths
    )


def rollout_columns(**dtypes: Any) -> dict[str, Any]:
    return {
        "prompt_ids": column(LENGTHS, np.int32),
        "response_ids": column(RESPONSES, np.int32),
        "rewards": column(RESPONSES, np.float32),
        "loss_mask": column(RESPONSES, dtypes.get("mask", np.float32)),
        "logprobs": column(RESPONSES, np.float32, one=-1),
        "advantages": column(RESPONSES, np.float32),
        "rollout_expert_indices": column(LENGTHS, np.int16, (2, 2)),
    }


def images() -> dict[str, Ragged]:
    grids = Ragged.from_lengths(np.array([[1, 1, 2]] * 3), [1, 1, 1])
    return {"pixel_values": column([2, 2, 2], np.float32, (3,)), "image_grid_thw": grids}


def sft_columns(target: str, dtype: Any, ids: Any = np.int32) -> dict[str, Ragged]:
    return {"input_ids": column(LENGTHS, ids), target: column(LENGTHS, dtype)}


CASES: dict[str, Any] = {
    **{
        f"{kind} {target} {np.dtype(dtype)} {np.dtype(ids)}": (
            collate,
            lambda target=target, dtype=dtype, ids=ids: sft_columns(target, dtype, ids),
        )
        for kind, collate in {
            "padded": PaddedCollator(0),
            "packed": PackedCollator(0, max_tokens=9, strategy="sequential"),
        }.items()
        for target, dtype, ids in [
            ("loss_mask", np.bool_, np.int32),
            ("loss_mask", np.float32, np.int64),
            ("labels", np.int32, np.int32),
            ("labels", np.int64, np.int64),
        ]
    },
    "rollouts": (RolloutCollator(0), lambda: rollout_columns() | images()),
    "rollouts, bools": (RolloutCollator(0), lambda: rollout_columns(mask=np.bool_)),
    "packed rollouts": (PackedCollator(0, max_tokens=20, strategy="sequential"), rollout_columns),
}


@pytest.mark.parametrize("name", list(CASES))
def test_inputs_that_are_changed_later_do_not_change_the_batch(name: str) -> None:
    collate, make = CASES[name]
    expected, given = collate(make()), make()
    dict(expected)
    batch = collate(given)
    for ragged in given.values():
        ragged.values[...] = 1 - ragged.values if ragged.values.dtype != np.bool_ else True
    assert batch == expected
    for field in batch:
        found, wanted = batch[field], expected[field]
        same = found == wanted
        assert same if isinstance(same, bool) else same.all(), field
