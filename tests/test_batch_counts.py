"""Tokens, cells and padding: of a batch as its rows are, and of the whole step on every rank."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.batch_samples import APART, KINDS, examples, image_examples, loose
from torch_collate_kit import (
    Batch,
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    ParallelLayout,
    PrefetchLoader,
    RolloutCollator,
    TokenizedDataset,
)
from torch_collate_kit.rl import micro_batches, stage_mini_batches


def counted(batch: Batch) -> tuple[int, int]:
    """Tokens and cells, from the dense fields."""
    return sum(map(sum, batch["sub_seq_lengths"].tolist())), batch["input_ids"].numel()


def assert_counts(batch: Batch, tokens: int, cells: int) -> None:
    assert (batch.num_tokens, batch.num_cells) == (tokens, cells)
    assert type(batch.num_tokens) is type(batch.num_cells) is int
    assert batch.padding == (1 - tokens / cells if cells else 0)


def assert_step(batch: Batch, tokens: int, cells: int) -> None:
    step = batch.step
    assert (step.num_tokens, step.num_cells, step.padding) == (tokens, cells, 1 - tokens / cells)


TOTALS = {"images": 4 * 3 + 6 + 3, "rollouts": 20, "left": 21}  # by hand


@pytest.mark.parametrize("kind", list(APART))
@drawn(st.data())
def test_rows_are_counted_as_they_are_and_the_step_stays(kind: str, data: Any) -> None:
    batch = KINDS[kind]()
    whole = counted(batch)
    if (name := kind.removeprefix("packed ")) in TOTALS:
        assert whole[0] == TOTALS[name]
    assert_counts(batch, *whole)
    assert_step(batch, *whole)
    for _ in range(data.draw(st.integers(1, 4))):
        size = len(batch)
        change = data.draw(st.sampled_from(["slice", "select", "split", "cat", "pickle", "to"]))
        if change == "slice":
            batch = batch[data.draw(st.integers(0, size)) :]
        elif change == "select":
            chosen = st.lists(st.integers(0, size - 1), unique=True) if size else st.just([])
            batch = batch.select(data.draw(chosen))
        elif change == "split" and size:
            batch = data.draw(st.sampled_from(batch.split(data.draw(st.integers(1, size)))))
        elif change == "cat":
            half = size // 2
            batch = Batch.cat([batch[:half], batch[half:]])
        elif change == "pickle":
            batch = pickle.loads(pickle.dumps(batch))
        elif change == "to":
            assert_counts(batch.to("meta"), *counted(batch))  # the device is not read
        assert_counts(batch, *counted(batch))
        assert_step(batch, *whole)


@pytest.mark.parametrize("kind", list(APART))
def test_added_rows_are_cells_of_the_step_and_no_tokens(kind: str) -> None:
    batch = KINDS[kind]()
    tokens, cells = counted(batch)
    more = batch.pad_rows(multiple_of=len(batch) + 3)
    width = cells // len(batch)
    for rows in (more, more.to("meta"), pickle.loads(pickle.dumps(more))):
        assert_counts(rows, tokens, cells + 3 * width)
        assert_step(rows, tokens, cells + 3 * width)
    assert_counts(more[len(batch) :], 0, 3 * width)
    part = batch[:1].pad_rows(multiple_of=5)  # nobody knows what is done to the others
    assert part.num_cells == 5 * width
    assert part.step.num_tokens == tokens
    if len(batch) > 1 and "cost_per_rank" not in batch.metadata:
        with pytest.raises(ValueError, match="num_cells of the whole step is not known"):
            _ = part.step.padding


LENGTHS = np.random.default_rng(0).integers(2, 30, 300)
DATA = TokenizedDataset([{"input_ids": [7] * int(n)} for n in LENGTHS])
STEPS = {
    "examples": {"batch_size": 41},
    "rows": {"batch_rows": 8},
    "fixed width": {"batch_rows": 8, "fixed_width": True},
    "few": {"batch_size": 3},
}


def ranks_of(dp: int, data: Any = DATA, vision: Any = None, **options: Any) -> list[list[Batch]]:
    """The steps of an epoch, each with the batches of all ranks."""
    width = {"fixed_width": options.pop("fixed_width", False), "vision": vision}
    collate = PackedCollator(0, max_tokens=64, parallel=ParallelLayout(dp=dp), **width)
    loaders = []
    for rank in range(dp):
        sampler = PackedBatchSampler(data, collate, dp_rank=rank, seed=3, **options)
        loaders.append(DataLoader(data, batch_sampler=sampler, collate_fn=collate))
    return [list(parts) for parts in zip(*loaders, strict=True)]


@pytest.mark.parametrize("options", STEPS.values(), ids=list(STEPS))
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_every_rank_knows_the_step(dp: int, options: dict[str, Any]) -> None:
    seen = 0
    for parts in ranks_of(dp, **options):
        tokens, cells = np.sum([counted(part) for part in parts], axis=0).tolist()
        seen += tokens
        for part in parts:
            assert_counts(part, *counted(part))
            assert_step(part, tokens, cells)
            assert_step(part.split(1)[-1], tokens, cells)
            more = [other.pad_rows(multiple_of=3) for other in parts]  # on every rank
            assert_step(more[0], tokens, sum(of.num_cells for of in more))
        if dp > 1 and tokens != counted(parts[0])[0]:
            assert_step(Batch.cat(parts), tokens, cells)
    assert seen == LENGTHS.sum()


def test_images_are_tokens_and_dummy_images_are_none() -> None:
    vision = KINDS["packed images"]().placement.vision
    data = TokenizedDataset(image_examples(), vision=vision)
    [parts] = ranks_of(2, data, vision, batch_size=4)
    assert parts[0].metadata["num_dummy_images"] + sum(map(len, parts)) > 1
    tokens = sum(len(example["input_ids"]) for example in image_examples())
    for part in parts:
        assert_counts(part, *counted(part))
        assert_step(part, tokens, sum(of["input_ids"].numel() for of in parts))


def test_a_stream_knows_its_own_rows_alone() -> None:
    """On one rank, too: batches do not depend on the number of ranks, nor does the loop."""
    stream = [{"input_ids": [7] * int(n)} for n in LENGTHS]
    for dp, rank in ((1, 0), (2, None), (2, 1)):
        collate = PackedCollator(0, max_tokens=64, parallel=ParallelLayout(dp=dp))
        dataset = PackedIterableDataset(stream, collate, batch_rows=4, dp_rank=rank)
        for batch in PrefetchLoader(DataLoader(dataset, batch_size=None)):
            assert_counts(batch, *counted(batch))
            for name in ("num_tokens", "num_cells"):
                with pytest.raises(ValueError, match=f"{name} of the whole step is not known"):
                    getattr(batch.step, name)
            assert "num_tokens=None" in repr(batch.step)


def test_batches_collated_apart_are_no_step() -> None:
    collate = PackedCollator(0, max_tokens=8)
    one, other = (collate(examples(lengths)) for lengths in ([3, 5], [2, 6]))
    given = {"num_loss_tokens": 12, "cost_per_rank": ()}
    both = Batch.cat([one, other], given)
    assert_counts(both, 16, 16)
    with pytest.raises(ValueError, match=r"num_tokens of the whole step .* batch\.num_tokens"):
        _ = both.step.num_tokens
    known = {"step_num_tokens": 16, "step_num_cells": 16}
    assert_step(Batch.cat([one, other], given | known), 16, 16)


@pytest.mark.parametrize("packed", [False, True])
def test_rollouts_are_counted_when_staged_and_when_trimmed(packed: bool) -> None:
    found = [
        {"prompt_ids": [1] * (1 + i % 3), "response_ids": [2] * n, "rewards": 1.0}
        | {"loss_mask": [1] * n}
        for i, n in enumerate((2, 7, 1, 3, 5, 4, 9))
    ]
    batch = (PackedCollator(0, max_tokens=12) if packed else RolloutCollator(0))(found)
    edges = [0, 1, len(batch)]
    for m, ranks in enumerate(stage_mini_batches(batch, edges, dp_size=2, balance="tokens")):
        tokens, _ = counted(batch[edges[m] : edges[m + 1]])
        cells = sum(part["input_ids"].numel() for part in ranks)
        micro = [micro_batches(part, max_tokens=24) for part in ranks]
        trimmed = sum(of["input_ids"].numel() for parts in micro for of in parts)
        assert trimmed <= cells
        for part, parts in zip(ranks, micro, strict=True):
            assert_counts(part, *counted(part))
            assert_step(part, tokens, cells)
            for of in parts:
                assert_counts(of, *counted(of))
                assert_step(of, tokens, trimmed)


def test_batches_of_tensors() -> None:
    ids, mask = torch.ones(2, 4, dtype=torch.int64), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    batch = Batch({"input_ids": ids, "attention_mask": mask})
    assert_counts(batch, 6, 8)
    assert_counts(batch[1:], 2, 4)
    assert_counts(batch[:0], 0, 0)
    for name in ("num_tokens", "num_cells"):
        with pytest.raises(ValueError, match=f"{name} of the whole step is not known.*tensors"):
            getattr(batch.step, name)
    more = batch.pad_rows(multiple_of=3)
    with pytest.raises(ValueError, match="attention_mask in a batch without added rows"):
        _ = more.num_tokens
    with pytest.raises(ValueError, match="num_tokens needs sub_seq_lengths"):
        _ = loose().num_tokens
    with pytest.raises(ValueError, match="num_cells needs input_ids, and the batch has ids, rew"):
        _ = loose().num_cells
