"""Rows into micro-batches of a budget of cells, against brute force."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from torch_collate_kit import RolloutCollator
from torch_collate_kit.rl import micro_batches, stage_mini_batches


def micro_batch_rows(widths: list[int], budget: int, dp_size: int = 1) -> list[list[list[int]]]:
    """The rows of every micro-batch of every rank."""
    rollouts = [
        {"prompt_ids": [1], "response_ids": [2] * (w - 1), "rewards": 0.0, "loss_mask": [1] * w}
        for w in widths
    ]
    for rollout in rollouts:
        rollout["loss_mask"] = rollout["loss_mask"][1:]
    [ranks] = stage_mini_batches(RolloutCollator(0)(rollouts), [0, len(widths)], dp_size)
    parts = [micro_batches(part, max_tokens=budget) for part in ranks]
    return [[m.row_metadata["row_indices"].tolist() for m in of_rank] for of_rank in parts]


def cells(widths: list[int], rows: list[int]) -> int:
    return len(rows) * max((widths[i] for i in rows), default=0)


def smallest_largest(widths: list[int], num_parts: int) -> int:
    """The fewest cells that the largest of so many micro-batches can have."""
    return min(
        max(cells(widths, [i for i in range(len(widths)) if of[i] == p]) for p in range(num_parts))
        for of in product(range(num_parts), repeat=len(widths))
    )


@given(widths=st.lists(st.integers(2, 7), min_size=1, max_size=6), extra=st.integers(0, 12))
def test_against_brute_force(widths: list[int], extra: int) -> None:
    budget = max(widths) + extra
    [found] = micro_batch_rows(widths, budget)
    assert all(found)
    assert sorted(i for part in found for i in part) == list(range(len(widths)))
    if len(found) <= 3:
        assert max(cells(widths, part) for part in found) == smallest_largest(widths, len(found))
    if len(found) in (2, 3, 4):  # one less is not enough
        assert smallest_largest(widths, len(found) - 1) > budget
    ordered = [widths[i] for part in found for i in part]
    assert ordered == sorted(widths, reverse=True)


def test_equal_rows_stay_in_their_order() -> None:
    assert micro_batch_rows([4] * 5, 8) == [[[0, 1], [2, 3], [4]]]
    assert micro_batch_rows([4, 4], 10**9) == [[[0, 1]]]


def test_the_largest_is_split_where_another_rank_needs_more() -> None:
    _, second = micro_batch_rows([6, 6, 6, 6, 2, 2, 6, 3, 3, 2, 2, 2], 6, dp_size=2)
    assert [[i - 6 for i in part] for part in second] == [[0], [1], [2], [3, 4], [5]]
