"""What chains of runs are held to: orders, batches and loss tokens, by lists and loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Examples = list[dict[str, Any]]


def examples_of(rng: np.random.Generator, num_examples: int, longest: int) -> Examples:
    """Example i has the token i + 1 throughout, so that a batch tells what is in it."""
    rows = []
    for i in range(num_examples):
        num_tokens = int(rng.integers(2, longest + 1))
        mask = [0, *rng.integers(0, 2, size=num_tokens - 1).tolist()]
        rows.append({"input_ids": [i + 1] * num_tokens, "loss_mask": mask})
    return rows


def num_trained(example: dict[str, Any]) -> int:
    return sum(example["loss_mask"])


def decoded(batch: Any) -> list[int]:
    """The examples of a Batch: their first tokens, in row order."""
    ids, positions = batch["input_ids"], batch["position_ids"]
    starts = (positions == 0) & (ids > 0)
    return [int(token) - 1 for token in ids[starts]]


def rows_of(batch: Any) -> list[tuple[Any, ...]]:
    """Every row, cell by cell, in all fields that a loss reads."""
    fields = ("input_ids", "position_ids", "labels", "loss_mask")
    columns = [batch[name].tolist() for name in fields]
    return [tuple(map(tuple, cells)) for cells in zip(*columns, strict=True)]


def part_of(values: Sequence[int], rank: int, dp_size: int) -> list[int]:
    """The rank-th contiguous part, of sizes that differ by one at most, larger ones first."""
    size, rest = divmod(len(values), dp_size)
    start = rank * size + min(rank, rest)
    return list(values[start : start + size + (rank < rest)])


def divisors_up_to(number: int, limit: int) -> list[int]:
    return [n for n in range(1, min(number, limit) + 1) if number % n == 0]


def multiple_of(rng: np.random.Generator) -> int:
    """A number of rows that many numbers of ranks divide."""
    return int(rng.choice([6, 8, 12, 24, 48, 60, 64]))


def smallest_tail(num_examples: int, batch_size: int) -> int:
    return num_examples % batch_size or min(batch_size, num_examples)


def log_uniform(rng: np.random.Generator, most: int) -> int:
    return min(most, int(math.exp(rng.uniform(0, math.log(most + 1)))))
