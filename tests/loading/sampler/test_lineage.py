"""Which examples a step has, and which steps an example: calculated, against what was served."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tests.building import mixed_sampler
from tests.loading.sampler.sampler_oracle import curriculum
from tests.loading.sampler.test_elastic import packed, prefetching
from torch_collate_kit import PrefetchingSampler


def by_hand(sampler: Any, example: int, epoch: int) -> list[tuple[int, int]]:
    steps = range(sampler.count_steps(epoch))
    return [(epoch, step) for step in steps if example in sampler.examples(epoch, step)]


@pytest.mark.parametrize(
    "sampler",
    [
        prefetching(0, 1),
        prefetching(0, 1, tail="drop"),
        prefetching(0, 1, tail="keep", shuffle="keyed"),
        prefetching(0, 1, batch_size=60),  # an epoch of no step
        PrefetchingSampler(13, batch_size=5, order=curriculum, tail="wrap"),
        packed(0, 2),
        mixed_sampler([30, 7], batch_size=8, weights=[0.5, 0.5], stop="all_exhausted"),
        mixed_sampler([30, 7], batch_size=8, weights=[0.7, 0.3], shuffle="keyed"),
        mixed_sampler([np.array([3, 1, 2]), np.array([4, 4])], batch_size=2, by="tokens"),
    ],
)
def test_when_is_the_search_of_all_steps(sampler: Any) -> None:
    for epoch in (0, 1, 3):
        for example in range(sampler.num_examples):
            assert sampler.when(example, epoch) == by_hand(sampler, example, epoch)
    sampler.set_epoch(2)
    assert sampler.when(1) == by_hand(sampler, 1, 2)
    with pytest.raises(ValueError, match=rf"^example {sampler.num_examples} does not exist: the"):
        sampler.when(sampler.num_examples)
    with pytest.raises(TypeError, match="example must be an int"):
        sampler.when("1")


@pytest.mark.parametrize("shuffle", [True, "keyed"])
def test_asking_changes_nothing(shuffle: bool | str) -> None:
    sampler, other = (prefetching(0, 2, shuffle=shuffle) for _ in range(2))
    batches = []
    for batch in sampler:
        batches.append(batch)
        found = sampler.examples(3, 1)
        found[:] = 0
        sampler.when(4, 2)
    assert batches == list(other)
    assert sampler.state_dict() == other.state_dict()
    assert sampler.examples(3, 1).tolist() == other.examples(3, 1).tolist()


def test_any_step_of_many_examples_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 1e8 examples: cold with a keyed order, and with the epoch's order at hand."""
    sampler = PrefetchingSampler(10**8, batch_size=512, shuffle="keyed", dp_rank=0, dp_size=8)
    began = time.thread_time()
    batch = sampler.examples(7, 123_456)
    ((epoch, step),) = sampler.when(int(batch[0]), 7)
    assert time.thread_time() - began < 0.5, "about 2 ms on a quiet machine"
    assert (epoch, step, len(batch)) == (7, 123_456, 512)
    small = PrefetchingSampler(1000, batch_size=10, seed=1)
    expected = small.examples(2, 50)
    monkeypatch.setattr("torch_collate_kit.loading.orders.order.epoch_order", None)
    assert small.examples(2, 50).tolist() == expected.tolist(), "no new order is made"
    with pytest.raises(TypeError):
        small.examples(3, 50)


def test_a_reshuffle_is_in_the_lineage() -> None:
    sampler = prefetching(0, 1, tail="keep")
    first = [next(it) for it in [iter(sampler)] for _ in range(2)]
    sampler.set_epoch(0, step=2)
    sampler.reshuffle()
    served_batches = [*first, *sampler]
    assert [sampler.examples(0, step).tolist() for step in range(7)] == served_batches
    later = prefetching(0, 1, tail="keep")
    later.load_state_dict(sampler.state_at(5, 1))
    assert [later.examples(0, step).tolist() for step in range(7)] == served_batches
