"""A held-out set by rows: each example once, as many steps on every rank, the token mean of all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from torch_collate_kit import (
    Batch,
    PackedBatchSampler,
    PackedCollator,
    ParallelLayout,
    PerExample,
    TokenizedDataset,
    token_loss,
)

VOCABULARY = 11
NUMBER = {"number": PerExample(torch.int64)}


def held_out(count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(count)
    found = []
    for number, length in enumerate(rng.integers(2, 40, count).tolist()):
        ids, mask = rng.integers(1, VOCABULARY, length), rng.integers(0, 2, length)
        found.append({"input_ids": ids, "loss_mask": mask, "number": number})
    return found


def batches_of(examples: list[dict[str, Any]], dp: int, **options: Any) -> list[list[Batch]]:
    """The batches of each rank."""
    dataset, parallel = TokenizedDataset(examples, columns=list(examples[0])), ParallelLayout(dp=dp)
    collate = PackedCollator(0, max_tokens=40, parallel=parallel, fields=NUMBER)
    ranks = []
    for rank in range(dp):
        sampler = PackedBatchSampler(dataset, collate, shuffle=False, dp_rank=rank, **options)
        ranks.append(list(DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)))
        assert len(ranks[-1]) == len(sampler)
    return ranks


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 3, 50, 301])
@pytest.mark.parametrize("batch_rows", [4, 12])
def test_each_example_once_and_the_token_mean(dp: int, count: int, batch_rows: int) -> None:
    torch.manual_seed(0)
    logits_of = torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64)  # of the next token
    examples = held_out(count)
    nll, number = 0.0, 0
    for example in examples:  # one at a time
        ids, mask = (torch.tensor(example[name]) for name in ("input_ids", "loss_mask"))
        losses = functional.cross_entropy(logits_of[ids[:-1]], ids[1:], reduction="none")
        nll, number = nll + float(losses @ mask[1:].double()), number + int(mask[1:].sum())
    ranks = batches_of(examples, dp, batch_rows=batch_rows)
    assert len({len(batches) for batches in ranks}) == 1
    assert {len(batch) for batches in ranks for batch in batches} == {batch_rows // dp}
    seen = [n for batches in ranks for batch in batches for n in batch["number"].values.tolist()]
    assert sorted(seen) == list(range(count))
    counts = {sum(batch.metadata["num_loss_tokens"] for batch in batches) for batches in ranks}
    assert counts == {number}
    found = sum(
        float(token_loss(logits_of[batch["input_ids"]], batch, num_loss_tokens=1))
        for batches in ranks
        for batch in batches
    )
    assert found == pytest.approx(nll, rel=1e-6)  # masks are float32
    tokens = sum(len(example["input_ids"]) for example in examples)
    assert sum(batch.num_tokens for batches in ranks for batch in batches) == tokens
    assert [sum(batch.step.num_tokens for batch in batches) for batches in ranks] == [tokens] * dp
