"""Plans of examples with images: both budgets, dummy images, even ranks, what does not fit."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.image_mixes import MIXES, mix, totals
from tests.packing.oracle_packing import needed_dummies, pack_with
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing import ModelCost, PackingOptions, PackingPlan, ParallelLayout, pack
from torch_collate_kit.packing.atoms import Atoms
from torch_collate_kit.packing.planner import plan_rows
from torch_collate_kit.ragged import Ragged

STRATEGIES = ("best_fit_decreasing", "first_fit_decreasing", "balanced", "sequential")

COST = ModelCost(language_linear=20, vision_linear=7, vision_quadratic=1)


def assert_lawful(
    plan: PackingPlan, lengths: list[int], images: list[list[int]], packing: PackingOptions
) -> None:
    """Laws of a plan, by plain loops over its rows."""
    align, ranks = packing.parallel.align, packing.parallel.dp
    capacity = packing.max_tokens // align * align
    reserved = -(-packing.dummy_image_tokens // align) * align if ranks > 1 else 0
    patches = [sum(of_example) for of_example in images]
    most = packing.max_patches
    limits = [capacity - (0 if n else reserved) for n in patches]
    unfit = [
        i
        for i, n in enumerate(lengths)
        if n > limits[i] or (most is not None and patches[i] > most)
    ]
    if packing.overflow == "drop":
        assert plan.dropped.tolist() == unfit
    else:
        assert plan.cut.tolist() == unfit
    kept = {i: n for i, n in enumerate(lengths) if i not in plan.dropped}
    if packing.overflow == "truncate":
        kept = {i: min(n, limits[i]) for i, n in kept.items()}
    placed = []
    for row in range(plan.num_rows):
        pieces = range(int(plan.row_offsets[row]), int(plan.row_offsets[row + 1]))
        cells = row_patches = 0
        for piece in pieces:
            example, start, length = (
                int(values[piece]) for values in (plan.example_indices, plan.starts, plan.lengths)
            )
            placed += [(example, token) for token in range(start, start + length)]
            cells += -(-length // align) * align
            row_patches += patches[example]
            assert plan.atoms.patches[piece] == patches[example]
            assert plan.atoms.vision_costs[piece] == sum(
                n * (COST.vision_linear + COST.vision_quadratic * n) for n in images[example]
            )
        assert cells <= (capacity if row_patches else capacity - reserved)
        assert most is None or row_patches <= most
        assert plan.row_patches[row] == row_patches
        assert packing.max_sequences_per_row is None or len(pieces) <= packing.max_sequences_per_row
    lost = sum(lengths) - len(placed)
    assert (plan.num_dropped_tokens, plan.num_cut_tokens) == (
        (lost, 0) if packing.overflow == "drop" else (0, lost)
    )
    assert plan.num_dummy_rows == max(0, plan.num_rows - len(plan.lengths))
    assert sorted(placed) == [(i, token) for i, n in kept.items() for token in range(n)]
    assert plan.num_rows % ranks == 0
    needed = needed_dummies(plan.bins, patches, ranks)
    assert plan.needs_dummy_image.tolist() == needed
    dummy = -(-packing.dummy_image_tokens // align) * align
    filled = [int(n) + needs * dummy for n, needs in zip(plan.row_cells, needed, strict=True)]
    assert plan.width == max(align, *filled) <= capacity
    per_rank = plan.num_rows // ranks
    ends = np.append(0, np.cumsum(plan.atoms.vision_costs))[plan.row_offsets]
    assert plan.vision_cost_per_rank.tolist() == np.diff(ends[::per_rank]).tolist()


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[int], list[list[int]], PackingOptions]:
    layout = ParallelLayout(dp=draw(st.integers(1, 5)), tp=draw(st.sampled_from([1, 1, 2, 3, 8])))
    max_tokens = draw(st.integers(2 * layout.align, 64))
    most = draw(st.none() | st.integers(1, 60))
    overflow = draw(st.sampled_from(["drop", "drop", "truncate", "split"]))
    packing = PackingOptions(
        max_tokens,
        strategy=draw(st.sampled_from(STRATEGIES)),
        parallel=layout,
        overflow=overflow,
        max_sequences_per_row=draw(st.none() | st.integers(1, 6)),
        balance=draw(st.sampled_from(["attention", "attention", "tokens", None])),
        max_patches=most,
        cost=COST,
        dummy_image_tokens=draw(st.integers(0, max_tokens // layout.align // 2 * layout.align - 1)),
    )
    lengths, images = [], []
    for _ in range(draw(st.integers(0, 40))):
        has_image = draw(st.booleans())
        of_example = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3)) * has_image
        longest = draw(st.sampled_from([max_tokens // 4 + 1, max_tokens, 2 * max_tokens]))
        if has_image and overflow != "drop":  # then what has an image must fit
            longest = min(longest, packing.capacity)
            of_example = of_example[:1] if most is None else [min(most, of_example[0])]
        images.append(of_example)
        lengths.append(draw(st.integers(1, longest)))
    return lengths, images, packing


@given(calls())
def test_laws(call: tuple[list[int], list[list[int]], PackingOptions]) -> None:
    lengths, images, packing = call
    plan = pack(lengths, packing=packing, patches=images)
    assert_lawful(plan, lengths, images, packing)
    text = dataclasses.replace(packing, dummy_image_tokens=0)
    assert_lawful(pack(lengths, packing=text), lengths, [[]] * len(lengths), text)


@given(calls())
def test_without_images_plans_are_those_of_less_tokens(
    call: tuple[list[int], list[list[int]], PackingOptions],
) -> None:
    """No patches at all, and none beyond a dummy image's reserve, change no row."""
    lengths, _, packing = call
    plan = pack(lengths, packing=packing, patches=np.zeros(len(lengths), dtype=np.int64))
    less = dataclasses.replace(
        packing, max_tokens=packing.capacity - packing.reserved, dummy_image_tokens=0
    )
    expected = pack(lengths, packing=less)
    for name in ("example_indices", "starts", "lengths", "row_offsets", "dropped", "cut"):
        assert getattr(plan, name).tolist() == getattr(expected, name).tolist()
    assert not plan.needs_dummy_image.any()
    assert not plan.atoms.patches.any()


def atoms_of(lengths: list[int], packing: PackingOptions, images: list[list[int]]) -> Atoms:
    return Atoms.of(np.array(lengths, dtype=np.int64), None, packing, images)


# What does not fit

UNFIT = [  # lengths, patches, overflow, message
    ([4, 4, 4, 20], [9, 3, 8, 0], "raise", "example 0 has 9 patches of images, more than the "
     "max_patches=7 of a row (too large as well: 2 more); raise max_patches, make its images "
     "smaller, or pass overflow='drop'"),
    ([4, 4, 4, 20], [9, 3, 8, 0], "split", "example 0 has 9 patches of images, more than the "
     "max_patches=7 of a row (too large as well: 1 more); an example with images is never split; "
     "raise max_patches, make its images smaller, or pass overflow='truncate' or 'drop'"),
    ([4, 4, 4, 20], [9, 3, 8, 0], "truncate", "example 0 has 9 patches of images, more than the "
     "max_patches=7 of a row (too large as well: 1 more); an image is never cut, and lengths alone "
     "do not say where images are; raise max_patches, make its images smaller, or pass "
     "overflow='drop'"),
    ([4, 12], [0, 2], "raise", "example 1 has 12 tokens, more than the 10 that fit in a row with "
     "max_tokens=10 and align=1; raise max_tokens, shorten it, or pass overflow='drop'"),
    ([14, 12], [0, 2], "split", "example 1 has 12 tokens, more than the 10 that fit in a row with "
     "max_tokens=10 and align=1; an example with images is never split; raise max_tokens, shorten "
     "it, or pass overflow='truncate' or 'drop'"),
]  # fmt: skip


@pytest.mark.parametrize(("lengths", "patches", "overflow", "message"), UNFIT)
def test_examples_that_do_not_fit_are_named(
    lengths: list[int], patches: list[int], overflow: str, message: str
) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        pack(lengths, 10, patches=patches, max_patches=7, overflow=overflow)


def test_examples_of_too_many_patches_are_dropped() -> None:
    plan = pack([4, 4, 4, 20], 10, patches=[9, 3, 8, 0], max_patches=7, overflow="drop")
    assert (plan.dropped.tolist(), plan.num_dropped_tokens) == ([0, 2, 3], 28)
    assert (plan.bins, plan.atoms.patches.tolist()) == ([[1]], [3])


def test_text_leaves_room_for_a_dummy_image_on_several_ranks() -> None:
    options: dict[str, Any] = {"max_patches": 9, "dummy_image_tokens": 3}
    message = (
        "example 0 has 9 tokens, more than the 8 that fit in a row with max_tokens=12 and align=2, "
        "of which 4 are kept free for a dummy image (dummy_image_tokens=3); raise max_tokens, "
        "shorten it, or pass overflow='truncate', 'drop' or 'split'"
    )
    two = ParallelLayout(dp=2, tp=2)
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        pack_with([9, 4], 12, patches=[0, 5], parallel=two, **options)
    assert pack_with([9, 4], 12, patches=[0, 5], align=2, **options).num_rows == 2
    assert pack_with([12, 4], 12, parallel=two, **options).num_rows == 2  # no patches are known of
    plan = pack_with([12, 8], 12, patches=[5, 0], parallel=two, **options)  # an image may fill it
    assert plan.width == 12
    plan = pack_with([9, 4], 12, patches=[0, 5], parallel=two, overflow="split", **options)
    assert plan.lengths[plan.example_indices == 0].tolist() in ([8, 1], [1, 8])
    plan = pack_with([9, 4], 12, patches=[0, 5], parallel=two, overflow="truncate", **options)
    assert (plan.cut.tolist(), plan.num_cut_tokens) == ([0], 1)


def test_a_collator_says_where_examples_with_images_are_cut() -> None:
    packing = PackingOptions(10, overflow="truncate", max_patches=8, cost=COST)
    images = [[4, 8], [9], [3], [5, 3, 1], []]
    atoms = atoms_of([9, 6, 7, 12, 30], packing, images)
    kept, patches = np.array([6, 2, 7, 8, 0]), np.array([4, 0, 3, 8, 0])
    costs = np.array([4 * 11, 0, 3 * 10, 5 * 12 + 3 * 10, 0])
    plan = plan_rows(atoms, packing, (kept, patches, costs))
    by_example = plan.example_indices.argsort()
    assert plan.lengths[by_example].tolist() == [6, 2, 7, 8, 10]
    assert plan.atoms.patches[by_example].tolist() == [4, 0, 3, 8, 0]
    assert plan.atoms.vision_costs[by_example].tolist() == [4 * 11, 0, 3 * 10, 5 * 12 + 3 * 10, 0]
    assert (plan.cut.tolist(), plan.num_cut_tokens) == ([0, 1, 3, 4], 3 + 4 + 4 + 20)
    assert atoms.patches.tolist() == [12, 9, 3, 9, 0]
    message = (
        "example 1 begins with an image that does not fit in a row with max_tokens=10, "
        "max_patches=8, and an image is never cut; make the image smaller, or pass overflow='drop'"
    )
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        plan_rows(atoms, packing, (np.array([6, 0, 7, 8, 0]), patches, costs))


def test_a_text_that_is_left_of_an_example_with_images_leaves_room_for_a_dummy() -> None:
    packing = PackingOptions(
        10, overflow="truncate", max_patches=8, parallel=ParallelLayout(dp=2), dummy_image_tokens=2
    )
    kept, patches = np.array([9, 4]), np.array([0, 2])
    atoms, costs = atoms_of([12, 4], packing, [[9], [2]]), packing.cost.vision(patches)
    plan = plan_rows(atoms, packing, (kept, patches, costs))
    assert plan.lengths[plan.example_indices.argsort()].tolist() == [8, 4]


# Ranks and rows of larger batches


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("max_patches", [8192, 12288, 16384, 32768, None])
@pytest.mark.parametrize("count", [1024, 16_384])
def test_ranks_are_even_and_rows_full(name: str, max_patches: int | None, count: int) -> None:
    lengths, images = mix(name, count)
    patches = totals(images)
    options: dict[str, Any] = {"patches": images, "max_patches": max_patches}
    plan = pack_with(lengths, 8192, rows_multiple_of=8, dummy_image_tokens=3, **options)
    assert plan.row_cells.max() <= 8192
    assert max_patches is None or plan.row_patches.max() <= max_patches
    np.testing.assert_array_equal(np.sort(plan.example_indices), np.arange(count))
    np.testing.assert_array_equal(plan.atoms.patches, patches[plan.example_indices])
    for costs in (plan.cost_per_rank, plan.vision_cost_per_rank):
        assert costs.max() <= 1.05 * costs.mean()
    assert plan.needs_dummy_image.sum() <= 8  # rows with images are the same on all ranks
    filled = pack_with(lengths, 8192, **options)
    assert plan.num_rows - filled.num_rows < 8
    both = filled.row_cells.sum() / 8192, filled.row_patches.sum() / (max_patches or np.inf)
    needed = math.ceil(max(both))  # whole rows
    fill = needed / filled.num_rows
    assert fill >= {"half images": 0.98, "several images": 0.98, "no text": 0.97}.get(name, 0.90)


def test_balance_by_tokens_evens_out_tokens_and_patches() -> None:
    lengths, images = mix("half images", 1024)
    plan = pack_with(
        lengths, 8192, patches=images, max_patches=12288, rows_multiple_of=8, balance="tokens"
    )
    for even in (plan.tokens_per_rank, plan.row_patches.reshape(8, -1).sum(axis=1)):
        assert even.max() <= 1.01 * even.mean()


def test_rows_are_levelled_by_what_images_cost() -> None:
    """One image of 8 patches costs 64, eight of one patch 8: it is alone, in patches it is not."""
    options: dict[str, Any] = {
        "patches": [[8], [1] * 8, [1] * 8, [1] * 8, [1] * 8],
        "rows_multiple_of": 2,
        "cost": ModelCost(vision_linear=0, vision_quadratic=1),
    }
    by_cost = pack_with([1] * 5, 10, **options)
    assert sorted(map(sorted, by_cost.bins)) == [[0], [1, 2, 3, 4]]
    for other in ({"strategy": "balanced"}, {"balance": "tokens"}):
        by_patches = pack_with([1] * 5, 10, **options, **other)
        assert sorted(by_patches.row_patches.tolist()) == [16, 24], other


# --- Patches as users give them: one number per example, or one per image


IMAGE_COST = ModelCost(vision_linear=10, vision_quadratic=1)


@pytest.mark.parametrize(
    "patches",
    [
        [[4, 2], [], [3]],
        ((4, 2), (), (3,)),
        [np.array([4, 2]), np.array([], dtype=np.int64), np.array([3], dtype=np.uint8)],
        [torch.tensor([4, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([3])],
        Ragged.from_rows([[4, 2], [], [3]], dtype=np.int32),
        Ragged.from_rows([[9], [4, 2], [], [3], [9]])[1:4],
        Ragged(torch.tensor([4, 2, 3]), [0, 2, 2, 3]),
    ],
)
def test_patches_of_each_image(patches: Any) -> None:
    plan = pack_with([3, 4, 5], 12, patches=patches, cost=IMAGE_COST, strategy="sequential")
    assert plan.bins == [[0, 1, 2]]
    assert plan.atoms.patches.tolist() == [6, 0, 3]
    assert plan.atoms.vision_costs.tolist() == [4 * 14 + 2 * 12, 0, 3 * 13]
    assert (plan.atoms.patches.dtype, plan.atoms.vision_costs.dtype) == (np.int64, np.int64)


def test_no_images_and_no_examples() -> None:
    plan = pack_with([3, 4], 8, patches=[[], []], cost=IMAGE_COST)
    assert (plan.atoms.patches.tolist(), plan.atoms.vision_costs.tolist()) == ([0, 0], [0, 0])
    for nothing in ([], np.zeros(0, dtype=np.int32), Ragged.from_rows([])):
        assert pack_with([], 8, patches=nothing).atoms.patches.tolist() == []


WRONG_PATCHES: list[tuple[Any, type[Exception], str]] = [
    ([[4], []], ValueError, "patches has 2 entries, but there are 3 examples; pass one int pe"),
    ([4, -1, 2], DataError, "example 1 has -1 patches, but they must be 0 to 268435455; pass"),
    ([[4], [], [3, 0]], DataError, "example 2 has an image of 0 patches, but they must be 1"),
    ([[4], [2**28], [3]], DataError, "example 1 has an image of 268435456 patches, but they m"),
    ([4.0, 1, 2], TypeError, "patches of example 0 are 4.0, neither an int nor a list of the"),
    (np.array([4.0, 1, 2]), TypeError, "patches must be integers, got dtype float64; pass one"),
    ([[4.5], [], [1]], TypeError, "patches must be integers, got dtype float64; pass one int"),
    ([True, 1, 2], TypeError, "patches of example 0 are True, neither an int nor a list of t"),
    ([[4], 3, [1]], TypeError, "patches of example 1 are 3, neither an int nor a list of the"),
    ([[4], None, [1]], TypeError, "patches of example 1 are None, neither an int nor a list"),
    ([[[4]], [[1]], [[1]]], TypeError, "patches of example 0 are [[4]], neither an int nor a"),
    (np.ones((3, 2), int), ValueError, "patches must be 1-D, got shape (3, 2); pass one int p"),
    ([np.ma.array([4]), [], [1]], TypeError, "patches are a masked array, whose mask would be"),
    (5, ValueError, "patches must be 1-D, got shape (); pass one int per example, 0 without a"),
]


@pytest.mark.parametrize(("patches", "error", "message"), WRONG_PATCHES)
def test_refuses_wrong_patches(patches: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        pack_with([3, 4, 5], 8, patches=patches)
