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

from torch_collate_kit import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator, RolloutCollator
from torch_collate_kit.loading import TokenizedDataset
from torch_collate_kit.packing import PackingPlan, RankPlan, pack
from torch_collate_kit.ragged import Ragged


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
