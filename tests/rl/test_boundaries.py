"""Where prompts and mini-batches begin."""

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
from torch_collate_kit.errors import DataError
from torch_collate_kit.rl import mini_batch_boundaries, prompt_boundaries


@pytest.mark.parametrize(
    ("uids", "expected"),
    [
        (["a"], [0, 1]),
        (["a", "a"], [0, 2]),
        (["b", "a", "a", "c"], [0, 1, 3, 4]),
        ((3, 3, 1), [0, 2, 3]),
        ([np.int64(1), 1, np.int32(2)], [0, 2, 3]),
        ([("x", 1), ("x", 1), ("x", 2)], [0, 2, 3]),
        (np.array([7, 7, 5]), [0, 2, 3]),
        (np.array(["u", "v", "v"]), [0, 1, 3]),
        (torch.tensor([7, 7, 5]), [0, 2, 3]),
        ([torch.tensor(7), torch.tensor(7), torch.tensor(5)], [0, 2, 3]),
        (list(torch.tensor([4, 4])), [0, 2]),
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
        ((["a", None, None], 1), DataError, "row 1: uid is None; give the id of its"),
        ((["a", float("nan")], 1), DataError, "row 1: uid is nan; give the id of its"),
        (("aab", 1), TypeError, "got 'aab' of type str; pass a list"),
        ((np.zeros((2, 1)), 1), ValueError, r"one uid per row, got shape \[2, 1\]"),
        ((["a", ["b"]], 1), DataError, r"row 1: uid is .* rollouts are grouped by it, so give"),
        ((["a", ("b", [])], 1), DataError, "row 1: uid is .* rollouts are grouped by it"),
        ((["a", torch.ones(2)], 1), DataError, "row 1: uid is .* rollouts are grouped by it"),
    ],
)
def test_errors(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mini_batch_boundaries(*arguments)
