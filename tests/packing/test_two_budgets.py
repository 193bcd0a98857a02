"""Filling rows under two budgets, and into rows that hold something already."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packing.oracle_packing import fewest_rows_of_both, fits, into_rows, sizes_of
from torch_collate_kit.packing.rows import Limits, Rows
from torch_collate_kit.packing.strategies import (
    OpenRows,
    best_fit_decreasing,
    fill_two_budgets,
    first_fit_decreasing,
)

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


def test_written_out() -> None:
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
