from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.oracle_packing import assert_same, pack_with, real_lengths
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import TokenizedDataset
from torch_collate_kit.packing import ModelCost, PackingOptions, PackingPlan, pack

EXAMPLES = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}]
STRATEGIES = ("best_fit_decreasing", "first_fit_decreasing", "balanced", "sequential")


# Plans written out


def test_balanced_evens_out_what_best_fit_leaves_uneven() -> None:
    assert pack_with([4, 4, 2, 2], 10).bins == [[0, 1, 2], [3]]
    assert pack_with([4, 4, 2, 2], 10, strategy="balanced").bins == [[0, 2], [1, 3]]


def test_alignment_comes_before_capacity() -> None:
    plan = pack_with([5, 5, 5], 16, align=8)  # three fives are 15 tokens, but 24 cells
    assert plan.bins == [[0, 1], [2]]
    assert plan.row_cells.tolist() == [16, 8]
    assert plan.row_tokens.tolist() == [10, 5]


def test_rows_are_shard_major_and_alike_over_the_ranks() -> None:
    plan = pack_with([8, 7, 6, 5, 4, 3], 8, rows_multiple_of=2, balance="tokens")
    # best fit: 8 | 7 | 6 | 5 3 | 4, rounded up to six rows: every piece on its own.
    # groups 8 7 | 6 5 | 4 3: 8 | 7, then 5 | 6 (13, 13), then 4 | 3
    assert plan.bins == [[0], [3], [4], [1], [2], [5]]
    assert plan.tokens_per_rank.tolist() == [17, 16]
    assert [list(plan.rank_rows(rank)) for rank in range(2)] == [[0, 1, 2], [3, 4, 5]]


def test_sequential_keeps_the_order_of_steps_over_the_ranks() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    for balance in ("attention", "tokens", None):
        plan = pack_with(lengths, 128, rows_multiple_of=4, balance=balance, strategy="sequential")
        rows = plan.bins
        steps = [
            sorted(rows[rank[i]] for rank in map(plan.rank_rows, range(4)))
            for i in range(plan.num_rows // 4)
        ]
        assert [i for step in steps for row in step for i in row] == list(range(500))


def test_no_examples_make_one_dummy_row_a_rank() -> None:
    for strategy in STRATEGIES:
        plan = pack_with([], 8, rows_multiple_of=3, strategy=strategy)
        assert (plan.bins, plan.num_dummy_rows) == ([[], [], []], 3)
        assert plan.tokens_per_rank.tolist() == [0, 0, 0]
    assert pack_with(np.zeros(0, dtype=np.int32), 8).bins == [[]]
    assert pack_with([9], 8, overflow="drop").bins == [[]]


# Over-long examples

LOST = {  # lengths, starts, cut, dropped, tokens cut and dropped of [5, 35, 16, 32], rows of 16
    "truncate": ([5, 16, 16, 16], [0, 0, 0, 0], [1, 3], [], 19 + 16, 0),
    "drop": ([5, 16], [0, 0], [], [1, 3], 0, 67),
    "split": ([5, 16, 16, 3, 16, 16, 16], [0, 0, 16, 32, 0, 0, 16], [1, 3], [], 0, 0),
}


@pytest.mark.parametrize("overflow", LOST)
def test_examples_longer_than_a_row(overflow: str) -> None:
    plan = pack_with([5, 35, 16, 32], 18, align=4, overflow=overflow, strategy="sequential")
    arrays = (plan.lengths, plan.starts, plan.cut, plan.dropped)
    found = (*(array.tolist() for array in arrays), plan.num_cut_tokens, plan.num_dropped_tokens)
    assert found == LOST[overflow]
    plan = pack_with([8, 7], 8, overflow=overflow)  # exactly one row
    assert (plan.bins, plan.cut.size, plan.dropped.size) == ([[0], [1]], 0, 0)


def test_overflow_raise_names_the_example_and_the_ways_out() -> None:
    message = (
        "example 1 has 17 tokens, more than the 16 that fit in a row with max_tokens=18 and "
        "align=4 (too long as well: 1 more); raise max_tokens, shorten it, or pass "
        "overflow='truncate', 'drop' or 'split'"
    )
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        pack_with([16, 17, 4, 99], 18, align=4)
    with pytest.raises(DataError, match=r"max_tokens=8 and align=1; raise max_tokens"):
        pack_with([9], 8)


# Wrong arguments

HINT = "; pass one int per ex"
WRONG_LENGTHS: list[tuple[Any, type[Exception], str]] = [
    ([3, 0, -1], DataError, "example 1 has length 0, but a length must be at least 1; remove"),
    (np.array([3, 4, -1]), DataError, "example 2 has length -1, but a length must be at least"),
    (np.array([[3], [4]]), ValueError, f"lengths must be 1-D, got shape (2, 1){HINT}"),
    (5, ValueError, f"lengths must be 1-D, got shape (){HINT}"),
    ([3, [4, 5]], ValueError, f"lengths must be 1-D, got a ragged nested sequence{HINT}"),
    ([3, 4.5], TypeError, f"lengths must be integers, got dtype float64: lengths[0] is 3.0{HINT}"),
    ([3, None], TypeError, f"lengths must be integers, got dtype object: lengths[1] is None{HINT}"),
    (TokenizedDataset(EXAMPLES), TypeError, "lengths is a TokenizedDataset, not its lengths; pass"),
    (EXAMPLES, TypeError, "lengths is a list of examples; pass the length of each example: [len("),
    ({"input_ids": [[1]]}, TypeError, "lengths is a dict of columns; pass the length of each ex"),
    (["3"], TypeError, f"lengths must be integers, got dtype <U1: lengths[0] is '3'{HINT}"),
    ([3, True], TypeError, f"lengths[1] is True, a bool{HINT}"),
    (np.array([True]), TypeError, "lengths must be integers, got dtype bool: lengths[0] is True;"),
    (np.array([1, 2**63], dtype=np.uint64), DataError, "example 1 has length 922337203685477"),
    ([2**62, 2**62], DataError, "all lengths together are 9223372036854775808, more than int64"),
    ([1, 2**70], DataError, "example 1 has length 1180591620717411303424, more than int64 can h"),
]


@pytest.mark.parametrize(("lengths", "error", "message"), WRONG_LENGTHS)
def test_refuses_wrong_lengths(lengths: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        pack(lengths, 8)


def test_costs_that_int64_does_not_hold() -> None:
    flops = ModelCost(language_linear=14_000_000_000, language_quadratic=262_144)
    message = r"^costs sum to up to 1\.2e\+19, and int64 holds 9\.2e\+18; .* by 2 or more$"
    with pytest.raises(ValueError, match=message):
        pack([4096] * 200_000, packing=PackingOptions(4096, cost=flops))
    tower = PackingOptions(16, max_patches=512, cost=ModelCost(vision_quadratic=2**50))
    with pytest.raises(ValueError, match="divide its numbers by 19 or more"):
        pack([9], packing=tower, patches=[[384]])


# Laws


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    align = draw(st.sampled_from([1, 1, 2, 3, 8]))
    max_tokens = draw(st.integers(align, 64))
    longest = draw(st.sampled_from([max_tokens // 3 + 1, max_tokens, 3 * max_tokens]))
    lengths = draw(st.lists(st.integers(1, longest), max_size=50))
    options = {
        "max_tokens": max_tokens,
        "align": align,
        "strategy": draw(st.sampled_from(STRATEGIES)),
        "rows_multiple_of": draw(st.integers(1, 6)),
        "balance": draw(st.sampled_from(["attention", "tokens", None])),
        "overflow": draw(st.sampled_from(["truncate", "drop", "split"])),
        "max_sequences_per_row": draw(st.none() | st.integers(1, 6)),
    }
    return lengths, options


@given(calls())
def test_the_same_call_gives_the_same_plan_and_changes_no_argument(
    call: tuple[list[int], dict[str, Any]],
) -> None:
    lengths, options = call
    array = np.array(lengths, dtype=np.int64)
    array.setflags(write=False)
    plan = pack_with(array, **options)
    assert_same(plan, pack_with(list(lengths), **options))
    assert_same(plan, pack_with(array.astype(np.uint32), **options))
    for field in dataclasses.fields(PackingPlan):
        value = getattr(plan, field.name)
        assert not isinstance(value, np.ndarray) or not np.shares_memory(value, array)


# Speed


def test_a_million_real_lengths_in_less_than_a_second(shared_data: Path) -> None:
    lengths = real_lengths(shared_data, 1_000_000, longest=4096)
    seconds = []
    for _ in range(3):  # processor time, the best of three: other work is not the packer's
        begin = time.process_time()
        plan = pack_with(lengths, 4096)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 1.0
    assert plan.num_rows < 1.001 * lengths.sum() / 4096
    assert plan.row_tokens.max() <= 4096
    np.testing.assert_array_equal(np.sort(plan.example_indices), np.arange(1_000_000))
    np.testing.assert_array_equal(plan.lengths, lengths[plan.example_indices])


def test_packing_itself_does_not_use_torch() -> None:
    """The modules' own imports; the package above them may import torch."""
    code = (
        "import sys, types; root = types.ModuleType('torch_collate_kit');"
        "root.__path__ = [sys.argv[1]]; sys.modules['torch_collate_kit'] = root;"
        "import torch_collate_kit.packing; assert 'torch' not in sys.modules"
    )
    package = Path(__file__).resolve().parents[2] / "torch_collate_kit"
    subprocess.run([sys.executable, "-c", code, str(package)], check=True)


# --- Plans of real lengths: rows equally full, ranks equally busy


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
