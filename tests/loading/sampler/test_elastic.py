"""States on another number of ranks: the same examples in each step, the same rows with R fixed."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from tests.building import mixed_sampler, packed_collator, packed_sampler
from torch_collate_kit import (
    PackedBatchSampler,
    PrefetchingSampler,
    TokenizedDataset,
)
from torch_collate_kit.packing import ParallelLayout

RNG = np.random.default_rng(5)
LENGTHS = RNG.integers(2, 40, size=53)
COUNTS = LENGTHS - 1
ROWS = [{"input_ids": np.full(n, i + 1)} for i, n in enumerate(LENGTHS)]


def prefetching(rank: int, dp_size: int, **options: Any) -> PrefetchingSampler:
    given = {"batch_size": 8, "seed": 3, "tail": "wrap", **options}
    return PrefetchingSampler(53, dp_rank=rank, dp_size=dp_size, **given)


def mixed(rank: int, dp_size: int, **options: Any) -> PrefetchingSampler:
    given = {"batch_size": 8, "seed": 3, "weights": [0.7, 0.3], **options}
    return mixed_sampler([30, 23], dp_rank=rank, dp_size=dp_size, **given)


def packed(rank: int, dp_size: int, **options: Any) -> PackedBatchSampler:
    given = {"batch_size": 8, "seed": 3, "max_tokens": 64, "num_loss_tokens": COUNTS, **options}
    given.setdefault("parallel", ParallelLayout(dp=dp_size))
    return packed_sampler(LENGTHS, dp_rank=rank, **given)


def rows_of_24(rank: int, dp_size: int, **options: Any) -> PackedBatchSampler:
    return packed(rank, dp_size, rows_multiple_of=24, **options)


MAKERS = {"prefetching": prefetching, "mixed": mixed, "packed": packed, "rows of 24": rows_of_24}


def test_uneven_parts_differ_by_one() -> None:
    parts = [next(iter(prefetching(rank, 3, shuffle=False))) for rank in range(3)]
    assert parts == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_what_a_change_of_ranks_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    prefetching(0, 2).load_state_dict(prefetching(0, 8).state_at(1, 2))
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        (
            "INFO",
            "resumed at epoch 1 step 2 with another layout (dp_size 8 -> 2): "
            "the same examples in each step",
        )
    ]
    caplog.clear()
    sampler = packed(0, 2, max_tokens=48)
    sampler.load_state_dict(packed(0, 4).state_at(1, 2))
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        (
            "WARNING",
            "resumed at epoch 1 step 2 with another layout (max_tokens 64 -> 48, dp 4 -> 2): the "
            "same examples in each step, other rows",
        )
    ]
    caplog.clear()
    sampler.load_state_dict(sampler.state_dict())
    assert not caplog.records, "said once"
    rows_of_24(0, 2).load_state_dict(rows_of_24(0, 4).state_at(1, 2))
    assert [r.levelname for r in caplog.records] == ["INFO"], "the same rows"
    caplog.clear()
    rows_of_24(0, 4).load_state_dict(packed(0, 4).state_at(1, 2))
    packed(0, 4).load_state_dict(rows_of_24(0, 4).state_at(1, 2))
    packed(0, 4, rows_multiple_of=4).load_state_dict(packed(0, 4).state_at(1, 2))
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING", "INFO"]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 6])
def test_with_a_fixed_multiple_rows_are_the_same_bit_for_bit(dp_size: int) -> None:
    """Ranks' batches, one after the other, are the batch of one rank that has all rows."""
    dataset = TokenizedDataset(ROWS)
    collators = [
        packed_collator(0, max_tokens=64, parallel=ParallelLayout(dp=n), rows_multiple_of=6)
        for n in (1, dp_size)
    ]
    samplers = [packed(rank, n, rows_multiple_of=6) for n in (1, dp_size) for rank in range(n)]
    for step in zip(*samplers, strict=True):
        whole = collators[0](dataset.__getitems__(step[0]))
        parts = [collators[1](dataset.__getitems__(part)) for part in step[1:]]
        for name in ("input_ids", "position_ids", "labels", "loss_mask"):
            rows = np.concatenate([part[name].numpy() for part in parts])
            assert np.array_equal(rows, whole[name].numpy()), name
        assert {p.metadata["num_loss_tokens"] for p in parts} == {whole.metadata["num_loss_tokens"]}
        assert len({len(p) for p in parts}) == 1
