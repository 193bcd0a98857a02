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
from tests.rl.grouped import grouped_uids
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


def test_the_number_of_mini_batches_does_not_depend_on_turns() -> None:
    one_turn, turns = ["a", "b", "c", "d"], ["a"] * 5 + ["b"] + ["c"] * 2 + ["d"] * 9
    assert mini_batch_boundaries(one_turn, 2).tolist() == [0, 2, 4]
    assert mini_batch_boundaries(turns, 2).tolist() == [0, 6, 17]


def test_a_uid_that_comes_back() -> None:
    with pytest.raises(
        DataError,
        match=r"uid 'a' begins at row 1 and comes back at row 4 .*before Batch\.pad_rows",
    ):
        prompt_boundaries(["b", "a", "a", "c", "a"])
    with pytest.raises(DataError, match="uid 'a' begins at row 0 and comes back at row 2"):
        mini_batch_boundaries(["a", "b", "a"], 1)


def test_errors() -> None:
    with pytest.raises(DataError, match=r"uids is empty \(0 rows\); give at least one row"):
        prompt_boundaries([])
    with pytest.raises(
        ValueError,
        match=r"^5 prompts do not divide into mini-batches of prompts_per_mini_batch=3: 1 "
        r"mini-batches and 2 prompts left over; drop 2 prompts, add 1, or choose a divisor of 5$",
    ):
        mini_batch_boundaries(list("abcde"), 3)
    with pytest.raises(ValueError, match="prompts_per_mini_batch must be at least 1, got 0"):
        mini_batch_boundaries(["a"], 0)
    with pytest.raises(TypeError, match=r"prompts_per_mini_batch must be an int, got 1\.0"):
        mini_batch_boundaries(["a"], 1.0)
    for missing in (None, float("nan")):  # they were one prompt, and one each
        with pytest.raises(DataError, match=f"row 1: uid is {missing}; give the id of its"):
            prompt_boundaries(["a", missing, missing])
    with pytest.raises(TypeError, match="got 'aab' of type str; pass a list"):
        prompt_boundaries("aab")
    with pytest.raises(ValueError, match=r"one uid per row, got shape \[2, 1\]"):
        prompt_boundaries(np.zeros((2, 1)))
    for uid in (["b"], ("b", []), torch.ones(2)):
        with pytest.raises(
            DataError, match=r"row 1: uid is .* rollouts are grouped by it, so give"
        ):
            prompt_boundaries(["a", uid])
