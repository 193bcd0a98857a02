"""Trees of segments against a dictionary, and plans whose rows hold trees."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.oracle import trie
from torch_collate_kit import (
    DataError,
    ModelCost,
    PackedBatchSampler,
    PackedCollator,
    PackingOptions,
    ParallelLayout,
    TokenizedDataset,
    pack,
    unpack,
)
from torch_collate_kit.packing import PackingPlan
from torch_collate_kit.ragged import Ragged

Example = list[list[int]]
LARGE = 2**31  # above int32


def depths_of(examples: list[Any]) -> list[list[int]]:
    """The tokens that each segment shares with an earlier one of its example."""
    dataset = TokenizedDataset([{"input_ids": of} for of in examples], train_all=True)
    shared = dataset.shared_lengths
    assert shared is not None
    return shared.tolist()


def cells_of(examples: list[Example]) -> list[list[list[int]]]:
    """The cell of every token, counted from the first of its example, and checked to hold it."""
    rows = [{"input_ids": of} for of in examples]
    batch = PackedCollator(0, max_tokens=10_000, share_prefixes=True, train_all=True)(rows)
    assert len(batch) == 1
    numbers = torch.arange(batch["input_ids"].shape[1])[None]
    cells, ids = unpack(numbers, batch), unpack(batch["input_ids"], batch)
    assert [of.tolist() for of in ids] == [of for example in examples for of in example]
    found = iter(cells)
    per_example = [[next(found) for _ in example] for example in examples]
    firsts = [min(int(of[0]) for of in own) for own in per_example]
    return [
        [(of - first).tolist() for of in own]
        for own, first in zip(per_example, firsts, strict=True)
    ]


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


def assert_equals_tries(examples: list[Example]) -> None:
    tries = [trie(of) for of in examples]
    assert depths_of(examples) == [depths for _, depths, *_ in tries]
    assert cells_of(examples) == [paths for paths, *_ in tries]


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
    assert depths_of([example, example]) == [depths] * 2
    assert_equals_tries([example, example])
    assert trie(example)[-1] == num_cells


@given(st.integers(0, 2**32))
def test_trees_equal_a_dictionary(seed: int) -> None:
    rng = np.random.default_rng(seed)
    examples = [random_example(rng) for _ in range(rng.integers(1, 5))]
    assert_equals_tries(examples)


@pytest.mark.parametrize(
    ("dtype", "shift"),
    [
        (np.uint8, 0),
        (np.int32, 2**31 - 3),
        (np.int64, -LARGE * 2),
        (np.uint64, 2**63),
        (">i8", LARGE),
    ],
)
def test_ids_of_every_dtype(dtype: Any, shift: int) -> None:
    rng = np.random.default_rng(1)
    examples = [random_example(rng) for _ in range(20)]
    shifted = [[np.array(of, dtype=np.int64) for of in example] for example in examples]
    shifted = [
        [np.array([token + shift for token in of.tolist()], dtype=dtype) for of in example]
        for example in shifted
    ]
    assert depths_of(shifted) == [trie(of)[1] for of in examples]


def test_ids_that_differ_above_32_bits_are_others() -> None:
    assert depths_of([[[5, 2**32 + 5], [5, 5], [2**32 + 5, 5]]]) == [[0, 1, 0]]


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
        share_prefixes=bool(rng.random() < 0.7),
        parallel=parallel,
        balance=rng.choice(["attention", "tokens", None]),
        max_sequences_per_row=rng.choice([None, None, 4, 9, 20]),
        cost=ModelCost(language_linear=3, language_quadratic=1),
    )
    return examples, packing


def planned(examples: list[Example], packing: PackingOptions) -> PackingPlan:
    dataset = TokenizedDataset([{"input_ids": of} for of in examples])
    collate = PackedCollator(0, packing=packing, normalize_loss=False)
    number = len(examples)
    sampler = PackedBatchSampler(dataset, collate, batch_size=number, shuffle=False)
    return next(iter(sampler)).plan


def size_of(segments: Example, packing: PackingOptions) -> tuple[int, int]:
    """Cells and cost: of a tree, or of segments that are aligned one by one."""
    align, language = packing.parallel.align, packing.cost.language
    if not packing.share_prefixes:
        cells = [-(-len(of) // align) * align for of in segments]
        return sum(cells), sum(int(language(n)) for n in cells)
    pairs = zip(segments, trie(segments)[1], strict=True)
    cost = sum(int(language(len(of)) - language(depth)) for of, depth in pairs)
    return -(-trie(segments)[-1] // align) * align, cost


def assert_laws(examples: list[Example], packing: PackingOptions, plan: PackingPlan) -> None:
    most = packing.max_sequences_per_row
    cells, costs = zip(*(size_of(example, packing) for example in examples), strict=True)
    fits = [
        count <= packing.capacity and (most is None or len(example) <= most)
        for count, example in zip(cells, examples, strict=True)
    ]
    placed = plan.example_indices.tolist()
    assert sorted(placed) == [i for i, does_fit in enumerate(fits) if does_fit]
    assert plan.dropped.tolist() == [i for i, does_fit in enumerate(fits) if not does_fit]
    assert plan.lengths.tolist() == [sum(map(len, examples[i])) for i in placed]
    assert not plan.starts.any()
    assert not len(plan.cut)
    assert plan.num_rows % packing.row_multiple == 0
    for row in range(plan.num_rows):
        of_row = placed[plan.row_offsets[row] : plan.row_offsets[row + 1]]
        assert sum(cells[i] for i in of_row) == plan.row_cells[row] <= packing.max_tokens
        assert most is None or sum(len(examples[i]) for i in of_row) <= most
    assert plan.atoms.segments.tolist() == [len(examples[i]) for i in placed]
    assert plan.atoms.costs.tolist() == [costs[i] for i in placed]
    assert plan.width == max(packing.parallel.align, *plan.row_cells.tolist())


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
    ("choice", "num_shared", "shared"),
    [("auto", 15, True), ("auto", 14, False), (True, 1, True), (False, 90, False)],
)
def test_auto_says_the_factor(
    choice: Any, num_shared: int, shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torch_collate_kit")
    segments = [[*range(100)], [*range(num_shared)]]
    batch = PackedCollator(0, max_tokens=999, share_prefixes=choice)([{"input_ids": segments}])
    assert batch["input_ids"].shape == (1, 100 if shared else 100 + num_shared)
    what = "at least the least factor 1.15; prefixes are shared"
    if not shared:
        what = "below the least factor 1.15; prefixes are not shared"
    said = [f'share_prefixes="auto": {1 + num_shared / 100:.2f} tokens for each cell, {what}']
    assert caplog.messages == (said if choice == "auto" else [])


WRONG: dict[str, tuple[Any, str]] = {
    "bare lengths": (
        lambda: pack([[3, 4]], packing=PackingOptions(9, share_prefixes=True)),
        "share_prefixes=True depends on the tokens of the segments, and lengths do not tell how",
    ),
    "split where it may pay": (
        lambda: PackedCollator(0, max_tokens=9, share_prefixes="auto", overflow="split"),
        "share_prefixes='auto' keeps the segments of an example in one row, and overflow='split' c",
    ),
    "too large": (
        lambda: PackedCollator(0, max_tokens=4, share_prefixes=True)(
            [{"input_ids": [[5, 6, 7], [5, 8, 9]]}]
        ),
        "example 0 has 2 segments of 6 tokens in all, 5 cells with align=1, more than the 4 that "
        "fit in a row with max_tokens=4; its segments stay in one row: raise max_tokens, cut it "
        "when tokenizing, or pass overflow='drop'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()


# --- Plans of examples with several segments: no example is divided, no row holds too much


def test_without_alignment_they_are_planned_as_examples_of_all_their_tokens() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 90, (200, 2))
    ragged = Ragged.from_lengths(lengths.ravel(), np.full(200, 2))
    for strategy in ("best_fit_decreasing", "sequential", "balanced"):
        one = pack(ragged, 512, strategy=strategy)
        other = pack(lengths.sum(axis=1), 512, strategy=strategy)
        assert one.bins == other.bins


WRONG_SEGMENTS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
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


@pytest.mark.parametrize(("lengths", "options", "error", "message"), WRONG_SEGMENTS)
def test_wrong_segments_are_named(
    lengths: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        pack(lengths, **({"max_tokens": 8} if "packing" not in options else {}), **options)
