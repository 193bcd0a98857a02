"""Rows of a plan as a batch of their own: what packing their examples again would give."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torch_collate_kit.packing import PackingOptions, ParallelLayout, pack
from torch_collate_kit.packing.options import STRATEGIES
from torch_collate_kit.packing.planner import batch_of_rows, fill_rows


@given(data=st.data())
def test_is_the_plan_of_the_examples_alone(data: Any) -> None:
    draw = data.draw
    packing = PackingOptions(
        draw(st.integers(4, 40)),
        strategy=draw(st.sampled_from(STRATEGIES)),
        parallel=ParallelLayout(dp=draw(st.integers(1, 3)), tp=draw(st.sampled_from([1, 1, 2, 4]))),
        overflow=draw(st.sampled_from(["truncate", "drop"])),
        max_sequences_per_row=draw(st.sampled_from([None, 1, 2, 3])),
        balance=draw(st.sampled_from(["attention", "tokens", None])),
    )
    lengths = np.array(draw(st.lists(st.integers(1, 48), min_size=1, max_size=60)))
    filled = fill_rows(lengths, packing)
    rows = np.arange(filled.num_rows)
    if packing.strategy == "sequential":  # neighbours
        first = draw(st.integers(0, len(rows) - 1))
        rows = rows[first : draw(st.integers(first + 1, len(rows)))]
    else:
        rows = rows[np.array(draw(st.permutations(rows.tolist())))]
        rows = rows[: draw(st.integers(1, len(rows)))]
    dropped = filled.dropped[: draw(st.integers(0, len(filled.dropped)))]

    examples, plan = batch_of_rows(filled, rows, dropped, packing)

    members = [i for row in rows.tolist() for i in filled.bins[row]]
    assert examples.tolist() == sorted([*members, *dropped.tolist()])
    again = pack(lengths[examples], packing=packing)
    for name in ("example_indices", "starts", "lengths", "row_offsets", "dropped", "cut"):
        assert getattr(plan, name).tolist() == getattr(again, name).tolist(), name
    assert (plan.max_tokens, plan.align, plan.rows_multiple_of, plan.width) == (
        again.max_tokens,
        again.align,
        again.rows_multiple_of,
        again.width,
    )
