"""What the samplers refuse, and in which words; a refused state changes nothing."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from tests.building import mixed_sampler
from tests.loading.seals import resealed
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading import PrefetchingSampler, TokenizedDataset


def order_of(indices):
    return {"order": lambda epoch, rng: indices}


BAD_ARGUMENTS = [
    ({"examples": 0}, ValueError, "examples must be at least 1, got 0; an empty dataset has no b"),
    ({"examples": []}, ValueError, "len(examples) must be at least 1, got 0; an empty dataset"),
    ({"examples": iter([1])}, TypeError, "of type list_iterator; for a stream use an iterable da"),
    ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
    (
        {"batch_size": 3, "dp_rank": 0, "dp_size": 4},
        ValueError,
        "batch_size counts the examples of all ranks a",
    ),
    ({"dp_rank": 0, "dp_size": 0}, ValueError, "dp_size must be at least 1, got 0"),
    ({"dp_size": 2}, TypeError, "pass both dp_rank and dp_size, or neither for those of torch.di"),
    ({"dp_rank": 1}, TypeError, "those of torch.distributed; got dp_rank=1, dp_size=None"),
    ({"dp_rank": 2, "dp_size": 2}, ValueError, "dp_rank must be below dp_size=2, got 2; ranks co"),
    ({"seed": 2**32}, ValueError, "seed must be at most 4294967295, got 4294967296; take it"),
    ({"shuffle": 1}, TypeError, "shuffle must be True or False, got 1"),
    ({"tail": "pad"}, ValueError, "tail must be one of 'keep', 'drop', 'wrap'; got 'pad'"),
    (
        {"examples": 9, "batch_size": 4, "dp_rank": 0, "dp_size": 2},
        ValueError,
        "epoch 0 ends with a batch of 1",
    ),
    (
        {"examples": 3, "batch_size": 4, "tail": "drop"},
        ValueError,
        "epoch 0 has 3 examples, fewer than batch_size=4, and tail='drop' leaves no step; "
        "lower batch_size, or use tail='keep' or 'wrap'",
    ),
    ({"order": [1, 2]}, TypeError, "order must be a function of (epoch, rng), got [1, 2]"),
    (order_of([]), ValueError, "order(epoch=0, rng) returned no index; an epoch needs at least"),
    (order_of(np.ones(10, dtype=bool)), TypeError, "order(epoch=0, rng) must return ints, got"),
    (order_of([0, 10, 3]), ValueError, "order(epoch=0, rng)[1] is 10, but the 10 examples have"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_ARGUMENTS)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        PrefetchingSampler(**{"examples": 10, "batch_size": 4, **options})


BAD_POSITIONS = [
    ((-1,), {}, ValueError, "epoch must be at least 0, got -1"),
    ((1,), {"step": 4}, ValueError, "step must be at most 3, the number of steps of epoch 1; got"),
]


@pytest.mark.parametrize(("args", "options", "error", "message"), BAD_POSITIONS)
def test_bad_positions(args, options, error, message):
    sampler = PrefetchingSampler(10, batch_size=4)
    sampler.set_epoch(2, step=1)
    before = sampler.state_dict()
    with pytest.raises(error, match=re.escape(message)):
        sampler.set_epoch(*args, **options)
    with pytest.raises(error, match=re.escape(message)):
        sampler.state_at(*args, options.get("step", 0))
    assert sampler.state_dict() == before


def test_a_later_epochs_order_is_checked_before_anything_moves():
    orders = [np.arange(10), np.arange(9)]
    sampler = PrefetchingSampler(
        10, batch_size=4, order=lambda epoch, rng: orders[epoch], dp_rank=0, dp_size=2
    )
    before = sampler.state_dict()
    with pytest.raises(ValueError, match="epoch 1 ends with a batch of 1 examples, fewer than"):
        sampler.set_epoch(1)
    assert sampler.state_dict() == before
    assert sum(map(len, iter(sampler))) == 5  # list(sampler) asks for epoch 1's length as well
    with pytest.raises(ValueError, match="epoch 1 ends with a batch of 1 examples"):
        iter(sampler)


def prefetching(**options):
    return PrefetchingSampler(**{"examples": 10, "batch_size": 4, "tail": "wrap", **options})


def mixed(**options):
    return mixed_sampler(**{"sources": [6, 4], "batch_size": 4, **options})


WAY_OUT = "build the sampler with the arguments of the saved run, or start without the state"
FROM_STATE = "pass what state_dict() gave"
OTHER_RUNS = [
    (
        prefetching,
        {"examples": 11},
        "state is of 11 examples, the data has 10; examples were taken away; " + WAY_OUT,
    ),
    (prefetching, {"examples": 9}, "state is of 9 examples, the data has 10; another number has"),
    (prefetching, {"tail": "drop"}, "tail='drop', this sampler has tail='wrap'; " + WAY_OUT),
    (prefetching, order_of([1, 2, 3, 4]), "custom_order=True, this sampler has custom_order=False"),
    (
        prefetching,
        {"seed": 1, "batch_size": 5},
        "state is of batch_size=5, seed=1, this sampler has batch_size=4, seed=0; " + WAY_OUT,
    ),
    (mixed, {"sources": [10, 6]}, "sizes=[10, 6], stages=[[0, ['10', '6']]], this sampler has"),
    (mixed, {"weights": [0.9, 0.1]}, "stages=[[0, ['9/10', '1/10']]], this sampler has stages="),
    (mixed, {"max_passes": 3}, "max_passes=['3', '3'], this sampler has max_passes=[None, None]"),
    (mixed, {"stop": "all_exhausted"}, "stop='all_exhausted', this sampler has stop='first_"),
    (mixed, {"sources": [np.ones(10, int), np.ones(5, int)], "by": "tokens"}, "by='tokens'"),
]


def check_refused(make, state, message):
    """The state is refused in these words, and the sampler is as it was."""
    sampler = make()
    sampler.set_epoch(2, step=1)  # not where any of the states is
    if make is prefetching:
        sampler.reshuffle()
    before = json.dumps(sampler.state_dict())
    with pytest.raises(StateError, match=re.escape(message)):
        sampler.load_state_dict(state)
    assert json.dumps(sampler.state_dict()) == before
    fresh = make()
    fresh.load_state_dict(json.loads(before))
    assert [list(sampler), list(sampler)] == [list(fresh), list(fresh)]


ROWS = [{"input_ids": [i + 1, 7]} for i in range(40)]
EDITED = {
    "none": ROWS,
    "ids": [{"input_ids": [9, 9]}, *ROWS[1:]],
    "order": ROWS[::-1],
    "lengths": [{"input_ids": [1]}, {"input_ids": [2, 7, 7]}, *ROWS[2:]],
}


@pytest.mark.parametrize("by", ["examples", "tokens"])
@pytest.mark.parametrize("kind", EDITED)
def test_the_state_of_a_mixture_of_other_data(by, kind):
    def make(rows):
        return mixed_sampler([TokenizedDataset(rows), TokenizedDataset(ROWS)], batch_size=4, by=by)

    state = json.loads(json.dumps(make(ROWS).state_at(1, 2)))
    unknown = mixed_sampler([np.full(40, 2)] * 2, batch_size=4, by=by)
    unknown.load_state_dict(state)
    other = make(EDITED[kind])
    if kind != "lengths":  # which are known by tokens
        other.load_state_dict(unknown.state_at(1, 2))
    if kind == "none":
        other.load_state_dict(state)
    else:
        with pytest.raises(StateError, match=r"^state is of .*sources=.*, this sampler has "):
            other.load_state_dict(state)


@pytest.mark.parametrize(("make", "options", "message"), OTHER_RUNS)
def test_the_state_of_another_run(make, options, message):
    check_refused(make, make(**options).state_at(1, 0), message)


NO_STATES = [
    ({"version": 2}, "the state has version 2, this release reads version 5; pass what state_dict"),
    ({"version": np.arange(2)}, "the state has version array([0, 1]), this release reads version"),
    ({"seed": 1}, "state is of seed=1, this sampler has seed=0"),
    ({"more": 1}, "state of another kind: keys missing [], unknown ['more']; " + FROM_STATE[:5]),
    ({"step": 3}, f"state is of step 3, but epoch 1 has 3 steps; {WAY_OUT}"),
    ({"batch_size": 4.0}, "state is of batch_size=4.0, this sampler has batch_size=4"),
    ({"seed": False}, "state is of seed=False, this sampler has seed=0"),
]


@pytest.mark.parametrize("make", [prefetching, mixed])
@pytest.mark.parametrize(("change", "message"), NO_STATES)
def test_what_is_no_state(make, change, message):
    state = make().state_at(1, 1)
    state = {**state, **change} if "version" in change else resealed(state, **change)
    check_refused(make, state, message)


TAKEN = [
    (None, f"state has taken=None, not a list of counts; {FROM_STATE}"),
    ([17, -1], "state has taken=[17, -1], not a list of counts"),
    ([11], "state has taken=[11], of another mixture"),
]
