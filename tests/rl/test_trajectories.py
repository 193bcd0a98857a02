"""trajectory_ids: they say which rows are the steps of one trajectory, and check is_last_step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.rl import oracle_rl as oracle
from torch_collate_kit.errors import DataError
from torch_collate_kit.rl import compute_advantages, merge_steps

REWARDS = torch.tensor([[0.0], [1.0], [0.0], [3.0]])
MASK = torch.ones(4, 1)


def advantages(**changes: Any) -> list[float]:
    options: dict[str, Any] = {"uids": ["a"] * 4, "estimator": "grpo_no_std", **changes}
    rewards, mask = options.pop("rewards", REWARDS), options.pop("response_mask", MASK)
    return compute_advantages(rewards, mask, options.pop("uids"), **options).flatten().tolist()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"is_last_step": [True] * 4}, DataError, "row 0 has is_last_step=True .* row 1 has traj"),
        ({"trajectory_ids": [0, 1, 0, 1]}, DataError, "id 0 of .* begins at row 0 and .* at row 2"),
        ({"trajectory_ids": [0, 0, None, 1]}, DataError, "row 2: trajectory_id is None; give the"),
        ({"is_last_step": [False, True, False, False]}, DataError, "row 3 .* not a last step, but"),
        ({"trajectory_ids": [0]}, ValueError, "trajectory_ids has 1 entries for 4 rows; give one"),
        ({"trajectory_ids": "abcd"}, TypeError, "must be one trajectory_id per row, got 'abcd'"),
        ({"trajectory_ids": [0, [0], 1, 1]}, DataError, r"row 1: trajectory_id is \[0\] \(list\)"),
    ],
)
def test_errors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        advantages(**{"rewards": REWARDS * 0, "trajectory_ids": [0, 0, 1, 1], **changes})


@given(
    counts=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3)), min_size=1, max_size=6),
    pads=st.lists(st.integers(0, 20), max_size=2),
    numbered=st.booleans(),
    forget=st.integers(0, 5),
)
def test_drawn_trajectories(
    counts: list[tuple[str, int]], pads: list[int], numbered: bool, forget: int
) -> None:
    """Like is_last_step; and whichever flag is wrong, it is found, wherever pads lie."""
    rows: list[tuple[str, Any, bool, float]] = []
    for number, (uid, count) in enumerate(sorted(counts)):
        of_uid = [u for u, _ in sorted(counts)[:number]].count(uid)
        for k in range(count):
            is_last = k == count - 1
            rows.append((uid, of_uid if numbered else number, is_last, number * 1.5 * is_last))
    real = [True] * len(rows)
    for pad in pads:  # as pad_rows makes them
        at = min(pad, len(rows))
        rows.insert(at, (rows[0][0], rows[0][1], True, 0.0))
        real.insert(at, False)
    uids, ids, last, scores = (list(column) for column in zip(*rows, strict=True))
    rewards, mask = torch.tensor(scores)[:, None], torch.tensor(real).long()[:, None]
    options: dict[str, Any] = {"estimator": "grpo", "group_of_one": "score"}
    found = compute_advantages(rewards, mask, uids, trajectory_ids=ids, **options)
    wanted = oracle.advantages(rewards.tolist(), mask.tolist(), uids, trajectory_ids=ids, **options)
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-6, atol=1e-6)
    both = compute_advantages(rewards, mask, uids, trajectory_ids=ids, is_last_step=last, **options)
    assert torch.equal(both, found)
    places = [i for i, is_real in enumerate(real) if is_real]
    wrong = places[forget % len(places)]
    last[wrong] = not last[wrong]
    with pytest.raises(DataError, match=rf"row {wrong} (has is_last_step=|of uid .* no step foll)"):
        compute_advantages(
            rewards * 0, mask, uids, trajectory_ids=ids, is_last_step=last, **options
        )


def step(uid: str, trajectory_id: Any, prompt: list[int], last: bool) -> dict[str, Any]:
    example = {"uid": uid, "trajectory_id": trajectory_id, "is_last_step": last}
    parts = {"prompt_ids": prompt, "response_ids": [prompt[-1] + 1], "loss_mask": [1]}
    return {**example, **parts, "rewards": float(last)}


def test_merging_checks_it_too() -> None:
    """A trajectory whose prompt begins like the one before was merged into it."""
    steps = [step("a", 0, [1], True), step("a", 1, [1, 2, 3], True)]
    assert [example["trajectory_id"] for example in merge_steps(steps)] == [0, 1]
    steps[0] |= {"is_last_step": False}
    with pytest.raises(DataError, match=r"^example 0 has is_last_step=False and .* example 1 has"):
        merge_steps(steps)
    steps[1] |= {"trajectory_id": 0}
    [merged] = merge_steps(steps)
    assert merged["trajectory_id"] == 0
    assert merged["response_ids"].tolist() == [2, 3, 4]
    steps[1] |= {"trajectory_id": None}
    with pytest.raises(DataError, match="example 1: trajectory_id is None; give"):
        merge_steps(steps)
    assert len(merge_steps([{**s, "trajectory_id": None} for s in steps])) == 1  # not given
    del steps[1]["trajectory_id"]
    with pytest.raises(DataError, match="example 1 and example 0 differ in trajectory_id; every"):
        merge_steps(steps)
