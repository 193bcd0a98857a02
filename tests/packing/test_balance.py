from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packing.oracle_packing import next_fit, one_by_one, sizes_of
from tests.packing.test_strategies import assert_lawful, members, problems
from torch_collate_kit.packing import ModelCost, PackingOptions, balance, pack
from torch_collate_kit.packing.balance import level, over_ranks
from torch_collate_kit.packing.rows import Limits, Rows
from torch_collate_kit.packing.strategies import best_fit_decreasing, fill_two_budgets, split_evenly


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


# --- Levelling rows and giving them to ranks, by what text and images cost


@given(problems(), st.integers(0, 8), st.integers(1, 12))
@settings(max_examples=2 * settings().max_examples)
def test_level_always_makes_the_rows_within_the_limits(
    problem: tuple[np.ndarray, np.ndarray, Limits], added: int, most: int
) -> None:
    tokens, patches, limits = problem
    sizes = sizes_of(tokens, patches)
    if patches.any():
        before = fill_two_budgets(best_fit_decreasing, sizes, limits)
    else:
        before = best_fit_decreasing(tokens, limits.text, limits.pieces)
    num_rows = len(before.offsets) - 1 + added
    costs = patches * (9 + patches)
    after = level(before, sizes, num_rows, limits=limits, image_weights=costs, most=most)
    filled = [row for row in members(after) if row]
    assert len(after.offsets) - 1 == num_rows
    assert len(filled) == min(num_rows, len(tokens))
    offsets = np.cumsum([0, *map(len, filled)])
    assert_lawful(Rows(after.order, offsets), tokens, patches, limits)


def test_level_deals_images_then_texts() -> None:
    # images of cost 9, 5, 4 to rows of their own; texts of 6, 3 and 2 to rows of 1, 4 and 2 tokens
    tokens, patches = np.array([1, 4, 2, 6, 3, 2]), np.array([9, 5, 4, 0, 0, 0])
    rows = Rows(np.arange(6), np.array([0, 1, 5, 6]))
    sizes = sizes_of(tokens, patches)
    after = level(rows, sizes, 3, limits=Limits(20, 20), image_weights=sizes[1], most=3)
    assert sorted(map(sorted, members(after))) == [[0, 3], [1, 5], [2, 4]]
    # two rows: 9 | 5 4 by patches, where tokens would make it 9 4 | 5
    sizes = sizes_of(tokens[:3], patches[:3])
    rows = Rows(np.arange(3), np.array([0, 3]))
    after = level(rows, sizes, 2, limits=Limits(20, 20), image_weights=sizes[1], most=1)
    assert sorted(map(sorted, members(after))) == [[0], [1, 2]]


def test_level_splits_a_row_where_no_deal_fits() -> None:
    # beside the image 9 of 10 tokens are used; without one only 7 of 10 may be
    tokens, patches = np.array([1, 5, 4]), np.array([3, 0, 0])
    limits, sizes = Limits(10, 3, None, 3), sizes_of(tokens, patches)
    rows = Rows(np.arange(3), np.array([0, 3]))
    after = level(rows, sizes, 2, limits=limits, image_weights=patches, most=0)
    assert_lawful(after, tokens, patches, limits)
    assert len(members(after)) == 2
    full = sizes_of(np.array([5, 5, 5, 5]), np.array([5, 5, 0, 0]))
    rows = Rows(np.arange(4), np.array([0, 2, 4]))
    after = level(rows, full, 3, limits=Limits(10, 10, 2), image_weights=full[1], most=0)
    assert_lawful(after, full[0], full[1], Limits(10, 10, 2))
    assert len(members(after)) == 3


def test_level_keeps_cells_free_where_a_row_would_lose_its_image() -> None:
    # longest first would put both texts, 8 tokens, into the added row, which has 7 without an image
    tokens, patches = np.array([6, 6, 4, 4]), np.array([3, 3, 0, 0])
    rows, limits = Rows(np.array([0, 2, 1, 3]), np.array([0, 2, 4])), Limits(10, 3, None, 3)
    sizes = sizes_of(tokens, patches)
    after = level(rows, sizes, 3, limits=limits, image_weights=patches, most=2)
    assert_lawful(after, tokens, patches, limits)


row_costs = st.integers(1, 4).flatmap(
    lambda ranks: st.integers(1, 6).flatmap(
        lambda rows: st.tuples(
            st.just(ranks),
            st.lists(
                st.tuples(st.integers(0, 50), st.sampled_from([0, 0, 3, 8, 20])),
                min_size=rows * ranks,
                max_size=rows * ranks,
            ),
        )
    )
)


def heaviest(rows: np.ndarray, costs: np.ndarray, image_costs: np.ndarray) -> float:
    """The largest sum of a rank, in relation to the mean over ranks, of the two costs."""
    sums = [values[rows].sum(axis=1) for values in (costs, image_costs)]
    return max(values.max() / max(values.mean(), 1e-9) for values in sums)


@given(row_costs, st.booleans())
@settings(max_examples=2 * settings().max_examples)
def test_rows_with_images_are_the_same_on_all_ranks(
    case: tuple[int, list[tuple[int, int]]], keep_order: bool
) -> None:
    num_ranks, pairs = case
    costs, image_costs = (np.array(values, dtype=np.int64) for values in zip(*pairs, strict=True))
    if num_ranks == 1 or not image_costs.any():
        return
    rows = over_ranks(costs, num_ranks, keep_order=keep_order, image_costs=image_costs).reshape(
        num_ranks, -1
    )
    assert sorted(rows.ravel().tolist()) == list(range(len(costs)))
    expected = np.arange(len(costs)) if keep_order else np.lexsort((-costs, -image_costs))
    groups = expected.reshape(-1, num_ranks)[:: 1 if keep_order else -1]
    assert [sorted(column) for column in rows.T.tolist()] == [sorted(g) for g in groups.tolist()]
    if not keep_order:
        has_image = image_costs[rows] > 0
        mixed = has_image.any(axis=0) & ~has_image.all(axis=0)
        assert mixed.sum() <= 1
        assert has_image[:, -1].any(), "the last rows have no image"


@given(row_costs)
@settings(max_examples=2 * settings().max_examples)
def test_swaps_only_make_ranks_more_even(case: tuple[int, list[tuple[int, int]]]) -> None:
    ranks, pairs = case
    costs, image_costs = (np.array(values, dtype=np.int64) for values in zip(*pairs, strict=True))

    def evenness() -> float:
        rows = over_ranks(costs, ranks, keep_order=False, image_costs=image_costs)
        return heaviest(rows.reshape(ranks, -1), costs, image_costs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance, "_SWAPS_PER_RANK", 0)
        before = evenness()
    assert evenness() <= before + 1e-9


def test_huge_costs_do_not_overflow() -> None:
    rng = np.random.default_rng(0)
    costs, image_costs = rng.integers(2**50, 2**54, 64), rng.integers(2**50, 2**54, 64)
    rows = over_ranks(costs, 8, keep_order=False, image_costs=image_costs).reshape(8, -1)
    assert heaviest(rows, costs.astype(float), image_costs.astype(float)) < 1.1
    small = over_ranks(costs >> 24, 8, keep_order=False, image_costs=image_costs >> 24)
    assert rows.ravel().tolist() == small.tolist()


def test_ranks_have_as_many_patches_where_the_cost_of_images_is_not_known() -> None:
    packing = PackingOptions(1, rows_multiple_of=2, cost=ModelCost(1, 1, 0, 0))
    plan = pack([1, 1, 1, 1], packing=packing, patches=[6, 3, 6, 3])
    assert plan.row_patches.reshape(2, 2).sum(axis=1).tolist() == [9, 9]
