from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from torch_collate_kit.packing import ModelCost, PackingPlan


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.fixture
def plan() -> PackingPlan:
    """Four rows for two ranks, the last one empty; example 2 is split, align 4, capacity 16."""
    return PackingPlan(
        example_indices=ints(0, 1, 2, 2),
        starts=ints(0, 0, 0, 16),
        lengths=ints(5, 8, 16, 3),
        row_offsets=ints(0, 2, 3, 4, 4),
        max_tokens=18,
        align=4,
        row_align=4,
        rows_multiple_of=2,
        dropped=ints(),
        cut=ints(2),
        num_cut_tokens=0,
        num_dropped_tokens=0,
        patches=ints(0, 0, 0, 0),
        vision_costs=ints(0, 0, 0, 0),
        max_patches=None,
        dummy_image_tokens=0,
        cost=ModelCost(),
    )


def test_properties_of_a_plan_written_out(plan: PackingPlan) -> None:
    assert plan.num_rows == 4
    assert plan.num_dummy_rows == 1
    assert plan.bins == [[0, 1], [2], [2], []]
    assert plan.aligned_lengths.tolist() == [8, 8, 16, 4]
    assert plan.row_tokens.tolist() == [13, 16, 3, 0]
    assert plan.row_cells.tolist() == [16, 16, 4, 0]
    assert plan.width == 16
    assert plan.efficiency == 32 / (4 * 16)
    assert plan.tokens_per_rank.tolist() == [29, 3]
    linear = 24576
    assert plan.cost_per_rank.tolist() == [
        2 * 8 * (linear + 8) + 16 * (linear + 16),
        4 * (linear + 4),
    ]
    assert [list(plan.rank_rows(r)) for r in range(2)] == [[0, 1], [2, 3]]


def test_rank_rows_refuses_a_rank_out_of_range(plan: PackingPlan) -> None:
    with pytest.raises(
        ValueError, match=r"^rank must be less than 2, got 2; this plan has ranks 0 to 1$"
    ):
        plan.rank_rows(2)
    with pytest.raises(
        ValueError, match=r"^rank must be at least 0, got -1; this plan has ranks 0 to 1$"
    ):
        plan.rank_rows(-1)
    with pytest.raises(TypeError, match=r"^rank must be an int, got 0.0 of type float; this plan"):
        plan.rank_rows(0.0)  # type: ignore[arg-type]


def test_is_immutable_and_pickles(plan: PackingPlan) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.align = 1  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(plan))
    for field in dataclasses.fields(plan):
        np.testing.assert_array_equal(getattr(copy, field.name), getattr(plan, field.name))
