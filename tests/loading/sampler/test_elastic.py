"""States on another number of ranks: the same examples in each step, the same rows with R fixed."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.building import packed_collator, packed_sampler
from torch_collate_kit import (
    MixedSampler,
    PackedBatchSampler,
    PrefetchingSampler,
    TokenizedDataset,
)
from torch_collate_kit.errors import StateError
from torch_collate_kit.packing import ParallelLayout
from torch_collate_kit.testing import batch_digest

RNG = np.random.default_rng(5)
LENGTHS = RNG.integers(2, 40, size=53)
COUNTS = LENGTHS - 1
ROWS = [{"input_ids": np.full(n, i + 1)} for i, n in enumerate(LENGTHS)]


def prefetching(rank: int, dp_size: int, **options: Any) -> PrefetchingSampler:
    given = {"batch_size": 8, "seed": 3, "tail": "wrap", **options}
    return PrefetchingSampler(53, dp_rank=rank, dp_size=dp_size, **given)


def mixed(rank: int, dp_size: int, **options: Any) -> MixedSampler:
    given = {"batch_size": 8, "seed": 3, "weights": [0.7, 0.3], "num_steps": 5, **options}
    return MixedSampler([30, 23], dp_rank=rank, dp_size=dp_size, **given)


def packed(rank: int, dp_size: int, **options: Any) -> PackedBatchSampler:
    given = {"batch_size": 8, "seed": 3, "max_tokens": 64, "num_loss_tokens": COUNTS, **options}
    given.setdefault("parallel", ParallelLayout(dp=dp_size))
    return packed_sampler(LENGTHS, dp_rank=rank, **given)


def rows_of_24(rank: int, dp_size: int, **options: Any) -> PackedBatchSampler:
    return packed(rank, dp_size, rows_multiple_of=24, **options)


MAKERS = {"prefetching": prefetching, "mixed": mixed, "packed": packed, "rows of 24": rows_of_24}


def examples_and_divisor(parts: list[Any]) -> tuple[list[int], set[int | None]]:
    """Of all ranks' parts of a step."""
    if isinstance(parts[0], list):
        return sorted(i for part in parts for i in part), {None}
    examples = [i for part in parts for i in part.indices]
    return sorted(examples), {part.num_loss_tokens for part in parts}


def served(samplers: list[Any], num_steps: int) -> list[list[Any]]:
    """The parts of all ranks at each of the next steps, over epochs."""
    steps: list[list[Any]] = []
    while len(steps) < num_steps:
        epoch = zip(*[list(sampler) for sampler in samplers], strict=True)
        steps += [list(parts) for parts in epoch]
    return steps[:num_steps]


def place(samplers: list[Any], num_steps: int) -> tuple[int, int]:
    """Epoch and step after so many steps from the start of the run."""
    epoch = 0
    while num_steps >= samplers[0]._num_steps(epoch):
        num_steps -= samplers[0]._num_steps(epoch)
        epoch += 1
    return epoch, num_steps


def chain(make: Any, legs: list[tuple[int, int]]) -> list[list[Any]]:
    """Runs of (ranks, steps), each resumed from the state of the one before, as JSON."""
    state, steps = None, []
    for dp_size, num_steps in legs:
        samplers = [make(rank, dp_size) for rank in range(dp_size)]
        for sampler in samplers if state else []:
            sampler.load_state_dict(json.loads(state))
        steps += served(samplers, num_steps)
        states = {json.dumps(s.state_at(*place(samplers, len(steps)))) for s in samplers}
        assert len(states) == 1, "the state of every rank is the same"
        state = states.pop()
    return steps


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=25, deadline=None)
@given(
    legs=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(0, 9)), min_size=2, max_size=4
    )
)
def test_any_chain_has_the_examples_and_the_divisor_of_one_rank(
    name: str, legs: list[tuple[int, int]]
) -> None:
    found = chain(MAKERS[name], legs)
    expected = chain(MAKERS[name], [(1, sum(num_steps for _, num_steps in legs))])
    assert len(found) == len(expected)
    for mine, alone in zip(found, expected, strict=True):
        assert examples_and_divisor(mine) == examples_and_divisor(alone)
        if name == "rows of 24":
            assert {batch_digest(part.plan) for part in mine} == {batch_digest(alone[0].plan)}


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


@pytest.mark.parametrize(
    "layout", [None, [], {}, {"dp_size": 0}, {"dp_size": True}, {"dp_size": 2, "more": 1}]
)
def test_a_layout_that_cannot_have_been(layout: Any) -> None:
    state = {**prefetching(0, 2).state_at(1, 2), "layout": layout}
    with pytest.raises(StateError, match=r"^state has layout=.*; pass what state_dict\(\) gave"):
        prefetching(0, 2).load_state_dict(state)
