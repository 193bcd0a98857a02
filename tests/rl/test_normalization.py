"""Advantages whose plain sum is the mean that is wanted."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.rl import oracle_rl as oracle
from tests.rl.rollouts import grouped_uids
from torch_collate_kit import PackedCollator, RolloutCollator
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing import ParallelLayout
from torch_collate_kit.rl import (
    from_response_values,
    mini_batch_boundaries,
    normalize_advantages,
    prompt_boundaries,
    response_values,
)

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
        ({"boundaries": np.uint8([0, 3, 2])}, ValueError, r"to the 2 rows, got \[0 3 2\]"),
        ({"boundaries": 2}, ValueError, "to the 2 rows, got 2"),
        ({"boundaries": [0.0, 2.0]}, ValueError, r"must be integers .* got \[0. 2.\]"),
    ],
)
def test_errors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"advantages": A, "loss_mask": M, "boundaries": [0, 2], "reduction": "token_mean"}
    with pytest.raises(error, match=message):
        normalize_advantages(**{**arguments, **changes})


# --- Where prompts and mini-batches begin


@pytest.mark.parametrize(
    ("uids", "expected"),
    [
        (["a"], [0, 1]),
        (["b", "a", "a", "c"], [0, 1, 3, 4]),
        ([np.int64(1), 1, np.int32(2)], [0, 2, 3]),
        ([("x", 1), ("x", 1), ("x", 2)], [0, 2, 3]),
        (np.array([7, 7, 5]), [0, 2, 3]),
        (np.array(["u", "v", "v"]), [0, 1, 3]),
        (torch.tensor([7, 7, 5]), [0, 2, 3]),
        ([torch.tensor(7), torch.tensor(7), torch.tensor(5)], [0, 2, 3]),
    ],
)
def test_prompts_written_out(uids: Any, expected: list[int]) -> None:
    starts = prompt_boundaries(uids)
    assert starts.dtype == np.int64
    assert starts.tolist() == expected


@given(uids=grouped_uids(), size=st.integers(1, 4))
def test_every_mini_batch_has_so_many_prompts(uids: list[str], size: int) -> None:
    given_uids = list(uids)
    starts = prompt_boundaries(uids)
    assert starts.tolist() == oracle.prompt_starts(uids)
    if (len(starts) - 1) % size:
        with pytest.raises(ValueError, match="do not divide"):
            mini_batch_boundaries(uids, size)
        return
    edges = mini_batch_boundaries(uids, size)
    assert edges.dtype == np.int64
    assert set(edges.tolist()) <= set(starts.tolist())
    assert (edges[0], edges[-1]) == (0, len(uids))
    for a, b in pairwise(edges.tolist()):
        assert len(set(uids[a:b])) == size
    assert uids == given_uids


def test_a_uid_that_comes_back() -> None:
    message = r"uid 'a' begins at row 1 and comes back at row 4 .*before Batch\.pad_rows"
    with pytest.raises(DataError, match=message):
        prompt_boundaries(["b", "a", "a", "c", "a"])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([], 1), DataError, r"uids is empty \(0 rows\); give at least one row"),
        ((list("abcde"), 3), ValueError, "5 prompts do not .*=3; drop 2 prompts, add 1, or .* 5$"),
        ((["a"], 0), ValueError, "prompts_per_mini_batch must be at least 1, got 0"),
        ((["a"], 1.0), TypeError, r"prompts_per_mini_batch must be an int, got 1\.0"),
        ((["a", float("nan")], 1), DataError, "row 1: uid is nan; give the id of its"),
        ((np.zeros((2, 1)), 1), ValueError, r"one uid per row, got shape \[2, 1\]"),
        ((["a", ["b"]], 1), DataError, r"row 1: uid is .* rollouts are grouped by it, so give"),
        ((["a", torch.ones(2)], 1), DataError, "row 1: uid is .* rollouts are grouped by it"),
    ],
)
def test_errors_of_boundaries(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mini_batch_boundaries(*arguments)


# --- Values of the response tokens, cut out of right-aligned rows, and put back


MASK = torch.tensor([[0, 0, 1], [1, 1, 1], [0, 0, 0]])


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    extra=st.integers(0, 3),
    more=st.integers(0, 3),
)
def test_response_values_against_the_oracle(lengths: list[int], extra: int, more: int) -> None:
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
        (V, MASK[0], ValueError, r"response_mask must be \[B, A\]"),
        (V[:2], MASK, ValueError, "values has 2 rows, response_mask has 3"),
        (V[:, :2], MASK, ValueError, "row 1 has response tokens in its last 3 cells, but values"),
        (V[:2], NOT_RIGHT, DataError, "row 1: response_mask has 1 response tokens that are not"),
        (V[:1], torch.tensor([[1, 0, 1]]), DataError, "row 0: .* has 2 response .*left-pad the"),
        (V[:1], torch.tensor([[0, float("nan")]]), DataError, "response_mask is nan at column 1"),
    ],
)
def test_errors_of_values(values: Any, mask: Any, error: type[Exception], message: str) -> None:
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
