"""Laws of the sampler: order from (seed, epoch), tails, ranks, DataLoaders."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.loading.sampler.sampler_oracle import curriculum, epochs_of, read
from torch_collate_kit.loading import PrefetchingSampler, ResumableSampler

TAILS = ["keep", "drop", "wrap"]
SIZES = [(12, 4), (13, 4), (10, 3), (7, 7), (9, 8), (5, 1)]


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("n", "size"), SIZES)
def test_batches_are_those_of_the_loops(n, size, shuffle, tail):
    sampler = PrefetchingSampler(n, batch_size=size, shuffle=shuffle, seed=5, tail=tail)
    expected = epochs_of(n, size, 5, tail=tail, seed=5, shuffle=shuffle)
    lengths = []
    for batches in expected:
        lengths.append(len(sampler))
        got = list(sampler)
        assert got == batches
        assert all(type(i) is int for batch in got for i in batch)
    assert lengths == [len(batches) for batches in expected]


@pytest.mark.parametrize("tail", ["keep", "wrap"])
def test_a_users_order(tail):
    sampler = PrefetchingSampler(13, batch_size=4, seed=3, tail=tail, order=curriculum)
    expected = epochs_of(13, 4, 6, tail=tail, seed=3, order=curriculum)
    for batches in expected:
        assert len(sampler) == len(batches)
        assert list(sampler) == batches
    jumped = PrefetchingSampler(13, batch_size=4, seed=3, tail=tail, order=curriculum)
    jumped.set_epoch(4)
    assert list(jumped) == expected[4]


def test_a_users_order_is_copied():
    mine = np.arange(6)
    sampler = PrefetchingSampler(6, batch_size=2, order=lambda epoch, rng: mine)
    iterator = iter(sampler)
    mine[:] = 0
    assert list(iterator) == [[0, 1], [2, 3], [4, 5]]


def test_no_global_random_state():
    np.random.seed(1)
    torch.manual_seed(1)
    before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    first = read(PrefetchingSampler(20, batch_size=4))
    assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    np.random.seed(2)
    assert read(PrefetchingSampler(20, batch_size=4)) == first


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_as_a_dataloaders_batch_sampler(num_workers, persistent):
    sampler = PrefetchingSampler(11, batch_size=4, seed=1, tail="wrap")
    loader = DataLoader(
        torch.arange(11),
        batch_sampler=sampler,
        num_workers=num_workers,
        persistent_workers=persistent,
    )
    expected = epochs_of(11, 4, 3, tail="wrap", seed=1)
    for batches in expected:
        assert len(loader) == len(batches)
        assert [batch.tolist() for batch in loader] == batches


def test_the_protocol_has_no_batch_size():
    sampler = PrefetchingSampler(list(range(10)), batch_size=4, tail="drop")
    assert isinstance(sampler, ResumableSampler)
    assert not hasattr(sampler, "batch_size"), "Accelerate would lose batches"
    assert sampler.state_dict()["num_examples"] == 10
    assert sampler.state_dict()["tail"] == "drop"
    assert len(sampler) == 2


def test_ten_million_examples_cost_two_arrays():
    """The order, and once more when the tail of the epoch before comes first; no Python list."""
    sampler = PrefetchingSampler(10**7, batch_size=1024, shuffle=False, tail="wrap")
    tracemalloc.start()
    sampler.set_epoch(1, step=3)
    assert len(next(iter(sampler))) == 1024
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 8 * 10**7 + 10**6
