from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.oracle_packing import next_fit, one_by_one, sizes_of
from torch_collate_kit.packing.rows import Limits, Rows, stable_argsort
from torch_collate_kit.packing.strategies import (
    best_fit_decreasing,
    first_fit_decreasing,
    sequential,
)


def bins_of(rows: Rows, sizes: np.ndarray) -> list[list[int]]:
    return [sizes[rows.order[a:b]].tolist() for a, b in pairwise(rows.offsets.tolist())]


def next_fit_of(sizes: np.ndarray, capacity: int, most: int | None = None) -> list[list[int]]:
    rows = sequential(sizes_of(sizes, np.zeros_like(sizes)), Limits(capacity, 0, most))
    return bins_of(rows, sizes)


def fill_of(bins: list[list[int]], *, pieces: bool) -> list[tuple[int, int]]:
    """Tokens, and where they matter pieces, of every row, sorted: what ties cannot change."""
    return sorted((sum(row), len(row) if pieces else 0) for row in bins)


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int, int | None]:
    """Sizes, capacity, most pieces a row; few distinct sizes in large groups, or many."""
    capacity, num_sizes = draw(st.tuples(st.integers(1, 40), st.just(6)) | st.just((200, 60)))
    menu = draw(st.lists(st.integers(1, capacity), min_size=1, max_size=num_sizes))
    sizes = draw(st.lists(st.sampled_from(menu), min_size=1, max_size=60))
    return np.array(sizes), capacity, draw(st.none() | st.integers(1, 6))


def test_examples_written_out() -> None:
    sizes = np.array([6, 4, 7, 3, 3, 5, 2])
    # 7 | 6 | 5 | 4 to the fuller 6 | 3 to the 7 | 3 to the 5 | 2 to the 5 + 3
    assert bins_of(best_fit_decreasing(sizes, 10, None), sizes) == [[7, 3], [6, 4], [5, 3, 2]]
    assert bins_of(first_fit_decreasing(sizes, 10, None), sizes) == [[7, 3], [6, 4], [5, 3, 2]]
    assert next_fit_of(sizes, 10) == [[6, 4], [7, 3], [3, 5, 2]]


@given(problems())
def test_best_fit_is_exactly_the_one_by_one_best_fit(
    problem: tuple[np.ndarray, int, int | None],
) -> None:
    sizes, capacity, most = problem
    expected = one_by_one(sizes.tolist(), capacity, most, best=True)
    bins = bins_of(best_fit_decreasing(sizes, capacity, most), sizes)
    limited = most is not None
    assert fill_of(bins, pieces=limited) == fill_of(expected, pieces=limited)


def test_first_fit_has_room_for_the_most_rows_there_can_be() -> None:
    sizes = np.full(40, 6)  # each leaves four free that nothing fits
    assert bins_of(first_fit_decreasing(sizes, 10, None), sizes) == [[6]] * 40
    assert bins_of(first_fit_decreasing(sizes, 240, 1), sizes) == [[6]] * 40


@given(problems())
def test_first_fit_is_exactly_the_one_by_one_first_fit(
    problem: tuple[np.ndarray, int, int | None],
) -> None:
    sizes, capacity, most = problem
    expected = one_by_one(sizes.tolist(), capacity, most, best=False)
    assert bins_of(first_fit_decreasing(sizes, capacity, most), sizes) == expected  # in row order


@given(problems())
def test_sequential_is_exactly_next_fit(problem: tuple[np.ndarray, int, int | None]) -> None:
    sizes, capacity, most = problem
    expected = next_fit(sizes.tolist(), capacity, most)
    assert next_fit_of(sizes, capacity, most) == expected


@pytest.mark.parametrize("num_keys", [1, 100, 1 << 16, (1 << 16) + 1, 1 << 32, (1 << 32) + 1])
def test_stable_argsort_is_stable_at_every_width(num_keys: int) -> None:
    rng = np.random.default_rng(0)
    keys = np.concatenate([rng.integers(0, num_keys, 500), [num_keys - 1, 0, num_keys - 1, 0]])
    keys = np.concatenate([keys, keys])
    expected = np.array(sorted(range(len(keys)), key=lambda i: keys[i]))
    np.testing.assert_array_equal(stable_argsort(keys, num_keys), expected)


def test_rows_take_and_totals() -> None:
    rows = Rows(np.array([3, 0, 2, 1]), np.array([0, 1, 1, 4]))
    assert rows.totals(np.array([10, 20, 30, 40])).tolist() == [40, 0, 60]
    assert rows.labels().tolist() == [0, 2, 2, 2]
    taken = rows.take(np.array([2, 1, 0]))
    assert taken.order.tolist() == [0, 2, 1, 3]
    assert taken.offsets.tolist() == [0, 3, 3, 4]


@pytest.mark.parametrize("pack_rows", [best_fit_decreasing, first_fit_decreasing])
def test_many_distinct_lengths_under_a_wide_capacity(pack_rows) -> None:  # type: ignore[no-untyped-def]
    sizes = np.random.default_rng(0).permutation(np.arange(1, 400)) * 331  # rows and sizes > 2**16
    expected = one_by_one(sizes.tolist(), 200_000, best=pack_rows is best_fit_decreasing)
    bins = bins_of(pack_rows(sizes, 200_000, None), sizes)
    assert fill_of(bins, pieces=False) == fill_of(expected, pieces=False)
