"""Rows into micro-batches of a budget of cells, against brute force."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torch_collate_kit.rl.micro_batches import fewest_micro_batches, micro_batch_rows


def cells(widths: list[int], rows: list[int]) -> int:
    return len(rows) * max((widths[i] for i in rows), default=0)


def partitions(num_rows: int, num_parts: int) -> list[list[list[int]]]:
    """Every way to deal the rows to so many micro-batches."""
    return [
        [[i for i in range(num_rows) if labels[i] == part] for part in range(num_parts)]
        for labels in product(range(num_parts), repeat=num_rows)
    ]


@given(widths=st.lists(st.integers(1, 6), min_size=1, max_size=6), extra=st.integers(0, 12))
def test_against_brute_force(widths: list[int], extra: int) -> None:
    budget = max(widths) + extra
    fewest = fewest_micro_batches(np.array(widths), budget)
    for count in range(1, min(len(widths), 3) + 1):
        largest = min(
            max(cells(widths, part) for part in parts) for parts in partitions(len(widths), count)
        )
        assert (largest <= budget) == (fewest <= count)
        if largest > budget:
            continue
        found = [part.tolist() for part in micro_batch_rows(np.array(widths), budget, count)]
        assert len(found) == count
        assert all(found)
        assert sorted(i for part in found for i in part) == list(range(len(widths)))
        assert max(cells(widths, part) for part in found) == largest
        ordered = [widths[i] for part in found for i in part]
        assert ordered == sorted(widths, reverse=True)


@given(
    widths=st.lists(st.integers(1, 500), min_size=1, max_size=60),
    extra=st.integers(0, 2000),
    more=st.integers(0, 60),
)
def test_every_row_once_and_none_over_the_budget(widths: list[int], extra: int, more: int) -> None:
    budget = max(widths) + extra
    fewest = fewest_micro_batches(np.array(widths), budget)
    count = min(fewest + more, len(widths))
    found = [part.tolist() for part in micro_batch_rows(np.array(widths), budget, count)]
    assert len(found) == count
    assert all(found)
    assert sorted(i for part in found for i in part) == list(range(len(widths)))
    assert all(cells(widths, part) <= budget for part in found)
    again = [part.tolist() for part in micro_batch_rows(np.array(widths), budget, count)]
    assert found == again


def test_equal_rows_stay_in_their_order() -> None:
    found = micro_batch_rows(np.array([4, 4, 4, 4, 4]), 8, 3)
    assert [part.tolist() for part in found] == [[0, 1], [2, 3], [4]]
    one_each = micro_batch_rows(np.array([4, 4, 4, 4, 4]), 100, 5)
    assert [part.tolist() for part in one_each] == [[0], [1], [2], [3], [4]]
    assert [part.tolist() for part in micro_batch_rows(np.array([4, 4]), 10**9, 1)] == [[0, 1]]


def test_what_is_split_further_is_what_has_most_cells() -> None:
    found = micro_batch_rows(np.array([6, 3, 3, 1, 1, 1]), 6, 4)
    assert [part.tolist() for part in found] == [[0], [1], [2], [3, 4, 5]]
