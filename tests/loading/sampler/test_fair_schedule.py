"""Jumps over a mixture's picks: the place that the picks come to, from anywhere, and at once."""

from __future__ import annotations

import time
from fractions import Fraction
from typing import Any

import numpy as np
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


def counted_picks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by the number of picks of every call."""
    counts: list[int] = []
    picks = Mixture.picks

    def counted(mixture: Mixture, place: Any, count: int) -> Any:
        counts.append(count)
        return picks(mixture, place, count)

    monkeypatch.setattr(Mixture, "picks", counted)
    return counts


def test_a_resumed_run_does_not_pick_again_what_was_picked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By tokens a state costs the picks since the last known place, and loading one costs none."""

    def make() -> MixedSampler:
        lengths = [np.arange(1, 41), np.arange(5, 75)]
        return MixedSampler([40, 70], batch_size=8, by="tokens", lengths=lengths, num_steps=3000)

    sampler, resumed = make(), make()
    list(sampler)
    resumed.load_state_dict(sampler.state_at(0, 2999))
    count = counted_picks(monkeypatch)
    assert len(list(resumed)) == 1
    assert count == [8]
    assert sampler.state_at(0, 2990)["step"] == 2990
    assert 8 < sum(count) <= 8 + 4096
