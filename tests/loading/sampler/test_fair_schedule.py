"""Jumps over a mixture's picks: the place that the picks come to, from anywhere, and at once."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_collate_kit import MixedSampler
from torch_collate_kit.loading.sampler.mixture import Mixture


def mixture_of(weights: list[int]) -> Mixture:
    exact = [Fraction(weight) for weight in weights]
    return Mixture([1] * len(weights), exact, [], seed=0, shuffle=False)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.one_of(st.integers(1, 9), st.integers(1, 2000)), min_size=1, max_size=9),
    st.sampled_from([1, 10**12 + 7, 10**20 + 39]),  # beyond int64, too
    st.integers(0, 400),
    st.integers(0, 400),
)
def test_a_jump_comes_to_where_the_picks_come(
    weights: list[int], scale: int, first: int, count: int
) -> None:
    weights = [weight * scale + i for i, weight in enumerate(weights)]
    mixture = mixture_of(weights)
    start = mixture.place([0] * len(weights))
    before = mixture.picks(start, first)[1]
    after = mixture.picks(before, count)[1]
    assert mixture.after(before, first + count) == after
    assert mixture.after(start, first + count) == after


def test_a_jump_of_two_sources_by_hand() -> None:
    mixture = mixture_of([3, 1])
    assert mixture.after(mixture.place([0, 0]), 6).taken == (5, 1)


def test_a_jump_to_each_place_of_a_rare_source() -> None:
    """Its one example is taken somewhere in 3,000 others, which only the others decide."""
    mixture = mixture_of([1, 700, 1300, 999])
    start = mixture.place([0] * 4)
    place, taken = start, set()
    for num_taken in range(1, 3001, 7):
        place = mixture.picks(place, num_taken - place.num_taken)[1]
        assert mixture.after(start, num_taken) == place
        taken.add(place.taken[0])
    assert taken == {0, 1}


@pytest.mark.parametrize("weights", [[0.7, 0.25, 0.05], [0.123456, 1 / 3, 7, 0.001]])
def test_any_step_of_a_mixture_of_many_examples_is_found_at_once(weights: list[float]) -> None:
    sampler = MixedSampler(
        [10**8] * len(weights), batch_size=512, weights=weights, shuffle="keyed", seed=3
    )
    step = len(sampler) - 7
    assert step > 195_000, "1e8 examples"
    began = time.perf_counter()
    batch = sampler.examples(0, step)
    assert time.perf_counter() - began < 1, "about 10 ms on a quiet machine"
    sampler.set_epoch(0, step=step - 1)
    following = [*sampler][1]
    assert following == batch.tolist()
    assert sampler.when(following[3], 0) == [(0, step)]
