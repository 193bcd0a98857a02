"""Values of the response tokens, cut out of right-aligned rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.rl import oracle_rl as oracle
from torch_collate_kit.errors import DataError
from torch_collate_kit.rl import response_values

MASK = torch.tensor([[0, 0, 1], [1, 1, 1], [0, 0, 0]])


def test_the_last_values_not_the_first() -> None:
    values = torch.tensor([[9.0, 8.0, 1.0, 2.0], [9.0, 3.0, 4.0, 5.0], [9.0, 9.0, 9.0, 9.0]])
    assert response_values(values, MASK) == [[2.0], [3.0, 4.0, 5.0], []]
    assert response_values(values[:, -3:], MASK) == [[2.0], [3.0, 4.0, 5.0], []]
    only_pads = response_values(values, torch.zeros(3, 2))
    assert only_pads == [[], [], []]
    assert response_values(values[:, :0], torch.zeros(3, 2)) == [[], [], []]
    assert response_values(values[:0], MASK[:0]) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_any_dtype_and_gradients(dtype: torch.dtype, mask_dtype: torch.dtype) -> None:
    values = torch.arange(9).reshape(3, 3).to(dtype)
    if dtype.is_floating_point:
        values.requires_grad_()
    rows = response_values(values, MASK.to(mask_dtype))
    assert rows == [[2.0], [3.0, 4.0, 5.0], []]
    assert all(type(x) is float for row in rows for x in row)


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


@pytest.mark.parametrize(
    ("values", "mask", "error", "message"),
    [
        ([[1.0]], MASK, TypeError, "values must be a tensor, got list"),
        (torch.zeros(3, 3), MASK.numpy(), TypeError, "response_mask must be a tensor, got ndarray"),
        (torch.zeros(3), MASK, ValueError, r"values must be two-dimensional, .* got shape \[3\]"),
        (torch.zeros(3, 3), MASK[0], ValueError, r"response_mask must be two-dimensional"),
        (torch.zeros(2, 3), MASK, ValueError, "values has 2 rows, response_mask has 3"),
        (
            torch.zeros(3, 2),
            MASK,
            ValueError,
            "row 1 has 3 response tokens, but values has 2 columns; take the values of at least",
        ),
        (
            torch.zeros(2, 3),
            torch.tensor([[0, 1, 1], [1, 0, 0]]),
            DataError,
            "row 1: response_mask has 1 response tokens that are not the last cells",
        ),
        (
            torch.zeros(1, 3),
            torch.tensor([[1, 0, 1]]),
            DataError,
            "row 0: response_mask has 2 response tokens .*right-aligned without gaps",
        ),
        (
            torch.zeros(1, 2),
            torch.tensor([[0, float("nan")]]),
            DataError,
            "row 0: response_mask is nan at column 1; it must be finite and 0 or more",
        ),
    ],
)
def test_errors(values: Any, mask: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        response_values(values, mask)
