from __future__ import annotations

import dataclasses
import pickle

import pytest

from tests.packing.oracle_packing import assert_same
from torch_collate_kit.packing import PackingOptions, PackingPlan, ParallelLayout, pack


@pytest.fixture
def plan() -> PackingPlan:
    """Four rows for two ranks, the last one empty; example 1 is split, align 4, capacity 16."""
    layout = ParallelLayout(dp=2, tp=4)
    options = {"strategy": "sequential", "balance": None, "overflow": "split"}
    return pack([5, 19], packing=PackingOptions(18, parallel=layout, **options))


def test_properties_of_a_plan_written_out(plan: PackingPlan) -> None:
    assert plan.num_rows == 4
    assert plan.num_dummy_rows == 1
    assert plan.bins == [[0], [1], [1], []]
    assert (plan.example_indices.tolist(), plan.starts.tolist()) == ([0, 1, 1], [0, 16, 0])
    assert plan.lengths.tolist() == [5, 3, 16]
    assert (plan.cut.tolist(), plan.dropped.tolist(), plan.num_cut_tokens) == ([1], [], 0)
    assert plan.row_tokens.tolist() == [5, 3, 16, 0]
    assert plan.row_cells.tolist() == [8, 4, 16, 0]
    assert plan.width == 16
    assert plan.efficiency == 24 / (4 * 16)
    assert plan.tokens_per_rank.tolist() == [8, 16]
    linear = 24576
    assert plan.cost_per_rank.tolist() == [
        8 * (linear + 8) + 4 * (linear + 4),
        16 * (linear + 16),
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
        plan.cut = plan.dropped  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(plan))
    assert_same(copy, plan)
    assert copy.bins == [[0], [1], [1], []]
