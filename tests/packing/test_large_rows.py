"""Rows of any ``max_tokens``: no array of as many entries, no sum beyond int64, the same plans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.building import packed_sampler
from torch_collate_kit import (
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    PackingOptions,
    ParallelLayout,
    audit,
    pack,
    packing_report,
)
from torch_collate_kit.errors import DataError

LENGTHS = np.random.default_rng(0).integers(1, 2000, 120)
LARGE = [2**31, 2**41, 2**62, 2**70]
STRATEGIES = ["balanced", "best_fit_decreasing", "first_fit_decreasing", "sequential", "wrapped"]


@pytest.mark.parametrize("max_tokens", LARGE)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_that_hold_all_are_planned(max_tokens: int, strategy: str) -> None:
    options: dict[str, Any] = {"max_tokens": max_tokens, "strategy": strategy}
    plan = pack(LENGTHS, parallel=ParallelLayout(dp=2), **options)
    assert plan.lengths.sum() == LENGTHS.sum()
    assert plan.num_rows == plan.lower_bound == 2
    assert 0 < plan.efficiency <= 1
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    packing = PackingOptions(**options, max_patches=None if strategy == "wrapped" else max_tokens)
    patches = {} if strategy == "wrapped" else {"patches": LENGTHS % 7}
    collate = PackedCollator(tokenizer, packing=packing, normalize_loss=False)
    for number in ({"batch_rows": 2}, {"batch_size": 50}):
        sampler = PackedBatchSampler(LENGTHS, collate, dp_rank=0, **number, **patches)
        assert sum(int(part.plan.lengths.sum()) for part in sampler) == LENGTHS.sum()
    examples = [{"input_ids": [5] * int(n) + [1]} for n in LENGTHS[:40] // 20]
    stream = PackedIterableDataset(examples, PackedCollator(tokenizer, **options), buffer_size=9)
    assert sum(batch.num_tokens for batch in stream) == sum(len(of["input_ids"]) for of in examples)


def test_joined_epochs_that_never_fill_a_row_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"500 of 120 examples do not fill 8 steps of batch_rows=2"
    ):
        list(packed_sampler(LENGTHS, batch_rows=2, tail="wrap", max_tokens=2**41))


@pytest.mark.parametrize("max_tokens", LARGE)
def test_examples_longer_than_int32_counts_fit_in_no_row(max_tokens: int) -> None:
    long = [min(max_tokens, 2**58), 5]
    for make in (pack, lambda *of: packed_sampler(of[0], batch_rows=2, max_tokens=of[1])):
        with pytest.raises(DataError, match=r"more than the 2147483647 that fit .*int32 counts"):
            make(long, max_tokens)
    assert pack(long, max_tokens, overflow="drop").dropped.tolist() == [0]
    nearly = [2**31 - 1, 5, 2**31 - 1, 2**30, 2**30]
    for strategy in STRATEGIES:
        plan = pack(nearly, max_tokens, strategy=strategy)
        assert plan.row_cells.max() < 2**31
        assert plan.lengths.sum() == sum(nearly)
    assert len(list(packed_sampler(nearly, batch_rows=1, max_tokens=max_tokens))) == 4


@pytest.mark.parametrize("max_tokens", LARGE)
def test_reports_and_audits_return(max_tokens: int) -> None:
    report = packing_report([min(max_tokens, 2**62), 5], max_tokens, show=False)
    assert report["candidates"][1]["num_dropped"] == 1
    assert report["candidates"][1]["num_rows"] == 1
    if max_tokens == LARGE[1]:
        short = packing_report([30, 20, 7], max_tokens, batch_rows=1, show=False)
        assert short["steps"][1]["num_steps"] == 1
    assert "padding 0.0%" in str(packing_report([30, 30, 30], max_tokens, show=False))
    assert audit([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}], max_tokens=max_tokens)


@pytest.mark.parametrize("dp", [1, 2])
def test_a_text_longer_than_a_row_is_cut_where_it_is_counted(dp: int) -> None:
    packing = PackingOptions(
        40, parallel=ParallelLayout(dp=dp), overflow="split", dummy_image_tokens=4
    )
    plan = pack([12, 78], packing=packing)
    assert sorted(plan.lengths.tolist()) == [12, 38, 40]
    plan = pack([12, 78], packing=packing, patches=[4, 0])
    assert sorted(plan.lengths.tolist()) == ([12, 38, 40] if dp == 1 else [6, 12, 36, 36])
    batch = PackedCollator(0, packing=packing)([{"input_ids": [5] * 12}, {"input_ids": [5] * 78}])
    assert batch.num_tokens == 90
