"""Orders that are computed: permutations, uniform enough, inverted, and as cheap as promised."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.building import mixed_sampler, packed_sampler
from torch_collate_kit import PrefetchingSampler
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.orders.order import (
    ArrayOrder,
    EpochOrder,
    KeyedOrder,
    KeyedPermutation,
)
from torch_collate_kit.testing import assert_exact_resume

MASK = 2**64 - 1


def mixed_word(word: int) -> int:
    """SplitMix64's finalizer on a Python int."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def index_at(position: int, size: int, *words: int) -> int:
    """One index, in Python ints."""
    num_bits = max(2, (size - 1).bit_length())
    num_low = num_bits // 2
    keys = np.random.SeedSequence(words).generate_state(12, np.uint64).tolist()
    while True:
        left, right, widths = (
            position >> num_low,
            position % 2**num_low,
            (num_bits - num_low, num_low),
        )
        for key in keys:
            left, right = right, left ^ (mixed_word(right ^ key) % 2 ** widths[0])
            widths = widths[::-1]
        position = left * 2**num_low + right
        if position < size:
            return position


@given(st.integers(1, 5000), st.integers(0, 2**32 - 1), st.integers(0, 9))
def test_it_is_the_permutation_of_the_papers(size: int, seed: int, epoch: int) -> None:
    permutation = KeyedPermutation(size, seed, epoch)
    shuffled = permutation(np.arange(size))
    assert np.array_equal(np.sort(shuffled), np.arange(size))
    assert np.array_equal(permutation.inverse(shuffled), np.arange(size))
    for position in {0, size // 2, size - 1}:
        assert shuffled[position] == index_at(position, size, seed, epoch)


@pytest.mark.parametrize("size", [2**31 - 1, 10**9, 2**40 + 3])
def test_large_sizes_are_inverted(size: int) -> None:
    positions = np.random.default_rng(0).integers(0, size, 1000)
    permutation = KeyedPermutation(size, 4)
    indices = permutation(positions)
    assert indices.min() >= 0
    assert indices.max() < size
    assert np.array_equal(permutation.inverse(indices), positions)
    assert len(np.unique(indices)) == len(np.unique(positions))
    assert abs(indices.mean() / size - 0.5) < 0.05


@pytest.mark.parametrize("size", [3, 4, 5])
def test_all_permutations_of_few_examples_are_as_likely(size: int) -> None:
    num_keys = 60 * math.factorial(size)
    counts = Counter(tuple(KeyedPermutation(size, key)(np.arange(size))) for key in range(num_keys))
    freedom = math.factorial(size) - 1
    chi_squared = sum((n - 60) ** 2 / 60 for n in counts.values())
    chi_squared += 60 * (math.factorial(size) - len(counts))
    assert chi_squared < freedom + 5 * math.sqrt(2 * freedom)


def test_neighbours_are_apart_and_epochs_differ() -> None:
    size = 4096
    first, second = (KeyedPermutation(size, 1, epoch)(np.arange(size)) for epoch in (0, 1))
    for order in (first, second, second[np.argsort(first)]):
        gaps = np.abs(np.diff(order))
        assert abs(gaps.mean() / size - 1 / 3) < 0.02, "as of a random order"
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.06
    assert (first == second).sum() < 12


def of_kind(kind: str, size: int, done: list[int]) -> EpochOrder:
    if kind == "keyed":
        return KeyedOrder(size, (5, 1), reshuffled_after=done)
    return ArrayOrder(np.random.default_rng(1).permutation(size), (5, 1), reshuffled_after=done)


@pytest.mark.parametrize("kind", ["array", "keyed"])
@given(st.integers(1, 40), st.lists(st.integers(0, 40), max_size=3), st.data())
def test_reshuffles_keep_what_is_done(kind: str, size: int, done: list[int], data: Any) -> None:
    done = [min(n, size) for n in sorted(done)]
    order, before = of_kind(kind, size, done), of_kind(kind, size, done[:-1])
    indices = order.take(0, size)
    assert sorted(indices) == list(range(size))
    if done:
        assert np.array_equal(indices[: done[-1]], before.take(0, done[-1]))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size + 3))
    assert np.array_equal(order.take(start, stop), indices[start:stop])
    assert [order.places(int(i)) for i in indices] == [[place] for place in range(size)]


MAKERS = {
    "prefetching": lambda **o: PrefetchingSampler(23, batch_size=4, tail="wrap", **o),
    "packed": lambda **o: packed_sampler(np.arange(1, 24), batch_size=4, max_tokens=30, **o),
    "mixed": lambda **o: mixed_sampler([20, 3], batch_size=4, weights=[0.5, 0.5], **o),
}


@pytest.mark.parametrize("name", MAKERS)
def test_samplers_resume_and_cover_their_epochs(name: str) -> None:
    make = MAKERS[name]
    assert_exact_resume(lambda: make(shuffle="keyed", seed=3), num_steps=14)
    sampler = make(shuffle="keyed", seed=3)
    assert "shuffle='keyed'" in repr(sampler)
    with pytest.raises(
        StateError, match="state is of shuffle=True, this sampler has shuffle='keyed'"
    ):
        sampler.load_state_dict(make(seed=3).state_dict())
    if name == "packed":
        assert sorted(i for part in sampler for i in part.indices) == list(range(23))
    with pytest.raises(ValueError, match=r"^shuffle must be True, False or 'keyed', got 'random'$"):
        make(shuffle="random")


def test_a_billion_examples_take_no_memory() -> None:
    tracemalloc.start()
    sampler = PrefetchingSampler(10**9, batch_size=4096, shuffle="keyed", dp_rank=0, dp_size=8)
    first = next(iter(sampler))
    sampler.set_epoch(3, step=200_000)
    sampler.reshuffle()
    batch = next(iter(sampler))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len({*first, *batch}) == 1024
    assert peak < 4e6


@pytest.mark.parametrize("kind", ["array", "keyed"])
def test_each_reshuffle_is_another_one(kind: str) -> None:
    orders = [of_kind(kind, 40, [8] * count).take(0, 40).tolist() for count in range(4)]
    assert len({tuple(order) for order in orders}) == 4
    assert len({tuple(order[:8]) for order in orders}) == 1
    moves = [[before.index(i) for i in after] for before, after in itertools.pairwise(orders)]
    assert len({tuple(move) for move in moves}) == 3, "and another move each time"
