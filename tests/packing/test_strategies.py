"""Every strategy against its slow and obvious form, through ``pack``."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packing.oracle_packing import (
    Bins,
    fewest_rows,
    fewest_rows_of_both,
    fits,
    into_rows,
    next_fit,
    one_by_one,
    pack_with,
    sizes_of,
)
from torch_collate_kit.packing.rows import Limits, Rows
from torch_collate_kit.packing.strategies import (
    OpenRows,
    best_fit_decreasing,
    fill_two_budgets,
    first_fit_decreasing,
)

DECREASING = {"best_fit_decreasing": True, "first_fit_decreasing": False}


def packed(sizes: list[int], capacity: int, most: int | None, strategy: str) -> Bins:
    plan = pack_with(sizes, capacity, max_sequences_per_row=most, strategy=strategy)
    return [[sizes[i] for i in row] for row in plan.bins]


def fill_of(bins: Bins, *, pieces: bool) -> list[tuple[int, int]]:
    """Tokens, and where they matter pieces, of every row, sorted: what ties cannot change."""
    return sorted((sum(row), len(row) if pieces else 0) for row in bins)


@st.composite
def sizes_problems(draw: st.DrawFn) -> tuple[list[int], int, int | None]:
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


@given(sizes_problems())
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


# --- Filling rows under two budgets, and into rows that hold something already


FILLS = {True: best_fit_decreasing, False: first_fit_decreasing}


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def members(rows: Rows) -> list[list[int]]:
    return [rows.order[a:b].tolist() for a, b in pairwise(rows.offsets.tolist())]


def assert_lawful(rows: Rows, tokens: Any, patches: Any, limits: Limits) -> None:
    assert sorted(rows.order.tolist()) == list(range(len(tokens)))
    for row in members(rows):
        assert row
        assert fits([(int(tokens[i]), int(patches[i])) for i in row], tuple(limits))


@st.composite
def problems(draw: st.DrawFn, most: int = 40) -> tuple[np.ndarray, np.ndarray, Limits]:
    """Pieces that each fit in a row of their own, of every mixture of budgets."""
    capacity, max_patches = draw(st.integers(2, 60)), draw(st.integers(1, 60))
    reserved = draw(st.integers(0, capacity - 1) | st.just(0))
    tokens, patches = [], []
    for _ in range(draw(st.integers(1, most))):
        has_image = draw(st.booleans())
        patches.append(draw(st.integers(1, max_patches)) if has_image else 0)
        longest = capacity if has_image else capacity - reserved
        tokens.append(draw(st.integers(1, max(1, longest // draw(st.sampled_from([1, 1, 4]))))))
    limits = Limits(capacity, max_patches, draw(st.none() | st.integers(1, 5)), reserved)
    return np.array(tokens), np.array(patches), limits


@given(problems(most=6), st.booleans())
@settings(max_examples=2 * settings().max_examples)
def test_at_most_four_thirds_of_the_fewest_rows(
    problem: tuple[np.ndarray, np.ndarray, Limits], best: bool
) -> None:
    tokens, patches, limits = problem
    if patches.any():
        rows = len(fill_two_budgets(FILLS[best], sizes_of(tokens, patches), limits).offsets) - 1
        pieces = list(zip(tokens.tolist(), patches.tolist(), strict=True))
        fewest = fewest_rows_of_both(pieces, tuple(limits))
        assert fewest <= rows
        assert 3 * rows <= 4 * fewest + 4


def test_two_budgets_written_out() -> None:
    limits = Limits(10, 10)
    tokens, patches = ints(2, 2, 8, 7, 1), ints(9, 8, 0, 0, 0)
    # images by patches: 9 | 8, in rows of their own; then the texts by tokens, into what is free
    rows = fill_two_budgets(best_fit_decreasing, sizes_of(tokens, patches), limits)
    assert members(rows) == [[0, 2], [1, 3, 4]]
    # of 10 tokens one is kept free in a row without an image, but not beside one
    tokens, patches = ints(2, 8, 9, 1), ints(9, 0, 0, 0)
    rows = fill_two_budgets(best_fit_decreasing, sizes_of(tokens, patches), Limits(10, 10, None, 1))
    assert members(rows) == [[0, 1], [2], [3]]
    rows = fill_two_budgets(best_fit_decreasing, sizes_of(tokens, patches), limits)
    assert members(rows) == [[0, 1], [2, 3]]


def test_both_budgets_bind_and_rows_hold_a_mixture() -> None:
    """Large images alone leave tokens free, small ones patches; a mixture fills both."""
    tokens = np.repeat(ints(30, 10), [200, 600])
    patches = np.repeat(ints(60, 7), [200, 600])
    limits = Limits(300, 400)
    rows = fill_two_budgets(best_fit_decreasing, sizes_of(tokens, patches), limits)
    assert_lawful(rows, tokens, patches, limits)
    least = max(-(-int(tokens.sum()) // 300), -(-int(patches.sum()) // 400))
    assert len(rows.offsets) - 1 <= 1.05 * least


@st.composite
def opened_rows(draw: st.DrawFn) -> tuple[np.ndarray, int, int | None, list[tuple[int, int]]]:
    capacity = draw(st.integers(1, 40))
    most = draw(st.none() | st.integers(1, 5))
    menu = draw(st.lists(st.integers(1, capacity), min_size=1, max_size=5))
    sizes = draw(st.lists(st.sampled_from(menu), min_size=1, max_size=40))
    space = st.integers(0, capacity + 10) | st.sampled_from(menu)
    slots = st.integers(0, len(sizes) if most is None else most)
    return np.array(sizes), capacity, most, draw(st.lists(st.tuples(space, slots), max_size=12))


@given(opened_rows(), st.booleans())
@settings(max_examples=2 * settings().max_examples)
def test_opened_rows_are_filled_as_one_by_one(
    case: tuple[np.ndarray, int, int | None, list[tuple[int, int]]], best: bool
) -> None:
    sizes, capacity, most, opened = case
    if most is None:  # then no row runs out of slots
        opened = [(space, len(sizes)) for space, _ in opened]
    given_rows = OpenRows(
        np.array([space for space, _ in opened], dtype=np.int64),
        np.array([slots for _, slots in opened], dtype=np.int64),
    )
    rows = FILLS[best](sizes, capacity, most, given_rows)
    assert sorted(rows.order.tolist()) == list(range(len(sizes)))
    num_new = len(rows.offsets) - 1 - len(opened)
    assert num_new >= 0
    before = opened + [(capacity, len(sizes) if most is None else most)] * num_new
    after = [
        (space - int(sizes[row].sum()), slots - len(row))
        for (space, slots), row in zip(before, map(np.array, members(rows)), strict=True)
        for row in [row.astype(np.int64)]
    ]
    assert min((value for pair in after for value in pair), default=0) >= 0
    expected = into_rows(sizes.tolist(), capacity, most, opened, best=best)
    if not best:
        assert after == expected
    elif most is None:
        assert sorted(space for space, _ in after) == sorted(space for space, _ in expected)
    else:
        assert sorted(after) == sorted(expected)
