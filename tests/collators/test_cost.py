"""What a batch costs, counted and not timed, so that a busy machine cannot fail it.

A batch from columns takes as many calls for six thousand examples as for one thousand, and a
fraction of the memory of its dense fields. Planning is counted apart: it takes some calls per
distinct length.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.building import packed_collator, packed_sampler
from tests.vision.oracle_images import LAYOUTS, TOKEN
from torch_collate_kit import (
    Batch,
    PackedCollator,
    PackingOptions,
    ParallelLayout,
    TokenizedDataset,
)
from torch_collate_kit.collators import PaddedCollator, RolloutCollator
from torch_collate_kit.packing import ModelCost, PackingPlan, RankPlan, pack
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.rl import stage_mini_batches


def columns_of(num_examples: int, *, longest: int = 300) -> dict[str, Ragged]:
    lengths = np.random.default_rng(1).integers(2, longest, size=num_examples)
    flat = np.arange(int(lengths.sum())) % 1000
    return {
        "input_ids": Ragged.from_lengths(flat, lengths),
        "loss_mask": Ragged.from_lengths((flat % 3 > 0).astype(np.int8), lengths),
    }


def rollout_columns_of(num_examples: int) -> dict[str, Any]:
    """The tokens of ``columns_of`` as responses, each to a prompt of one token."""
    columns = columns_of(num_examples)
    ids, mask = columns["input_ids"], columns["loss_mask"]
    prompts = Ragged(ids.values, np.arange(num_examples + 1))
    values = Ragged(-mask.values.astype(np.float32), mask.offsets)
    return {
        "prompt_ids": prompts,
        "response_ids": ids,
        "loss_mask": mask,
        "logprobs": values,
        "rewards": np.ones(num_examples),
        "uid": [str(i // 8) for i in range(num_examples)],
        "is_last_step": np.ones(num_examples, dtype=bool),
    }


def num_calls(function: Callable[[], Any]) -> int:
    """Calls of Python and of C functions."""
    function()  # imports, caches
    counts: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        counts[event] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return counts["call"] + counts["c_call"]


PLANS: dict[int, PackingPlan] = {}


def collate_planned(columns: dict[str, Ragged]) -> Batch:
    """Collate with a plan made before: what is left is the moving."""
    lengths = columns["input_ids"].lengths
    if len(lengths) not in PLANS:
        PLANS[len(lengths)] = pack(lengths, 512)
    return PackedCollator(0, max_tokens=512)(RankPlan(PLANS[len(lengths)]).with_examples(columns))


COLLATORS: dict[str, tuple[Callable[[], Any], Callable[[int], Any]]] = {
    "packed": (lambda: collate_planned, columns_of),
    "padded": (lambda: PaddedCollator(0), columns_of),
    "rollouts": (lambda: RolloutCollator(0), rollout_columns_of),
}


@pytest.mark.parametrize("name", COLLATORS)
def test_calls_do_not_grow_with_the_batch(name):
    make, columns = COLLATORS[name]
    collate = make()
    few, many = (num_calls(lambda n=n: collate(columns(n))) for n in (1000, 6000))
    few_made, many_made = (num_calls(lambda n=n: columns(n)) for n in (1000, 6000))
    assert few - few_made > 50, "nothing was counted"
    assert many - many_made <= few - few_made + 100
    assert many - many_made < 1000


def test_calls_of_planning_grow_with_the_distinct_lengths():
    """About five C calls a distinct length; none a piece."""
    for num_pieces in (2_000, 200_000):
        lengths = np.random.default_rng(2).integers(1, 300, size=num_pieces)
        assert num_calls(lambda lengths=lengths: pack(lengths, 1000)) < 300 * 40


def test_calls_of_reading_are_few():
    """Some C calls an example and column, of memoryviews; no Python call."""
    rows = columns_of(3000)
    dataset = TokenizedDataset(
        [{"input_ids": a, "loss_mask": b} for a, b in zip(*rows.values(), strict=True)]
    )
    few, many = (num_calls(lambda n=n: dataset.__getitems__(range(n))) for n in (100, 3000))
    assert many - few < 500


@pytest.mark.parametrize("name", COLLATORS)
def test_collation_takes_little_memory(name):
    """What is stored is a fraction of the dense fields, and so is what is needed for a moment."""
    make, columns_of_batch = COLLATORS[name]
    collate, columns = make(), columns_of_batch(1000)
    collate(columns)
    tracemalloc.start()
    try:
        batch = collate(columns)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    stored = batch.nbytes
    fields = (field.values if isinstance(field, Ragged) else field for field in batch.values())
    dense = sum(field.nbytes for field in fields)
    assert dense > 5_000_000
    assert stored < dense / 5
    assert peak < dense / 2


# --- What every rank has to compute, in the metadata of a packed batch: of all ranks, on each


# n tokens cost n * (10 + n): 1, 2, 3 and 4 of them 11, 24, 39 and 56
OPTIONS: dict[str, Any] = {
    "max_tokens": 8,
    "parallel": ParallelLayout(dp=2),
    "cost": ModelCost(10, 1, vision_linear=5, vision_quadratic=1),
}
EXAMPLES = [{"input_ids": [n] * n} for n in (3, 1, 4, 2)]


def test_the_cost_of_ranks_by_hand() -> None:
    """Rows [4, 1] and [3, 2]; the same numbers on a controller and on each rank."""
    whole = packed_collator(0, **OPTIONS)(EXAMPLES)
    assert whole["sub_seq_lengths"].tolist() == [[4, 1], [3, 2]]
    assert whole.metadata["cost_per_rank"] == (56 + 11, 39 + 24)
    dataset = TokenizedDataset(EXAMPLES)
    for rank in range(2):
        (part,) = packed_sampler(
            dataset.lengths, batch_size=4, dp_rank=rank, shuffle=False, **OPTIONS
        )
        batch = packed_collator(0, normalize_loss=False, **OPTIONS)(dataset.__getitems__(part))
        assert batch.metadata["cost_per_rank"] == (67, 63)


def test_aligned_cells_are_computed_and_a_rank_may_have_none() -> None:
    options = OPTIONS | {"parallel": ParallelLayout(dp=3, tp=2)}
    batch = packed_collator(0, **options)(EXAMPLES[:2])  # 3 and 1 tokens in 4 and 2 cells
    assert batch["sub_seq_lengths"].tolist() == [[3], [1], []]
    assert batch.metadata["cost_per_rank"] == (56, 24, 0)


def test_images_cost_the_vision_tower() -> None:
    """16 patches cost 16 * (5 + 16) = 336, once; text has no such entry."""
    image = {"pixel_values": np.ones((16, 6)), "image_grid_thw": [[1, 4, 4]]}
    examples = [{"input_ids": [70, TOKEN, TOKEN, TOKEN, TOKEN], **image}, {"input_ids": [71] * 5}]
    options = OPTIONS | {"max_tokens": 32, "train_all": True}
    batch = packed_collator(0, vision=LAYOUTS["qwen2_vl"], **options)(examples)
    assert batch.metadata["cost_per_rank"] == (75, 75)
    assert batch.metadata["vision_cost_per_rank"] == (336, 0)
    text = packed_collator(0, **options)([{"input_ids": [71] * 5}])
    assert "vision_cost_per_rank" not in text.metadata


def test_a_staged_batch_is_divided_among_other_ranks() -> None:
    whole = packed_collator(0, **OPTIONS)(EXAMPLES)
    [[part]] = stage_mini_batches(whole, [0, len(whole)], 1)
    assert "cost_per_rank" not in part.metadata


# --- ``row_metadata["num_trained"]`` says of every part of a batch what its loss mask does


MASKED = [
    {"input_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 1, 1]},
    {"input_ids": [5, 6], "loss_mask": [1, 0]},  # its first token alone: nothing is trained
    {"input_ids": [9, 8, 7], "loss_mask": [0, 1, 1]},
    {"input_ids": [4, 3, 2, 1, 9], "loss_mask": [0, 0, 0, 0.5, 2]},
]


def test_the_ranks_of_a_sampler_have_the_counts_of_their_rows() -> None:
    """Those of whole batches, and of their parts, are in the fuzz of each collator."""
    data = TokenizedDataset(MASKED)
    packing = PackingOptions(max_tokens=6, parallel=ParallelLayout(dp=2))
    options = {"batch_size": 4, "shuffle": False, "packing": packing}
    found: list[int] = []
    for rank in range(2):
        [part] = packed_sampler(
            data.lengths, dp_rank=rank, num_loss_tokens=data.num_loss_tokens, **options
        )
        batch = PackedCollator(0, packing=packing)(data.__getitems__(part))
        counts = batch.row_metadata["num_trained"]
        assert [sum(row) for row in counts] == (batch["loss_mask"] != 0).sum(dim=1).tolist()
        found += counts.values.tolist()
    assert sorted(found) == [0, 2, 2, 2]
