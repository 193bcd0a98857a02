"""Mixing: proportions at every prefix, no repeats within a turn, resume at every step."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest

from tests.loading.sampler.sampler_oracle import flat, generator, read
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading import MixedSampler

LENGTHS = [[5, 9, 2, 40], [3] * 7, [1, 30, 1, 30, 8]]
WEIGHTS = [[0.5, 0.3, 0.2], [1, 1, 1], [0.9, 0.09, 0.01], [1 / 3, 0.123456, 7], [100, 1, 1]]


def source_of(index, sizes):
    ends = np.cumsum(sizes)
    source = int(np.searchsorted(ends, index, side="right"))
    return source, index - int(ends[source] - sizes[source])


def picks_of(sampler, sizes, num_epochs=3):
    return [source_of(index, sizes) for index in flat(flat(read(sampler, num_epochs)))]


def oracle(sizes, weights, lengths, num_picks, *, seed):
    """The rule in exact fractions: due first among those not ahead by a whole example."""
    shares = [Fraction(str(weight)) for weight in weights]
    shares = [share / sum(shares) for share in shares]
    orders = [[] for _ in sizes]
    taken, used, picks = [0] * len(sizes), [0] * len(sizes), []
    for _ in range(num_picks):
        due = []
        for i, share in enumerate(shares):
            if taken[i] == len(orders[i]):
                orders[i] += generator(seed, i, taken[i] // sizes[i]).permutation(sizes[i]).tolist()
            cost = lengths[i][orders[i][taken[i]]] if lengths else 1
            if used[i] < share * (sum(used) + cost):
                due.append(((used[i] + cost) / share, i, cost))
        _, i, cost = min(due)
        picks.append((i, orders[i][taken[i]]))
        taken[i] += 1
        used[i] += cost
    return picks


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("by", ["examples", "tokens"])
def test_picks_are_those_of_the_loops(weights, by):
    lengths = LENGTHS if by == "tokens" else None
    sampler = MixedSampler(
        [4, 7, 5], batch_size=6, weights=weights, by=by, lengths=lengths, num_steps=7, seed=3
    )
    expected = oracle([4, 7, 5], weights, lengths, 3 * 7 * 6, seed=3)
    assert picks_of(sampler, [4, 7, 5]) == expected


def test_written_out_by_hand():
    sampler = MixedSampler([3, 2], batch_size=4, weights=[1, 1], shuffle=False, num_steps=2)
    assert read(sampler, 2) == [[[0, 3, 1, 4], [2, 3, 0, 4]], [[1, 3, 2, 4], [0, 3, 1, 4]]]
    lengths = [[10, 10], [5, 5]]  # due at 20, 40 and at 10, 20, 30, 40 tokens of both
    sampler = MixedSampler(
        [2, 2],
        batch_size=6,
        weights=[1, 1],
        by="tokens",
        lengths=lengths,
        shuffle=False,
        num_steps=1,
    )
    assert list(sampler) == [[2, 0, 3, 2, 1, 3]]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("size", [1, 4])
def test_stop_is_exact_in_the_first_epoch(weights, size):
    """ "first" repeats no example and would with one more step; "all" leaves none out."""
    sizes = [20, 30, 90]
    first, last = (
        MixedSampler(sizes, batch_size=size, weights=weights, stop=s) for s in ("first", "all")
    )
    num_first, num_all = len(first), len(last)
    picks = picks_of(first, sizes, 1)
    assert len(picks) == num_first * size == len(set(picks))
    whole = picks_of(last, sizes, 1)
    assert len(whole) == num_all * size
    assert len(set(whole)) == sum(sizes)
    assert whole[: len(picks)] == picks
    longer = whole[: len(picks) + size + int(sum(weights) / min(weights))]
    assert len(set(longer)) < len(longer) or len(longer) == len(whole)
    shares = np.array(weights) / sum(weights)
    per_epoch = (np.array(sizes) / shares).min()
    first.set_epoch(20)
    assert abs(sum(_length(first, e) for e in range(20)) - 20 * per_epoch / size) <= 1


def _length(sampler, epoch):
    sampler.set_epoch(epoch)
    return len(sampler)


CASES = {
    "examples": {"num_steps": 4, "weights": [0.5, 0.3, 0.2]},
    "tokens": {"num_steps": 4, "by": "tokens", "lengths": LENGTHS},
    "first": {"stop": "first", "weights": [0.2, 0.3, 0.5]},
    "all": {"stop": "all", "weights": [1, 1, 1], "by": "tokens", "lengths": LENGTHS},
    "in order": {"num_steps": 3, "shuffle": False},
    "one of two ranks": {"num_steps": 4, "dp_rank": 1, "dp_size": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_resume_at_every_step(case, monkeypatch):
    monkeypatch.setattr("torch_collate_kit.loading.sampler.mixed._PICKS_PER_PLACE", 8)

    def make():
        return MixedSampler([4, 7, 5], batch_size=4, seed=2, **CASES[case])

    whole = read(make(), 5)
    assert all(len(batches) > 1 for batches in whole)
    behind, cold = make(), make()
    read(behind, 4)
    for epoch in range(3):
        for step in range(len(whole[epoch]) + 1):
            state = json.loads(json.dumps(behind.state_at(epoch, step)))
            assert state == cold.state_at(epoch, step)
            resumed = make()
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            got = read(resumed, 5 - resumed.epoch)
            assert flat(got) == flat([whole[epoch][step:], *whole[epoch + 1 :]])
            jumped = make()
            jumped.set_epoch(epoch, step=step)
            assert flat(read(jumped, 5 - jumped.epoch)) == flat(got)


def test_the_state_is_small():
    sampler = MixedSampler([10**7, 300], batch_size=64, weights=[0.7, 0.3], num_steps=100)
    assert sampler.state_at(2, 5) == {
        "version": 3,
        "epoch": 2,
        "step": 5,
        "layout": {"dp_size": 1},
        "taken": [9184, 3936],
        "sizes": [10**7, 300],
        "weights": ["7/10", "3/10"],
        "by": "examples",
        "num_units": [10**7, 300],
        "fingerprints": [None, None],
        "lengths_digest": None,
        "num_steps": 100,
        "stop": None,
        "batch_size": 64,
        "seed": 0,
        "shuffle": True,
    }
    for name in ("sizes", "num_units", "fingerprints"):
        sampler.state_dict()[name].clear()
    assert sampler.state_at(2, 5)["sizes"] == [10**7, 300], "a state is a copy"


@pytest.mark.parametrize("other", [[[3, 1, 2], [4, 4]], [[1, 2, 3], [3, 5]]])
def test_a_state_of_other_lengths_with_the_same_sums_is_refused(other):
    def make(lengths: list[list[int]]) -> MixedSampler:
        return MixedSampler([3, 2], batch_size=2, by="tokens", lengths=lengths, num_steps=3)

    state = make([[1, 2, 3], [4, 4]]).state_dict()
    message = (
        r"^state is of lengths_digest='\w{32}', this sampler has lengths_digest='\w{32}'; build"
    )
    with pytest.raises(StateError, match=message):
        make(other).load_state_dict(state)
    make([[1, 2, 3], [4, 4]]).load_state_dict(state)


@pytest.mark.parametrize("seed", range(6))
def test_every_prefix_is_within_one_example_of_the_weights(seed):
    rng = np.random.default_rng(seed)
    num_sources = int(rng.integers(2, 12))
    weights = np.round(rng.dirichlet(np.full(num_sources, 0.5)) + 1e-3, 4)
    sizes = rng.integers(1, 50, num_sources).tolist()
    sampler = MixedSampler(sizes, batch_size=5, weights=weights, num_steps=100)
    sources = np.array([source for source, _ in picks_of(sampler, sizes, 1)])
    counts = np.cumsum(sources[:, None] == np.arange(num_sources), axis=0)
    shares = np.arange(1, 501)[:, None] * (weights / weights.sum())
    assert np.abs(counts - shares).max() < 1
    assert len(sources) == 500
