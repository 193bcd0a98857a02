"""``row_metadata["num_trained"]`` says of every part of a batch what its loss mask does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.building import packed_sampler
from torch_collate_kit import (
    Batch,
    PackedCollator,
    PackingOptions,
    PaddedCollator,
    ParallelLayout,
    RolloutCollator,
    TokenizedDataset,
    rl,
)

EXAMPLES = [
    {"input_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 1, 1]},
    {"input_ids": [5, 6], "loss_mask": [1, 0]},  # its first token alone: nothing is trained
    {"input_ids": [9, 8, 7], "loss_mask": [0, 1, 1]},
    {"input_ids": [4, 3, 2, 1, 9], "loss_mask": [0, 0, 0, 0.5, 2]},
]
COUNTS = [2, 0, 2, 2]
ROLLOUTS = [
    {
        "prompt_ids": e["input_ids"][:1],
        "response_ids": e["input_ids"][1:],
        "loss_mask": e["loss_mask"][1:],
        "rewards": 1.0,
    }
    for e in EXAMPLES
]
COLLATED: dict[str, tuple[Any, list[Any]]] = {
    "left": (PaddedCollator(0), EXAMPLES),
    "right": (PaddedCollator(0, padding_side="right"), EXAMPLES),
    "packed": (PackedCollator(0, max_tokens=6, parallel=ParallelLayout(dp=2)), EXAMPLES),
    "aligned": (PackedCollator(0, max_tokens=12, parallel=ParallelLayout(tp=3)), EXAMPLES),
    "rollouts": (RolloutCollator(0), ROLLOUTS),
    "packed rollouts": (PackedCollator(0, max_tokens=8), ROLLOUTS),
}


def counts_of(batch: Batch) -> dict[int, int]:
    """By example."""
    rows = zip(
        batch.row_metadata["example_indices"].tolist(),
        batch.row_metadata["num_trained"].tolist(),
        strict=True,
    )
    return {i: count for row in rows for i, count in zip(*row, strict=True)}


def assert_counted(batch: Batch) -> None:
    """As many as the rows of the loss mask say."""
    per_row = [sum(row) for row in batch.row_metadata["num_trained"].tolist()]
    assert per_row == (batch["loss_mask"] != 0).sum(dim=1).tolist()


@pytest.mark.parametrize("name", COLLATED)
def test_parts_of_a_batch_have_the_counts_of_their_rows(name: str) -> None:
    collate, examples = COLLATED[name]
    batch = collate(examples)
    assert counts_of(batch) == dict(enumerate(COUNTS))
    parts = [batch, *batch.chunk(len(batch)), batch[1:], batch.select([len(batch) - 1, 0])]
    for part in parts:
        assert_counted(part)
    assert_counted(Batch.cat(batch.chunk(len(batch))))
    padded = batch.pad_rows(multiple_of=5)
    assert len(padded) > len(batch)
    assert_counted(padded)
    assert counts_of(padded) == dict(enumerate(COUNTS))
    for ranks in rl.stage_mini_batches(batch, [0, 1, len(batch)], dp_size=2):
        for part in ranks:
            assert_counted(part)


@pytest.mark.parametrize("overflow", ["truncate", "split", "drop"])
def test_what_is_cut_off_does_not_count(overflow: Any) -> None:
    batch = PackedCollator(0, max_tokens=4, overflow=overflow)(EXAMPLES)
    assert_counted(batch)
    counts = batch.row_metadata["num_trained"].values
    assert sum(counts.tolist()) == {"truncate": 5, "split": 5, "drop": 4}[overflow]


def test_the_ranks_of_a_sampler_have_the_counts_of_their_rows() -> None:
    data = TokenizedDataset(EXAMPLES)
    packing = PackingOptions(max_tokens=6, parallel=ParallelLayout(dp=2))
    collate = PackedCollator(0, packing=packing)
    found: list[int] = []
    for rank in range(2):
        sampler = packed_sampler(
            data.lengths,
            batch_size=4,
            dp_rank=rank,
            shuffle=False,
            packing=packing,
            num_loss_tokens=data.num_loss_tokens,
        )
        [part] = list(sampler)
        batch = collate(data.__getitems__(part))
        assert_counted(batch)
        found += np.asarray(batch.row_metadata["num_trained"].values).tolist()
    assert sorted(found) == sorted(COUNTS)
