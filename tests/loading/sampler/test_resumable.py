"""Stopping anywhere and going on: states, jumps, reshuffles."""

from __future__ import annotations

import json

import pytest

from tests.loading.sampler.sampler_oracle import curriculum, epochs_of, flat, read
from torch_collate_kit.loading import PrefetchingSampler

CASES = {
    "keep": {"tail": "keep"},
    "drop": {"tail": "drop"},
    "wrap": {"tail": "wrap"},
    "in order": {"tail": "wrap", "shuffle": False},
    "order": {"tail": "keep", "order": curriculum},
    "order, wrap": {"tail": "wrap", "order": curriculum},
    "two ranks": {"examples": 14, "tail": "keep", "dp_rank": 1, "dp_size": 2},
    "four ranks, wrap": {"tail": "wrap", "dp_rank": 2, "dp_size": 4},
}


@pytest.mark.parametrize("case", CASES)
def test_resume_at_every_step(case):
    """A fresh sampler with the state goes on as the unstopped one, by the live state too."""

    def make():
        return PrefetchingSampler(**{"examples": 13, "batch_size": 4, "seed": 9, **CASES[case]})

    whole = read(make(), 5)
    saver = make()
    for epoch in range(3):
        for step in range(len(whole[epoch]) + 1):
            state = json.loads(json.dumps(saver.state_at(epoch, step)))
            resumed = make()
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            if (resumed.epoch, state["step"]) == (epoch + 1, 0):
                assert step == len(whole[epoch])
                assert read(resumed, 2) == whole[epoch + 1 : epoch + 3]
            else:
                assert resumed.epoch == epoch
                assert len(resumed) == len(whole[epoch])
                assert read(resumed, 2) == [whole[epoch][step:], whole[epoch + 1]]


def test_the_state_is_small_and_complete():
    sampler = PrefetchingSampler(10**7, batch_size=64, seed=4, tail="wrap", dp_rank=0, dp_size=2)
    state = sampler.state_at(3, 17)
    del state["checksum"]
    assert state == {
        "version": 5,
        "epoch": 3,
        "step": 17,
        "num_examples": 10**7,
        "reshuffles": [],
        "fingerprint": None,
        "batch_size": 64,
        "seed": 4,
        "tail": "wrap",
        "shuffle": True,
        "custom_order": False,
        "layout": {"dp_size": 2},
    }


def test_iter_begins_an_epoch_and_abandons_the_one_before():
    sampler = PrefetchingSampler(8, batch_size=2, seed=1)
    whole = epochs_of(8, 2, 3, tail="keep", seed=1)
    first = iter(sampler)
    assert sampler.epoch == 1
    assert next(first) == whole[0][0]
    assert sampler.state_dict() == sampler.state_at(1, 0)
    assert next(iter(sampler)) == whole[1][0]
    assert list(first) == whole[0][1:], "what an iterator yields is fixed when it is made"
    assert list(sampler) == whole[2]


RESHUFFLED = {
    "keep": (13, {"tail": "keep"}),
    "drop": (13, {"tail": "drop"}),
    "wrap": (13, {"tail": "wrap"}),
    "wrap, epochs without a step": (3, {"tail": "wrap"}),
    "in order": (13, {"tail": "wrap", "shuffle": False}),
    "order, wrap": (13, {"tail": "wrap", "order": curriculum}),
}


@pytest.mark.parametrize("case", RESHUFFLED)
def test_reshuffle_at_every_step_and_resume_at_every_step_after(case):
    n, options = RESHUFFLED[case]

    def make():
        return PrefetchingSampler(n, batch_size=4, seed=9, **options)

    lengths = [len(batches) for batches in epochs_of(n, 4, 5, **{"seed": 9, **options})]
    for epoch in range(2):
        for step in range(max(lengths[epoch], 1)):
            live = make()
            live.set_epoch(epoch, step=step)
            live.reshuffle()
            at = [(epoch, step)]
            whole = epochs_of(n, 4, 5, **{"seed": 9, **options}, reshuffles=at)
            for e in range(epoch, 3):
                assert list(live) == whole[e][step if e == epoch else 0 :]
                for k in range(step if e == epoch else 0, lengths[e] + 1):
                    resumed = make()
                    resumed.load_state_dict(json.loads(json.dumps(live.state_at(e, k))))
                    got = read(resumed, 5 - resumed.epoch)
                    assert flat(got) == flat([whole[e][k:], *whole[e + 1 :]])


def test_several_reshuffles_of_an_epoch():
    at = [(0, 1), (0, 1), (0, 2), (1, 0), (1, 2)]
    whole = epochs_of(17, 4, 3, tail="wrap", seed=2, reshuffles=at)
    sampler = PrefetchingSampler(17, batch_size=4, seed=2, tail="wrap")
    steps = []
    for epoch in range(3):
        for step in range(len(whole[epoch])):
            sampler.set_epoch(epoch, step=step)
            for _ in range(at.count((epoch, step))):
                sampler.reshuffle()
            steps.append(next(iter(sampler)))
    assert steps == flat(whole)
    assert sorted(flat(steps)[:17]) == sorted(flat(steps)[17:34]) == list(range(17))
    assert whole[0] != epochs_of(17, 4, 1, tail="wrap", seed=2)[0]


def test_a_jump_back_forgets_the_reshuffles_after_it():
    sampler = PrefetchingSampler(12, batch_size=4, seed=2)
    sampler.set_epoch(0, step=1)
    sampler.reshuffle()
    assert sampler.state_dict()["reshuffles"] == [[0, 1, 4]]
    sampler.set_epoch(0)
    assert sampler.state_dict()["reshuffles"] == []
    assert list(sampler) == epochs_of(12, 4, 1, tail="keep", seed=2)[0]


def test_reshuffle_makes_an_undrawn_iterator_stale():
    sampler = PrefetchingSampler(12, batch_size=4, seed=2)
    stale = iter(sampler)
    sampler.reshuffle()
    assert sampler.epoch == 0
    assert list(sampler) == epochs_of(12, 4, 1, tail="keep", seed=2, reshuffles=[(0, 0)])[0]
    assert list(stale) == epochs_of(12, 4, 1, tail="keep", seed=2)[0]
