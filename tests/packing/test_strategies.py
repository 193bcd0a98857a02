"""Every strategy against its slow and obvious form, through ``pack``."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.oracle_packing import Bins, fewest_rows, next_fit, one_by_one, pack_with

DECREASING = {"best_fit_decreasing": True, "first_fit_decreasing": False}


def packed(sizes: list[int], capacity: int, most: int | None, strategy: str) -> Bins:
    plan = pack_with(sizes, capacity, max_sequences_per_row=most, strategy=strategy)
    return [[sizes[i] for i in row] for row in plan.bins]


def fill_of(bins: Bins, *, pieces: bool) -> list[tuple[int, int]]:
    """Tokens, and where they matter pieces, of every row, sorted: what ties cannot change."""
    return sorted((sum(row), len(row) if pieces else 0) for row in bins)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, int | None]:
    """Sizes, capacity, most pieces a row; few distinct sizes in large groups, or many."""
    capacity, num_sizes = draw(st.tuples(st.integers(1, 40), st.just(6)) | st.just((200, 60)))
    menu = draw(st.lists(st.integers(1, capacity), min_size=1, max_size=num_sizes))
    sizes = draw(st.lists(st.sampled_from(menu), min_size=1, max_size=60))
    return sizes, capacity, draw(st.none() | st.integers(1, 6))


def test_written_out() -> None:
    # 7 | 6 | 5 | 4 to the fuller 6 | 3 to the 7 | 3 to the 5 | 2 to the 5 + 3
    sizes = [6, 4, 7, 3, 3, 5, 2]
    for strategy in DECREASING:
        assert packed(sizes, 10, None, strategy) == [[7, 3], [6, 4], [5, 3, 2]]
    assert packed(sizes, 10, None, "sequential") == [[6, 4], [7, 3], [3, 5, 2]]
    # capacity 14: 9 | 7 6; the 1 is the best fit in the second row, the first fit in the first
    assert packed([9, 7, 6, 1], 14, None, "best_fit_decreasing") == [[9], [7, 6, 1]]
    assert packed([9, 7, 6, 1], 14, None, "first_fit_decreasing") == [[9, 1], [7, 6]]
    # each leaves four free that nothing fits: as many rows as there can be
    assert packed([6] * 40, 10, None, "first_fit_decreasing") == [[6]] * 40
    assert packed([6] * 40, 240, 1, "first_fit_decreasing") == [[6]] * 40


@given(problems())
def test_rows_are_those_of_one_by_one_packing(problem: tuple[list[int], int, int | None]) -> None:
    sizes, capacity, most = problem
    first_fit = one_by_one(sizes, capacity, most, best=False)
    assert packed(sizes, capacity, most, "first_fit_decreasing") == first_fit  # in row order
    assert packed(sizes, capacity, most, "sequential") == next_fit(sizes, capacity, most)
    expected, limited = one_by_one(sizes, capacity, most, best=True), most is not None
    bins = packed(sizes, capacity, most, "best_fit_decreasing")
    assert fill_of(bins, pieces=limited) == fill_of(expected, pieces=limited)
    free = len(one_by_one(sizes, capacity, None, best=True))
    least = free if most is None else max(free, -(-len(sizes) // most))  # a limit costs no more
    assert least <= len(packed(sizes, capacity, most, "balanced")) <= len(expected)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=10), st.integers(12, 24))
def test_at_most_eleven_ninths_of_the_fewest_rows(sizes: list[int], capacity: int) -> None:
    best = fewest_rows(sizes, capacity)
    for strategy in (*DECREASING, "balanced"):
        rows = len(packed(sizes, capacity, None, strategy))
        assert best <= rows
        assert 9 * rows <= 11 * best + 6


@pytest.mark.parametrize("strategy", DECREASING)
def test_many_distinct_lengths_under_a_wide_capacity(strategy: str) -> None:
    sizes = np.random.default_rng(0).permutation(np.arange(1, 400)) * 331  # sizes > 2**16
    expected = one_by_one(sizes.tolist(), 200_000, best=DECREASING[strategy])
    bins = packed(sizes.tolist(), 200_000, None, strategy)
    assert fill_of(bins, pieces=False) == fill_of(expected, pieces=False)
