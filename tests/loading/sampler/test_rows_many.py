"""By rows, in 10,000 orders: each example once, no row over a budget, and the length is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.building import packed_sampler
from torch_collate_kit.packing import ParallelLayout

SHAPES = ("random", "sorted", "one size", "heavy tail", "full or one")
ORDERS = {"few": 20, "many": 2000}  # of each shape


def lengths_of(shape: str, rng: np.random.Generator, capacity: int) -> np.ndarray:
    number = int(rng.integers(1, 400))
    if shape == "one size":
        return np.full(number, rng.integers(1, capacity + 1))
    if shape == "full or one":
        return np.where(rng.random(number) < 0.3, capacity, 1)
    drawn = rng.pareto(1.2, number) * 5 if shape == "heavy tail" else rng.random(number) * capacity
    lengths = np.clip(drawn.astype(np.int64), 1, capacity)
    return np.sort(lengths)[:: rng.choice([-1, 1])] if shape == "sorted" else lengths


def check_order(shape: str, rng: np.random.Generator) -> None:
    capacity, dp = int(rng.integers(8, 300)), int(rng.choice([1, 2, 4]))
    lengths = lengths_of(shape, rng, capacity)
    options: dict[str, Any] = {"batch_rows": dp * int(rng.integers(1, 7))}
    options["window"] = int(rng.integers(1, 9))
    options["strategy"] = str(rng.choice(["balanced", "best_fit_decreasing", "sequential"]))
    options["shuffle"] = [True, "keyed", False][int(rng.integers(3))]
    if shape == "sorted":
        options["shuffle"] = False
    options |= {"parallel": ParallelLayout(dp=dp), "max_tokens": capacity}
    options["seed"] = int(rng.integers(99))
    sampler = packed_sampler(lengths, **options)
    found, num_steps = np.zeros(len(lengths), dtype=np.int64), 0
    for part in sampler:
        plan, examples = part.plan, sampler.examples(0, num_steps)
        np.add.at(found, examples, 1)
        assert plan.num_rows == options["batch_rows"]
        assert plan.row_tokens.max() <= capacity
        assert np.array_equal(np.sort(plan.example_indices), np.arange(len(examples)))
        assert np.array_equal(plan.lengths, lengths[examples][plan.example_indices])
        num_steps += 1
    assert (found == 1).all()
    assert len(packed_sampler(lengths, **options)) == num_steps


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("number", ["few", pytest.param("many", marks=pytest.mark.release)])
def test_each_example_once_in_rows_that_fit(shape: str, number: str) -> None:
    for seed in range(ORDERS[number]):
        try:
            check_order(shape, np.random.default_rng([seed, SHAPES.index(shape)]))
        except AssertionError as error:
            raise AssertionError(f"order {seed} of shape {shape!r}") from error
