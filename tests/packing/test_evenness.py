"""Plans of real lengths: rows equally full, ranks equally busy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.packing.oracle_packing import pack_with
from tests.packing.test_pack import real_lengths
from torch_collate_kit.packing import ModelCost, PackingPlan


def cost_as_run(plan: PackingPlan) -> np.ndarray:
    """Of each rank, where all rows are as wide as the widest, and the pads of a row a segment."""
    pads = plan.width - plan.row_cells
    of_pads = pads * (24576 + pads)
    return plan.cost_per_rank + of_pads.reshape(plan.rows_multiple_of, -1).sum(axis=1)


@pytest.mark.parametrize(
    ("count", "capacity", "ranks"), [(600, 32768, 8), (2400, 8192, 64), (1000, 4096, 8)]
)
def test_few_rows_are_equally_full(
    data_folder: Path, count: int, capacity: int, ranks: int
) -> None:
    """A row with less tokens than another would be padded, and cost as much: pads are computed."""
    lengths = real_lengths(data_folder, count, longest=capacity // 2)
    plan = pack_with(lengths, capacity, rows_multiple_of=ranks)
    full = pack_with(lengths, capacity)
    assert full.row_tokens.min() < 0.9 * capacity, "no row is added, the sample shows nothing"
    assert plan.efficiency > 0.985
    assert plan.row_tokens.min() > 0.97 * plan.row_tokens.max()
    as_run = cost_as_run(plan)
    assert as_run.max() < 1.01 * plan.cost_per_rank.max()
    tokens = pack_with(lengths, capacity, rows_multiple_of=ranks, balance="tokens")
    assert tokens.width == plan.width
    assert as_run.max() <= cost_as_run(tokens).max()


@pytest.mark.parametrize("capacity", [4096, 16384])
@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize(
    ("cost", "most"),
    [
        (ModelCost(), 1.01),
        (ModelCost(400_000, 1), 1.01),
        (ModelCost(150_000, 1, 0, 0, 5, 1024), 1.01),
        (ModelCost(7_680, 1), 1.03),  # Qwen3-0.6B, one piece of 16,384 tokens costs 3 times a row
    ],
)
def test_ranks_with_sixteen_rows_are_even(
    data_folder: Path, capacity: int, ranks: int, cost: ModelCost, most: float
) -> None:
    drawn = real_lengths(data_folder, 20_000, longest=capacity)
    lengths = np.resize(drawn, 15 * ranks * capacity // int(drawn.mean()))
    plan = pack_with(lengths, capacity, rows_multiple_of=ranks, cost=cost)
    assert 15 <= plan.num_rows // ranks <= 17
    assert plan.row_tokens.max() <= capacity
    assert plan.cost_per_rank.max() < most * plan.cost_per_rank.mean()
    assert plan.tokens_per_rank.max() < 1.01 * plan.tokens_per_rank.mean()
