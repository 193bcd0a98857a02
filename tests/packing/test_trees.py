"""Trees of segments against a dictionary, and plans whose rows hold trees."""

from __future__ import annotations

import logging
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracle import trie
from torch_collate_kit import ModelCost, PackedCollator, PackingOptions, ParallelLayout, pack
from torch_collate_kit.packing import PackingPlan
from torch_collate_kit.packing.planner import plan_rows, sizes_of
from torch_collate_kit.packing.trees import Trees, depths_of, is_shared, trees_of

Example = list[list[int]]
LARGE = 2**31  # above int32


def flat(examples: list[Example], dtype: Any = np.int64) -> tuple[Any, Any, Any]:
    """The tokens of all segments, where each begins, and the first segment of each example."""
    segments = [of for example in examples for of in example]
    ids = np.array([token for of in segments for token in of], dtype=dtype)
    return (
        ids,
        np.cumsum([0, *map(len, segments)]),
        np.cumsum([0, *map(len, examples)]),
    )


def random_example(rng: np.random.Generator, num_ids: int = 3) -> Example:
    """Segments that begin as an earlier one does, at any length: all of it, nothing, more."""
    segments: Example = []
    for _ in range(rng.integers(1, 9)):
        begun: list[int] = []
        if segments and rng.random() < 0.75:
            earlier = segments[rng.integers(len(segments))]
            begun = earlier[: rng.integers(0, len(earlier) + 1)]
        more = rng.integers(0, num_ids, rng.integers(0, 6)).tolist()
        segments.append([*begun, *more] or [1])
    return segments


def assert_equals_trie(examples: list[Example], trees: Trees) -> None:
    _, offsets, firsts = flat(examples)
    for i, example in enumerate(examples):
        own = slice(firsts[i], firsts[i + 1])
        paths, depths, parents, num_cells = trie(example)
        bounds = offsets[firsts[i] : firsts[i + 1] + 1]
        cells = [trees.cells[a:b].tolist() for a, b in pairwise(bounds)]
        assert cells == paths, example
        assert trees.depths[own].tolist() == depths
        assert trees.parents[own].tolist() == parents
        assert trees.num_cells[i] == num_cells
        assert (trees.depths + trees.own)[own].tolist() == [*map(len, example)]
        for path, depth, first in zip(paths, depths, trees.firsts[own].tolist(), strict=True):
            assert path[depth:] == [*range(first, first + len(path) - depth)]


BY_HAND: dict[str, tuple[Example, list[int], int]] = {
    "one segment": ([[5, 6, 7]], [0], 3),
    "strangers": ([[5, 6], [6, 5]], [0, 0], 4),
    "a pair behind one prompt": ([[5, 6, 7], [5, 6, 8, 9]], [0, 2], 5),
    "a duplicate": ([[5, 6], [5, 6]], [0, 2], 2),
    "the beginning of an earlier one": ([[5, 6, 7], [5, 6]], [0, 2], 3),
    "an earlier one goes on": ([[5, 6], [5, 6, 7]], [0, 2], 3),
    "parts from the second, not the first": ([[5], [5, 6, 7], [5, 6, 8], [9]], [0, 1, 2, 0], 5),
    "the nearest in sorted order comes later": ([[5, 1], [5, 9, 9], [5, 9, 8]], [0, 1, 2], 5),
    "only bytes are shared": ([[256, 1], [512, 1]], [0, 0], 4),
}


@pytest.mark.parametrize(("example", "depths", "num_cells"), BY_HAND.values(), ids=BY_HAND)
def test_trees_by_hand(example: Example, depths: list[int], num_cells: int) -> None:
    trees = trees_of(*flat([example, example]))
    assert trees.depths.tolist() == depths * 2
    assert trees.num_cells.tolist() == [num_cells] * 2
    assert_equals_trie([example, example], trees)


@given(st.integers(0, 2**32))
def test_trees_equal_a_dictionary(seed: int) -> None:
    rng = np.random.default_rng(seed)
    examples = [random_example(rng) for _ in range(rng.integers(1, 5))]
    assert_equals_trie(examples, trees_of(*flat(examples)))


@pytest.mark.parametrize(
    ("dtype", "shift"),
    [
        (np.uint8, 0),
        (np.int16, -2),
        (np.int32, 2**31 - 3),
        (np.uint32, LARGE),
        (np.int64, LARGE),
        (np.int64, -LARGE * 2),
        (np.uint64, 2**63),
        (">i4", 7),
        (">i8", LARGE),
    ],
)
def test_ids_of_every_dtype(dtype: Any, shift: int) -> None:
    rng = np.random.default_rng(1)
    examples = [random_example(rng) for _ in range(20)]
    shifted = [[[token + shift for token in of] for of in example] for example in examples]
    ids, offsets, firsts = flat(shifted, dtype)
    assert_equals_trie(examples, trees_of(ids, offsets, firsts))
    twice = np.repeat(ids, 2)[::2]
    assert not twice.flags.c_contiguous
    assert (
        depths_of(twice, offsets, firsts).tolist() == trees_of(ids, offsets, firsts).depths.tolist()
    )


def test_ids_that_differ_above_32_bits_are_others() -> None:
    ids, offsets, firsts = flat([[[5, 2**32 + 5], [5, 5], [2**32 + 5, 5]]])
    assert depths_of(ids, offsets, firsts).tolist() == [0, 1, 0]


# --- plans


def random_plan(rng: np.random.Generator) -> tuple[list[Example], PackingOptions]:
    examples = [random_example(rng) for _ in range(rng.integers(1, 30))]
    parallel = ParallelLayout(dp=int(rng.choice([1, 1, 2, 3, 8])), tp=int(rng.choice([1, 1, 2, 8])))
    packing = PackingOptions(
        max_tokens=int(rng.integers(parallel.align, 90)),
        strategy=rng.choice(
            ["best_fit_decreasing", "first_fit_decreasing", "balanced", "sequential"]
        ),
        overflow="drop",
        share_prefixes=True,
        parallel=parallel,
        balance=rng.choice(["attention", "tokens", None]),
        max_sequences_per_row=rng.choice([None, None, 4, 9, 20]),
        cost=ModelCost(language_linear=3, language_quadratic=1),
    )
    return examples, packing


def planned(examples: list[Example], packing: PackingOptions) -> PackingPlan:
    lengths, load = sizes_of(
        [[*map(len, of)] for of in examples], packing, depths=depths_of(*flat(examples))
    )
    return plan_rows(lengths, packing, load)


def assert_laws(examples: list[Example], packing: PackingOptions, plan: PackingPlan) -> None:
    align, most, cost = packing.parallel.align, packing.max_sequences_per_row, packing.cost
    tries = [trie(of) for of in examples]
    cells = [-(-num_cells // align) * align for *_, num_cells in tries]
    fits = [
        size <= packing.capacity and (most is None or len(of) <= most)
        for size, of in zip(cells, examples, strict=True)
    ]
    placed = [example for row in plan.bins for example in row]
    assert sorted(placed) == [i for i, fit in enumerate(fits) if fit]
    assert plan.dropped.tolist() == [i for i, fit in enumerate(fits) if not fit]
    assert not plan.starts.any()
    assert plan.lengths.tolist() == [sum(map(len, examples[i])) for i in placed]
    assert plan.num_rows % packing.row_multiple == 0
    for row, of_row in enumerate(plan.bins):
        assert sum(cells[i] for i in of_row) == plan.row_cells[row] <= packing.max_tokens
        assert most is None or sum(len(examples[i]) for i in of_row) <= most
    costs = [
        sum(
            int(cost.language(len(of)) - cost.language(depth))
            for of, depth in zip(*pair, strict=True)
        )
        for pair in zip(examples, (depths for _, depths, *_ in tries), strict=True)
    ]
    assert plan.costs.tolist() == [costs[i] for i in placed]


@given(st.integers(0, 2**32))
def test_laws_of_plans(seed: int) -> None:
    examples, packing = random_plan(np.random.default_rng(seed))
    assert_laws(examples, packing, planned(examples, packing))


@pytest.mark.release
def test_laws_of_a_hundred_thousand_plans() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100_000):
        examples, packing = random_plan(rng)
        assert_laws(examples, packing, planned(examples, packing))


@pytest.mark.parametrize(
    ("choice", "tokens_and_shared", "shared"),
    [
        ("auto", (115, 15), True),
        ("auto", (114, 14), False),
        (True, (10, 0), True),
        (False, (9, 8), False),
    ],
)
def test_auto_says_the_factor(
    choice: Any, tokens_and_shared: tuple[int, int], shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torch_collate_kit")
    tokens, depths = (np.array([n]) for n in tokens_and_shared)
    assert is_shared(PackingOptions(9, share_prefixes=choice), tokens, depths) is shared
    what = "at least the least factor 1.15; prefixes are shared"
    if not shared:
        what = "below the least factor 1.15; prefixes are not shared"
    said = [f'share_prefixes="auto": {tokens_and_shared[0] / 100:.2f} tokens for each cell, {what}']
    assert caplog.messages == (said if choice == "auto" else [])


WRONG: dict[str, tuple[Any, str]] = {
    "bare lengths": (
        lambda: pack([[3, 4]], packing=PackingOptions(9, share_prefixes=True)),
        "share_prefixes=True depends on the tokens of the segments, and lengths do not tell how",
    ),
    "split": (
        lambda: PackedCollator(0, max_tokens=9, share_prefixes=True, overflow="split")(
            [{"input_ids": [[5, 6], [5, 7]]}]
        ),
        "overflow='split' cuts examples, and these have several segments, which stay together: cut",
    ),
    "too large": (
        lambda: PackedCollator(0, max_tokens=4, share_prefixes=True)(
            [{"input_ids": [[5, 6, 7], [5, 8, 9]]}]
        ),
        "example 0 has 2 segments of 6 tokens in all, 5 cells with align=1, more than the 4 that",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()
