"""DPO on random batches of pairs, made in every way, against each pair alone, in fp64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.preference import pairs
from torch_collate_kit import (
    Batch,
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    PaddedCollator,
    ParallelLayout,
    PerExample,
    PrefetchLoader,
    TokenizedDataset,
)
from torch_collate_kit.losses import global_num_examples
from torch_collate_kit.preference import dpo

NOISE = 0.05
NUMBER = {"number": PerExample(torch.int64)}


def made_pairs(rng: np.random.Generator) -> list[dict[str, Any]]:
    found = pairs.pairs(int(rng.integers(9, 25)), int(rng.integers(2**31)))
    keys = ("input_ids", "loss_mask")
    return [{**{key: of[key] for key in keys}, "number": i} for i, of in enumerate(found)]


def collator(rng: np.random.Generator, dp: int) -> PackedCollator:
    strategy = rng.choice(["balanced", "sequential", "best_fit_decreasing", "first_fit_decreasing"])
    return PackedCollator(
        0,
        max_tokens=int(rng.integers(36, 64)),
        strategy=str(strategy),
        overflow="drop",
        parallel=ParallelLayout(dp=dp, tp=int(rng.choice([1, 2, 4]))),
        normalize_loss=False,
        fields=NUMBER,
    )


def fits_in_a_row(example: dict[str, Any], collate: PackedCollator) -> bool:
    align = collate.packing.parallel.align
    return sum(-(-len(of) // align) * align for of in example["input_ids"]) <= (
        collate.packing.capacity
    )


def of_collators(rng: np.random.Generator, data: list[Any]) -> Iterator[list[Batch]]:
    yield [collator(rng, int(rng.choice([1, 2, 4])))(data)]
    yield [PaddedCollator(0, normalize_loss=False, fields=NUMBER)(data)]


def of_samplers(rng: np.random.Generator, data: list[Any]) -> Iterator[list[Batch]]:
    """Steps of all ranks; the run goes on with another number of ranks after each."""
    dataset, state, epoch = TokenizedDataset(data, columns=[*data[0]]), None, set[int]()
    words, seed = rng.bit_generator.state, int(rng.integers(99))
    for step in range(len(data)):
        dp, found, states = int((4, 1, 2)[step % 3]), [], []
        for rank in range(dp):
            rng.bit_generator.state = words  # the same collator on every rank, in every run
            collate = collator(rng, dp)
            sampler = PackedBatchSampler(
                dataset, collate, batch_rows=4, tail="keep", window=2, dp_rank=rank, seed=seed
            )
            if state is not None:
                sampler.load_state_dict(state)
            if sampler.epoch or sampler.state_dict()["step"] == sampler.count_steps():
                fits = [i for i, of in enumerate(data) if fits_in_a_row(of, collate)]
                assert sorted(epoch) == fits, "an example was lost"
                return
            loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
            with PrefetchLoader(loader) as batches:
                found.append(next(iter(batches)))
                states.append(batches.state_dict()["sampler"])
        state = states[0]
        numbers = [int(i) for batch in found for i in batch["number"].values]
        assert not epoch & {*numbers}, "an example came twice"
        epoch |= {*numbers}
        yield found


def of_streams(rng: np.random.Generator, data: list[Any]) -> Iterator[list[Batch]]:
    dp, words = int(rng.choice([1, 2])), rng.bit_generator.state
    streams = []
    for rank in range(dp):
        rng.bit_generator.state = words
        collate = collator(rng, dp)
        streams.append(
            iter(
                PackedIterableDataset(
                    data, collate, batch_rows=2 * dp, buffer_size=8, dp_rank=rank, shuffle=True
                )
            )
        )
    yield from map(list, zip(*streams, strict=False))


WAYS = (of_collators, of_samplers, of_streams)


def assert_equals_pairs_alone(step: list[Batch], data: list[Any]) -> None:
    numbers = [int(i) for batch in step for i in batch["number"].values]
    if not numbers:
        return
    mean = len(numbers)
    assert global_num_examples(step) == mean or step[0].metadata["dropped"]
    policy, reference, score = pairs.models(NOISE)
    total = torch.zeros((), dtype=torch.float64)
    for batch in step:
        if not len(batch["number"].values):
            continue
        sums = pairs.sums_of(policy, batch)
        with torch.no_grad():
            of_reference = pairs.sums_of(reference, batch)
            first = dpo(of_reference, pairs.sums_of(reference, batch)).loss
        assert (first - math.log(2)).abs().max() <= 1e-12
        loss = dpo(sums, of_reference, label_smoothing=0.1).loss.sum() / mean
        loss.backward()
        total += loss.detach()
    keys = {"label": 1, "margin": 0.0, "source": "a"}
    alone = pairs.expected("dpo", NOISE, [{**data[i], **keys} for i in numbers])
    assert float(total) == pytest.approx(alone["loss"], rel=1e-9)
    gradient = pairs.gradients(policy, score).numpy()
    assert np.abs(gradient - alone["gradient"]).max() <= 1e-9 * np.abs(gradient).max()


def check(count: int) -> None:
    rng, done = np.random.default_rng(0), 0
    while done < count:
        for way in WAYS:
            data = made_pairs(rng)
            for step in islice(way(rng, data), 4):
                assert_equals_pairs_alone(step, data)
                done += len(step)


def test_packed_dpo_is_that_of_pairs_one_by_one() -> None:
    check(8)


@pytest.mark.release
def test_packed_dpo_is_that_of_pairs_one_by_one_in_a_thousand_batches() -> None:
    check(1000)
