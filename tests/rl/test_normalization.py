"""Advantages whose plain sum is the mean that is wanted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.rl import oracle_rl as oracle
from tests.rl.rollouts import grouped_uids
from torch_collate_kit.errors import DataError
from torch_collate_kit.rl import normalize_advantages, prompt_boundaries

REDUCTIONS = ("token_mean", "sequence_mean", "prompt_mean", "constant_length_mean")


@given(
    uids=grouped_uids(),
    width=st.integers(1, 5),
    seed=st.integers(0, 99),
    reduction=st.sampled_from(REDUCTIONS),
    z_score=st.booleans(),
    every=st.integers(1, 3),
    weight=st.sampled_from([1.0, 1 / 7]),
    count_masked_rows=st.booleans(),
)
def test_against_the_oracle(
    device: str,
    uids: list[str],
    width: int,
    seed: int,
    reduction: str,
    z_score: bool,
    every: int,
    weight: float,
    count_masked_rows: bool,
) -> None:
    rng = np.random.default_rng(seed)
    advantages = torch.from_numpy(rng.normal(size=(len(uids), width)))
    mask = torch.from_numpy(rng.integers(0, 3, (len(uids), width)) * weight)
    mask[rng.random(len(uids)) < 0.3] = 0
    copies = advantages.clone(), mask.clone()
    starts = prompt_boundaries(uids)
    edges = np.unique([*starts[::every], len(uids)])
    options: dict[str, Any] = {
        "reduction": reduction,
        "uids": uids,
        "max_response_length": 11,
        "z_score": z_score,
        "epsilon": 1e-3,
        "count_masked_rows": count_masked_rows,
    }
    found = normalize_advantages(advantages.to(device), mask, edges, **options)
    assert found.device.type == device
    found = found.cpu()
    expected = oracle.normalized(advantages.tolist(), mask.tolist(), edges.tolist(), **options)
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    assert found.dtype == torch.float64
    assert (found[mask == 0] == 0).all()
    assert torch.equal(advantages, copies[0])
    assert torch.equal(mask, copies[1])
    narrow = normalize_advantages(advantages.float(), mask, edges.tolist(), **options)
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_dtypes_and_graph(dtype: torch.dtype, mask_dtype: torch.dtype) -> None:
    advantages = torch.tensor([[1.0, 3.0]], dtype=dtype, requires_grad=True)
    mask = torch.ones(1, 2, dtype=mask_dtype)
    edges = torch.tensor([0, 1])
    found = normalize_advantages(advantages, mask, edges, reduction="token_mean")
    assert found.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert not found.requires_grad
    assert found.tolist() == [[0.5, 1.5]]


A, M = torch.ones(2, 2), torch.ones(2, 2)


COUNT, PROMPT = {"reduction": "constant_length_mean"}, {"reduction": "prompt_mean"}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"reduction": "mean"}, ValueError, "reduction must be one of 'token_mean', .*got 'mean'"),
        (PROMPT, ValueError, 'reduction="prompt_mean" needs uids, the prom'),
        ({**PROMPT, "uids": [1]}, ValueError, "uids has 1 entries for 2 rows"),
        ({**PROMPT, "uids": ["a", None]}, DataError, "row 1: uid is None; give the id of its"),
        (COUNT, ValueError, "needs max_response_length, the most"),
        ({**COUNT, "max_response_length": 0}, ValueError, "_length must be at least 1, got 0"),
        ({"epsilon": 0}, ValueError, "epsilon must be above 0, got 0"),
        ({"count_masked_rows": "no"}, TypeError, "_masked_rows must be True or False, got 'no'"),
        ({"advantages": [[1.0]]}, TypeError, "advantages must be a tensor"),
        ({"advantages": A.long()}, TypeError, r"must be floating point, got torch\.int64; pass"),
        ({"advantages": A[0]}, ValueError, r"advantages must be \[B, A\], got shape \[2\]"),
        ({"loss_mask": M[:1]}, ValueError, r"loss_mask has shape \[1, 2\], advantages has \[2, 2"),
        ({"advantages": A / 0}, DataError, "row 0: the advantage at column 0, .* is inf"),
        ({"loss_mask": M * float("nan")}, DataError, "row 0: loss_mask is nan at column 0"),
        ({"loss_mask": -M}, DataError, "row 0: loss_mask is -1.0 at column 0; it must be finite"),
        ({"boundaries": [0, 1]}, ValueError, r"rise from 0 to the 2 rows, got \[0 1\]; pass what"),
        ({"boundaries": [1, 2]}, ValueError, r"to the 2 rows, got \[1 2\]"),
        ({"boundaries": [0, 1, 1, 2]}, ValueError, r"to the 2 rows, got \[0 1 1 2\]"),
        ({"boundaries": np.uint8([0, 3, 2])}, ValueError, r"to the 2 rows, got \[0 3 2\]"),
        ({"boundaries": [2]}, ValueError, r"to the 2 rows, got \[2\]"),
        ({"boundaries": []}, ValueError, r"to the 2 rows, got \[\]"),
        ({"boundaries": 2}, ValueError, "to the 2 rows, got 2"),
        ({"boundaries": [[0, 2]]}, ValueError, r"to the 2 rows, got \[\[0 2\]\]"),
        ({"boundaries": [0.0, 2.0]}, ValueError, r"must be integers .* got \[0. 2.\]"),
    ],
)
def test_errors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"advantages": A, "loss_mask": M, "boundaries": [0, 2], "reduction": "token_mean"}
    with pytest.raises(error, match=message):
        normalize_advantages(**{**arguments, **changes})
