"""Plans of examples with several segments: no example is divided, no row holds too much."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_collate_kit import DataError, ModelCost, PackingOptions, ParallelLayout, pack
from torch_collate_kit.packing import PackingPlan
from torch_collate_kit.ragged import Ragged


def random_plan(rng: np.random.Generator) -> tuple[list[list[int]], PackingOptions]:
    lengths = [
        rng.integers(1, rng.integers(2, 30), rng.integers(1, 5)).tolist()
        for _ in range(rng.integers(1, 40))
    ]
    parallel = ParallelLayout(dp=int(rng.choice([1, 1, 2, 3, 8])), tp=int(rng.choice([1, 1, 2, 8])))
    packing = PackingOptions(
        max_tokens=int(rng.integers(parallel.align, 160)),
        strategy=rng.choice(
            ["best_fit_decreasing", "first_fit_decreasing", "balanced", "sequential"]
        ),
        overflow="drop",
        parallel=parallel,
        balance=rng.choice(["attention", "tokens", None]),
        max_sequences_per_row=rng.choice([None, None, 2, 5, 9]),
        cost=ModelCost(language_linear=3, language_quadratic=1),
    )
    return lengths, packing


def assert_laws(lengths: list[list[int]], packing: PackingOptions, plan: PackingPlan) -> None:
    align, most = packing.parallel.align, packing.max_sequences_per_row
    cells = [sum(-(-n // align) * align for n in of) for of in lengths]
    fits = [
        size <= packing.capacity and (most is None or len(of) <= most)
        for size, of in zip(cells, lengths, strict=True)
    ]
    placed = [example for row in plan.bins for example in row]
    assert sorted(placed) == [i for i, fit in enumerate(fits) if fit]
    assert plan.dropped.tolist() == [i for i, fit in enumerate(fits) if not fit]
    assert not plan.starts.any()
    assert plan.num_rows % packing.row_multiple == 0
    for row, examples in enumerate(plan.bins):
        assert sum(cells[i] for i in examples) == plan.row_cells[row] <= packing.max_tokens
        assert most is None or sum(len(lengths[i]) for i in examples) <= most
    costs = [sum(int(packing.cost.language(-(-n // align) * align)) for n in of) for of in lengths]
    assert plan.atoms.costs.tolist() == [costs[i] for i in placed]
    assert plan.width == max(align, *(sum(cells[i] for i in row) for row in plan.bins))


@given(st.integers(0, 2**32))
def test_laws_of_plans(seed: int) -> None:
    lengths, packing = random_plan(np.random.default_rng(seed))
    assert_laws(lengths, packing, pack(lengths, packing=packing))


@pytest.mark.release
def test_laws_of_a_hundred_thousand_plans() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100_000):
        lengths, packing = random_plan(rng)
        assert_laws(lengths, packing, pack(lengths, packing=packing))


def test_without_alignment_they_are_planned_as_examples_of_all_their_tokens() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 90, (200, 2))
    ragged = Ragged.from_lengths(lengths.ravel(), np.full(200, 2))
    for strategy in ("best_fit_decreasing", "sequential", "balanced"):
        one = pack(ragged, 512, strategy=strategy)
        other = pack(lengths.sum(axis=1), 512, strategy=strategy)
        assert one.bins == other.bins


WRONG: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ([[3, 0], [4]], {}, DataError, "example 0, segment 1 has length 0, but a length must be at l"),
    ([[3], []], {}, DataError, "example 1 has no segment, and must have at least one; remove it"),
    ([[3, 4], 5], {}, TypeError, "lengths[1] is 5, and others are lists with a length for each s"),
    ([[3, 9]], {}, DataError, "example 0 has 2 segments of 12 tokens in all, 12 cells with align"),
    (
        [[1, 1, 1], [1, 1, 1]],
        {"packing": PackingOptions(8, max_sequences_per_row=2)},
        DataError,
        "example 0 has 3 segments, more than max_sequences_per_row=2 (1 more do not fit); its segm",
    ),
    ([[3]], {"overflow": "split"}, ValueError, "overflow='split' cuts examples, and these have s"),
    ([[3]], {"strategy": "wrapped"}, ValueError, "strategy='wrapped' cuts examples, and these ha"),
]


@pytest.mark.parametrize(("lengths", "options", "error", "message"), WRONG)
def test_what_is_wrong_is_named(
    lengths: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        pack(lengths, **({"max_tokens": 8} if "packing" not in options else {}), **options)
