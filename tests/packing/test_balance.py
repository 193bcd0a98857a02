from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.oracle_packing import next_fit, one_by_one, sizes_of
from torch_collate_kit.packing.balance import level, over_ranks
from torch_collate_kit.packing.rows import Limits, Rows
from torch_collate_kit.packing.strategies import best_fit_decreasing, split_evenly


def of_text(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return sizes_of(tokens, np.zeros_like(tokens))


def bins_of(rows: Rows, sizes: np.ndarray) -> list[list[int]]:
    return [sizes[rows.order[a:b]].tolist() for a, b in pairwise(rows.offsets.tolist())]


def levelled(sizes: list[int], capacity: int, num_rows: int, **options: Any) -> list[list[int]]:
    array = np.array(sizes)
    most_pieces = options.pop("max_pieces", None)
    rows = best_fit_decreasing(array, capacity, most_pieces)
    sizes, limits = of_text(array), Limits(capacity, 0, most_pieces)
    options = {"most": 1000, **options}
    result = level(rows, sizes, num_rows, limits=limits, image_weights=sizes[1], **options)
    return bins_of(result, array)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=40),
    st.integers(0, 8),
    st.none() | st.integers(1, 5),
    st.integers(1, 12),
    st.integers(30, 60),
)
def test_level_is_a_partition_within_the_limits(
    sizes: list[int], added: int, max_pieces: int | None, most: int, capacity: int
) -> None:
    array = np.array(sizes)
    before = best_fit_decreasing(array, capacity, max_pieces)
    num_rows = len(before.offsets) - 1 + added
    after = level(
        before,
        of_text(array),
        num_rows,
        limits=Limits(capacity, 0, max_pieces),
        image_weights=np.zeros_like(array),
        most=most,
    )
    assert sorted(after.order.tolist()) == list(range(len(sizes)))
    bins = bins_of(after, array)
    assert len(bins) == num_rows
    assert max(map(sum, bins)) <= capacity
    if max_pieces is not None:
        assert max(map(len, bins)) <= max_pieces


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=40),
    st.integers(0, 8),
    st.none() | st.integers(1, 5),
    st.integers(30, 60),
)
def test_split_evenly_keeps_the_order_and_the_limits(
    sizes: list[int], added: int, max_pieces: int | None, capacity: int
) -> None:
    num_rows = len(next_fit(sizes, capacity, max_pieces)) + added
    rows = split_evenly(of_text(np.array(sizes)), num_rows, Limits(capacity, 0, max_pieces))
    bins = bins_of(rows, np.array(sizes))
    assert list(chain.from_iterable(bins)) == sizes
    assert len(bins) == num_rows
    assert max(map(sum, bins)) <= capacity
    assert max(map(len, bins)) <= (max_pieces or len(sizes))
    assert sum(not row for row in bins) == max(0, num_rows - len(sizes))


@given(
    st.integers(1, 5).flatmap(
        lambda ranks: st.tuples(
            st.just(ranks),
            st.integers(1, 8).flatmap(
                lambda rows: st.lists(
                    st.integers(0, 50), min_size=rows * ranks, max_size=rows * ranks
                )
            ),
        )
    ),
    st.booleans(),
)
def test_over_ranks_sums_differ_by_at_most_one_groups_range(
    case: tuple[int, list[int]], keep_order: bool
) -> None:
    num_ranks, costs = case
    array = np.array(costs)
    rows = over_ranks(array, num_ranks, keep_order=keep_order)
    assert sorted(rows.tolist()) == list(range(len(costs)))
    by_rank = array[rows].reshape(num_ranks, -1)
    ranges = by_rank.max(axis=0) - by_rank.min(axis=0)
    if num_ranks > 1:
        assert np.ptp(by_rank.sum(axis=1)) <= ranges.max()
    if not keep_order and num_ranks > 1:  # the ranges of all groups together fit in one
        assert ranges.sum() <= np.ptp(array)


@pytest.mark.parametrize("added", [1, 3, 8])
def test_level_always_fits_with_as_many_rows_taken_as_added(added: int) -> None:
    """The full rows of a perfect packing leave no slack at all for the rest."""
    sizes = [7, 3, 6, 4, 5, 5] * 10
    full = one_by_one(sizes, 10, best=True)
    assert all(sum(row) == 10 for row in full)
    bins = levelled(sizes, 10, len(full) + added)
    assert max(map(sum, bins)) <= 10
    assert min(map(sum, bins)) >= 3


def test_pieces_as_large_as_int64_allows_are_dealt_like_small_ones() -> None:
    small, unit = np.array([9, 8, 7, 5, 4, 3, 2, 1]), 2**57
    rows = Rows(np.arange(8), np.array([0, 2, 4, 8]))

    def leveled(tokens: np.ndarray, capacity: int) -> Rows:
        sizes = sizes_of(tokens, np.zeros_like(tokens))
        limits = Limits(capacity, 0)
        return level(rows, sizes, 8, limits=limits, image_weights=sizes[1], most=3)

    expected = leveled(small, 20)
    assert expected.offsets.tolist() != rows.offsets.tolist()
    found = leveled(small * unit, 20 * unit)
    assert found.order.tolist() == expected.order.tolist()
    assert found.offsets.tolist() == expected.offsets.tolist()
