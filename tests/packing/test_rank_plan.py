"""RankPlan.without: the rows of a rank, without some of its examples, by plain loops."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.packing.oracle_packing import pack_with
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing import RankPlan


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


@pytest.mark.parametrize("seed", range(150))
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


@pytest.mark.parametrize("seed", range(60))
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
