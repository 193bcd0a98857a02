"""Rows into micro-batches of a budget of cells, against brute force."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from torch_collate_kit import PaddedCollator
from torch_collate_kit.rl import micro_batches, stage_mini_batches


def micro_batch_rows(widths: list[int], budget: int, dp_size: int = 1) -> list[list[list[int]]]:
    """The rows of every micro-batch of every rank."""
    batch = PaddedCollator(0)([{"input_ids": [1] * width} for width in widths])
    [ranks] = stage_mini_batches(batch, [0, len(widths)], dp_size)
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


@given(
    widths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    extra=st.integers(0, 12),
    num_wide=st.integers(0, 6),
)
def test_against_brute_force(widths: list[int], extra: int, num_wide: int) -> None:
    """Of the second of two ranks; rows of the first may need more micro-batches."""
    count, budget = len(widths), max(widths) + extra
    first = ([budget] * num_wide + [1] * count)[:count]
    ranks = micro_batch_rows(first + widths, budget, dp_size=2)
    found = [[i - count for i in part] for part in ranks[1]]
    assert len(ranks[0]) == len(found)
    assert all(found)
    assert sorted(i for part in found for i in part) == list(range(count))
    if len(found) <= 3:
        assert max(cells(widths, part) for part in found) == smallest_largest(widths, len(found))
    if 2 <= len(found) <= 4:  # one less is not enough
        assert max(smallest_largest(own, len(found) - 1) for own in (first, widths)) > budget
    assert [widths[i] for part in found for i in part] == sorted(widths, reverse=True)


def test_the_largest_has_as_few_cells_as_can_be() -> None:
    assert micro_batch_rows([3, 2, 1, 5], 11) == [[[3], [0, 1, 2]]]  # 9 cells, not 10


def test_equal_rows_stay_in_their_order() -> None:
    assert micro_batch_rows([4] * 5, 8) == [[[0, 1], [2, 3], [4]]]
    assert micro_batch_rows([4, 4], 10**9) == [[[0, 1]]]


def test_the_largest_is_split_where_another_rank_needs_more() -> None:
    _, second = micro_batch_rows([6, 6, 6, 6, 2, 2, 6, 3, 3, 2, 2, 2], 6, dp_size=2)
    assert [[i - 6 for i in part] for part in second] == [[0], [1], [2], [3, 4], [5]]
