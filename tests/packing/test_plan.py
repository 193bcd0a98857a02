from __future__ import annotations

import dataclasses
import pickle
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.packing.oracle_packing import assert_same, pack_with
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing import PackingOptions, PackingPlan, ParallelLayout, RankPlan, pack
from torch_collate_kit.testing import batch_digest


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


# --- PackingOptions and ParallelLayout: one object behind pack, collator, sampler and stream


LENGTHS = [5, 30, 9, 2, 14, 8, 8, 1, 22, 3]
COMMON: dict[str, Any] = {
    "max_tokens": 23,
    "strategy": "balanced",
    "parallel": ParallelLayout(dp=2, tp=4),
    "overflow": "split",
    "max_patches": 30,
}
KEYWORDS = {**COMMON, "max_sequences_per_row": 3, "balance": "tokens"}
PACKING = PackingOptions(**KEYWORDS)


def test_the_common_options_of_pack_are_those_of_the_object() -> None:
    expected = batch_digest(pack(LENGTHS, packing=PackingOptions(**COMMON)))
    assert batch_digest(pack(LENGTHS, **COMMON)) == expected
    changes = {"max_tokens": 27, "strategy": "sequential", "overflow": "truncate"}
    for name, other in {**changes, "parallel": ParallelLayout(dp=2), "max_patches": 3}.items():
        assert batch_digest(pack(LENGTHS, **COMMON | {name: other})) != expected
    assert batch_digest(pack(LENGTHS, 30)) == batch_digest(
        pack(LENGTHS, packing=PackingOptions(30))
    )


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        *(
            ({"packing": PACKING, name: value}, f"packing= and {name} both say how to pack; pass")
            for name, value in COMMON.items()
        ),
        ({"packing": PACKING} | COMMON, "packing= and max_tokens, strategy, overflow, parallel, "),
        ({"strategy": "balanced"}, "max_tokens must be an int, got None of type NoneType; pass"),
        ({"packing": 23}, "packing must be a PackingOptions, got 23"),
        ({"max_tokens": 23, "strategi": "balanced"}, "pack() got an unexpected keyword argument"),
    ],
)
def test_how_to_pack_is_said_once(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        pack(LENGTHS, **keywords)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"strategy": "best"}, ValueError, "strategy must be one of 'best_fit_decreasing', 'first_fit"),
    ({"strategy": ["balanced"]}, ValueError, "strategy must be one of 'best_fit_decreasing', 'fir"),
    ({"balance": "cost"}, ValueError, "balance must be one of 'attention', 'tokens', None; got 'c"),
    ({"overflow": None}, ValueError, "overflow must be one of 'raise', 'truncate', 'drop', "),
    ({"max_tokens": 3}, ValueError, "max_tokens must be at least align=4, got 3: not one aligned"),
    ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0"),
    ({"max_tokens": 8.0}, TypeError, "max_tokens must be an int, got 8.0 of type float"),
    ({"max_tokens": True}, TypeError, "max_tokens must be an int, got True of type bool"),
    ({"max_sequences_per_row": 0}, ValueError, "max_sequences_per_row must be at least 1, got 0"),
    ({"rows_multiple_of": 0}, ValueError, "rows_multiple_of must be at least 1, got 0; None"),
    ({"rows_multiple_of": 3}, ValueError, "rows_multiple_of must be a multiple or a divisor of dp"),
    ({"max_patches": 0}, ValueError, "max_patches must be at least 1, got 0; None means no limit"),
    ({"parallel": 2}, TypeError, "parallel must be a ParallelLayout, got 2; ParallelLayout(dp=2)"),
    ({"cost": 3}, TypeError, "cost must be a ModelCost, got 3; ModelCost.of(model.config)"),
    ({"dummy_image_tokens": -1}, ValueError, "dummy_image_tokens must be at least 0, got -1"),
    ({"dummy_image_tokens": None}, TypeError, "dummy_image_tokens must be an int, got None"),
    ({"dummy_image_tokens": 17}, ValueError, "dummy_image_tokens=17 leaves no room for text in a"),
]  # fmt: skip


@pytest.mark.parametrize(("keywords", "error", "message"), WRONG)
def test_wrong_options_are_refused_when_they_are_made(
    keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        PackingOptions(**KEYWORDS | keywords)


def test_options_are_values() -> None:
    assert PACKING == PackingOptions(**KEYWORDS) == pickle.loads(pickle.dumps(PACKING))
    assert {PACKING: 1}[PackingOptions(**KEYWORDS)] == 1
    assert PACKING.capacity == 20


def test_align_is_what_the_parallel_ranks_need() -> None:
    layouts = {(1, 1): 1, (4, 1): 4, (1, 2): 4, (4, 2): 16}
    for (tp, cp), align in layouts.items():
        assert ParallelLayout(dp=3, tp=tp, cp=cp).align == align
        assert ParallelLayout(dp=3, tp=tp, cp=cp).row_align == align


def test_a_layout_is_immutable_hashable_and_holds_python_ints() -> None:
    layout = ParallelLayout(dp=np.int32(4), tp=2)  # type: ignore[arg-type]
    assert layout == ParallelLayout(dp=4, tp=2)
    assert hash(layout) == hash(ParallelLayout(dp=4, tp=2))
    assert type(layout.dp) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.dp = 2  # type: ignore[misc]


@pytest.mark.parametrize("name", ["dp", "tp", "cp"])
def test_a_layout_refuses_sizes_below_one_and_non_ints(name: str) -> None:
    off = "; 1 means this kind of parallelism is off$"
    with pytest.raises(ValueError, match=rf"^{name} must be at least 1, got 0{off}"):
        ParallelLayout(**{name: 0})
    with pytest.raises(TypeError, match=rf"^{name} must be an int, got 2.0 of type float{off}"):
        ParallelLayout(**{name: 2.0})
    with pytest.raises(TypeError, match=rf"^{name} must be an int, got True of type bool{off}"):
        ParallelLayout(**{name: True})
    with pytest.raises(TypeError, match=rf"^{name} must be an int, got None of type NoneType"):
        ParallelLayout(**{name: None})


# --- RankPlan.without: the rows of a rank, without some of its examples, by plain loops


def drawn(seed: int) -> tuple[RankPlan, list[int], np.random.Generator]:
    """A rank's part of a plan with images, and positions to leave out."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 30, size=int(rng.integers(1, 24)))
    patches = np.where(rng.random(len(lengths)) < 0.3, 4, 0)
    num_ranks = int(rng.choice([1, 2, 4]))
    overflow = str(rng.choice(["split", "drop"])) if not patches.any() else "drop"
    plan = pack_with(
        lengths,
        int(rng.integers(20, 40)),
        patches=patches,
        max_patches=int(rng.integers(4, 12)),
        dummy_image_tokens=2,
        rows_multiple_of=num_ranks,
        overflow=overflow,
    )
    dp_size = int(rng.choice([n for n in (1, 2, 4) if num_ranks % n == 0]))
    rank = int(rng.integers(dp_size))
    indices = 100 + rng.permutation(len(lengths))
    counts = np.maximum(lengths - 1, 0)
    part = RankPlan(plan, rank, indices, lengths, counts, dp_size=dp_size)
    gone = np.flatnonzero(rng.random(len(part.indices)) < rng.choice([0.2, 0.7, 1.0]))
    return part, gone.tolist(), rng


def rows_written_out(part: RankPlan, gone: list[int]) -> list[list[tuple[int, int, int]]]:
    """Of each row of the rank, the pieces that stay: example, first token, tokens."""
    plan, rows = part.plan, []
    numbers = sorted({e for row in part.rows for e in plan.bins[row]})
    lost = {numbers[position] for position in gone}
    for row in part.rows:
        pieces = range(plan.row_offsets[row], plan.row_offsets[row + 1])
        named = [(plan.example_indices[i], plan.starts[i], plan.lengths[i]) for i in pieces]
        rows.append([tuple(map(int, piece)) for piece in named if piece[0] not in lost])
    return rows


def rows_of(part: RankPlan) -> list[list[tuple[int, int, int]]]:
    _, starts, lengths, row_offsets = part.pieces
    columns = (part.plan.example_indices[part.numbers], starts, lengths)
    pieces = list(zip(*(column.tolist() for column in columns), strict=True))
    offsets = row_offsets.tolist()
    return [pieces[a:b] for a, b in pairwise(offsets)]


@pytest.mark.parametrize("seed", range(60))
def test_a_part_without_examples_is_the_plan_without_their_pieces(seed):
    part, gone, rng = drawn(seed)
    before: Any = (list(part.indices), part.lengths.tolist(), rows_of(part))
    assert rows_of(part) == rows_written_out(part, [])
    each = part.plan.num_rows // part.dp_size
    assert part.rows == range(part.dp_rank * each, (part.dp_rank + 1) * each)
    shorter = part.without(gone)
    assert (part.indices, part.lengths.tolist(), rows_of(part)) == before  # it is not changed
    rows = rows_written_out(part, gone)
    assert rows_of(shorter) == rows
    kept = [i for i in range(len(part.indices)) if i not in gone]
    assert shorter.indices == [part.indices[i] for i in kept]
    assert shorter.lengths.tolist() == [int(part.lengths[i]) for i in kept]
    read = sorted({piece[0] for row in rows for piece in row})  # in the order of the indices
    expected = [read.index(piece[0]) for row in rows for piece in row]
    assert shorter.pieces.examples.tolist() == expected
    assert shorter.patches.tolist() == [int(part.patches[i]) for i in kept]
    shorter.check_lengths(shorter.lengths)
    shorter.check_patches(shorter.patches)
    assert shorter.num_loss_tokens_elsewhere(3) == part.num_loss_tokens - 3
    cut = int(rng.integers(len(gone) + 1))  # in two steps
    again = [i - sum(g < i for g in gone[:cut]) for i in gone[cut:]]
    twice = part.without(gone[:cut]).without(again)
    assert (twice.indices, rows_of(twice)) == (shorter.indices, rows)


@pytest.mark.parametrize("seed", range(40))
def test_a_row_that_has_lost_its_images_runs_the_vision_tower_where_others_do(seed):
    part, gone, _ = drawn(seed)
    plan = part.plan
    numbers = sorted({e for row in part.rows for e in plan.bins[row]})
    lost = {numbers[position] for position in gone}
    expected = []
    for row in part.rows:
        pieces = range(plan.row_offsets[row], plan.row_offsets[row + 1])
        images = [i for i in pieces if plan.atoms.patches[i]]
        has_lost = bool(images) and all(plan.example_indices[i] in lost for i in images)
        planned = bool(plan.needs_dummy_image[row])
        expected.append(planned or (has_lost and plan.rows_multiple_of > 1))
    shorter = part.without(gone)
    assert shorter.needs_dummy_image.tolist() == expected
    used = [sum(piece[2] for piece in row) for row in rows_of(shorter)]
    dummies = [2 * needed for needed in expected]
    assert all(a + b <= plan.width for a, b in zip(used, dummies, strict=True))


def test_images_are_lost_in_the_sample():
    parts = [drawn(seed)[:2] for seed in range(60)]
    changed = [
        part.without(gone).needs_dummy_image.tolist() != part.needs_dummy_image.tolist()
        for part, gone in parts
    ]
    assert sum(changed) > 5


@pytest.mark.parametrize("number", [0, 2, 4])
def test_a_whole_plan_takes_as_many_examples_as_it_was_made_for(number):
    whole = RankPlan(pack_with([3, 4, 9], 8, overflow="drop"))
    whole.check_lengths(np.array([3, 4, 9]))
    message = (
        f"there are {number} examples, and the plan was made for 3; pass all that were planned, "
        "in their order, and no others"
    )
    with pytest.raises(DataError, match=f"^{message}$"):
        whole.check_lengths(np.array([3, 4, 9, 1][:number]))


def test_a_plan_of_nothing_takes_no_example():
    whole = RankPlan(pack_with([], 8))
    whole.check_lengths(np.zeros(0, dtype=np.int64))
    with pytest.raises(DataError, match=r"^there are 1 examples, and the plan was made for 0; "):
        whole.check_lengths(np.array([2]))
