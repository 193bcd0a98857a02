"""Values of the response tokens, cut out of right-aligned rows, and put back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.rl import oracle_rl as oracle
from torch_collate_kit import PackedCollator, RolloutCollator
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing import ParallelLayout
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.rl import from_response_values, response_values

MASK = torch.tensor([[0, 0, 1], [1, 1, 1], [0, 0, 0]])


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    extra=st.integers(0, 3),
    more=st.integers(0, 3),
)
def test_against_the_oracle(lengths: list[int], extra: int, more: int) -> None:
    width = max(lengths) + extra
    mask = [[0] * (width - n) + [1] * n for n in lengths]
    values = torch.arange(len(lengths) * (max(lengths) + more)).reshape(len(lengths), -1).float()
    found = response_values(values, torch.tensor(mask).reshape(len(lengths), width))
    assert found == oracle.response_values(values.tolist(), mask)
    assert [len(row) for row in found] == lengths


V, NOT_RIGHT = torch.zeros(3, 3), torch.tensor([[0, 1, 1], [1, 0, 0]])


@pytest.mark.parametrize(
    ("values", "mask", "error", "message"),
    [
        ([[1.0]], MASK, TypeError, r"values must be a tensor \[B, A\], got list"),
        (V, MASK.numpy(), TypeError, "response_mask must be a tensor .* got ndarray"),
        (V[0], MASK, ValueError, r"values must be \[B, A\], got shape \[3\]"),
        (V, MASK[0], ValueError, r"response_mask must be \[B, A\]"),
        (V[:2], MASK, ValueError, "values has 2 rows, response_mask has 3"),
        (V[:, :2], MASK, ValueError, "row 1 has response tokens in its last 3 cells, but values"),
        (V[:2], NOT_RIGHT, DataError, "row 1: response_mask has 1 response tokens that are not"),
        (V[:1], torch.tensor([[1, 0, 1]]), DataError, "row 0: .* has 2 response .*left-pad the"),
        (V[:1], torch.tensor([[0, float("nan")]]), DataError, "response_mask is nan at column 1"),
    ],
)
def test_errors(values: Any, mask: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        response_values(values, mask)


# --- of a batch, and back -------------------------------------------------------------------------

SHAPES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=7)


def rollouts(shape: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Values that are all different: rollout i, response token j has -(i + j / 8)."""
    return [
        {
            "prompt_ids": [1] * p,
            "response_ids": [2] * r,
            "rewards": 0.0,
            "loss_mask": [1] * r,
            "logprobs": [-(i + j / 8) for j in range(r)],
        }
        for i, (p, r) in enumerate(shape)
    ]


def collated(kind: str, given: list[dict[str, Any]]) -> Batch:
    if kind == "padded":
        return RolloutCollator(0, pad_to_multiple_of=4)(given)
    layout = ParallelLayout(dp=2, tp=2)  # gaps, tails, and rows that are added
    return PackedCollator(0, max_tokens=12, parallel=layout)(given)


@pytest.mark.parametrize("kind", ["padded", "packed"])
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_round_trips_of_a_batch(kind: str, shape: list[tuple[int, int]], seed: int) -> None:
    given_rollouts = rollouts(shape)
    batch = collated(kind, given_rollouts).pad_rows(multiple_of=3)
    batch = batch.select(np.random.default_rng(seed).permutation(len(batch)))
    lists = [rollout["logprobs"] for rollout in given_rollouts]
    dense = from_response_values(lists, batch)
    assert torch.equal(dense, batch["rollout_logprobs"])
    assert response_values(dense, batch) == lists
    values = torch.randn(batch["loss_mask"].shape, dtype=torch.float64)
    again = from_response_values(response_values(values, batch), batch, dtype=torch.float64)
    assert torch.equal(again, values * batch["response_mask"])
    if kind == "padded":  # by rows instead
        mask = batch["response_mask"]
        rows = response_values(values, mask)
        assert [len(row) for row in rows] == mask.sum(dim=1).tolist()
        assert torch.equal(from_response_values(rows, mask, dtype=torch.float64), again)


@pytest.mark.parametrize(
    "values",
    [
        [[1, 2], [3]],
        [np.array([1.0, 2.0]), np.array([3], dtype=np.float16)],
        [torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True), [3.0]],
        Ragged.from_rows([[1.0, 2.0], [3.0]]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values_of_any_kind(values: Any, dtype: torch.dtype) -> None:
    found = from_response_values(values, torch.tensor([[0, 1, 1], [0, 0, 1]]), dtype=dtype)
    assert found.dtype == dtype
    assert found.tolist() == [[0, 1, 2], [0, 0, 3]]
    assert not found.requires_grad


PACKED = collated("packed", rollouts([(1, 3), (2, 4)]))
TWICE = Batch.cat([PACKED[:1], PACKED[:1]], {"num_loss_tokens": 0})
DENSE = Batch(dict(PACKED.items()), row_metadata=PACKED.row_metadata)


@pytest.mark.parametrize(
    ("function", "values", "batch", "error", "message"),
    [
        (response_values, V[:1], PACKED, ValueError, "values has 1 rows, the batch has 2; pass"),
        (response_values, V[:2, :2], PACKED, ValueError, "has 2 columns; take the values of at"),
        (response_values, V[:2], TWICE, ValueError, "a piece of example 1 is in the batch twice"),
        (response_values, V[:2], DENSE, ValueError, "built from dense .*pass its response_mask"),
        (from_response_values, [[1.0] * 3], PACKED, ValueError, "the batch has 2 examples; pass"),
        (from_response_values, [[1.0]], MASK, ValueError, "1 entries, response_mask has 3 rows"),
        (from_response_values, [[1.0] * 3] * 2, PACKED, DataError, "^example 1: .* 3 .* for 4"),
        (from_response_values, [[1] * 3, ["a"] * 4], PACKED, DataError, r"1: values\[0\] is 'a'"),
        (from_response_values, [1.0, 2.0], PACKED, DataError, "^example 0: values is float; give"),
        (from_response_values, [[1.0]], [[1]], TypeError, "response_mask must be a tensor .*list"),
    ],
)
def test_errors_of_a_batch(
    function: Any, values: Any, batch: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        function(values, batch)


@pytest.mark.parametrize(
    ("values", "dtype", "message"),
    [
        ([1, 2, 70_000], torch.int16, r"example 1: values\[1\] is 70000.0, which torch.int16"),
        ([1.0, 2.0, 1.5], torch.int64, r"example 1: values\[1\] is 1.5, which torch.int64 does"),
        ([1.0, 2.0, 1e39], torch.float32, r"values\[1\] is 1e\+39, which torch.float32 does not"),
        ([1.0, 0.5, 1.0], torch.bool, r"example 1: values\[0\] is 0.5, which torch.bool does not"),
    ],
)
def test_a_value_that_the_dtype_does_not_hold_is_refused(
    values: list[float], dtype: torch.dtype, message: str
) -> None:
    mask = torch.tensor([[0, 1], [1, 1]])
    with pytest.raises(DataError, match=message):
        from_response_values([values[:1], values[1:]], mask, dtype=dtype)


def test_whole_numbers_may_be_floats_and_integers_of_arrays_keep_every_bit() -> None:
    mask, large = torch.tensor([[0, 1], [1, 1]]), 2**53 + 1  # no float64
    for values in ([[1], [2, -3]], [[1.0], [2.0, -3.0]]):
        found = from_response_values(values, mask, dtype=torch.int64)
        assert found.tolist() == [[0, 1], [2, -3]]
    arrays = [np.array([1]), np.array([large, -large])]
    found = from_response_values(arrays, mask, dtype=torch.int64)
    assert found.tolist() == [[0, 1], [large, -large]]
