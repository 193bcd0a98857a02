"""States of very many sources or reshuffles: within 4 KB, and as exact as short ones."""

from __future__ import annotations

import base64
import json
import time
import zlib
from typing import Any

import numpy as np
import pytest

from torch_collate_kit import MixedSampler, PrefetchingSampler
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.sampler.states import text_of_ints

THOUSAND = np.random.default_rng(0).integers(40, 400, size=1000).tolist()
SIZES = THOUSAND[:50]
LENGTHS = [
    np.clip(np.random.default_rng(size).lognormal(6, 1, size), 1, 32_768).astype(int)
    for size in THOUSAND
]


def many(by: str, **options: Any) -> MixedSampler:
    given = {"sources": SIZES, "num_steps": 5, "seed": 2, **options}
    lengths = LENGTHS[: len(given["sources"])] if by == "tokens" else None
    return MixedSampler(batch_size=8, by=by, lengths=lengths, **given)


@pytest.mark.parametrize("by", ["examples", "tokens"])
def test_a_thousand_sources_and_fifty_changes_of_ranks(by: str) -> None:
    sampler, resumed = (many(by, sources=THOUSAND) for _ in range(2))
    sampler.set_epoch(1, step=2)
    for change in range(50):
        sampler._layouts.change((0, change), {"world_size": 1 + change % 7})
    state = json.dumps(sampler.state_dict())
    assert len(state) <= 4096
    resumed.load_state_dict(json.loads(state))
    assert list(resumed) == list(sampler)


def test_what_differs_is_named_where_values_are_many() -> None:
    state = json.loads(json.dumps(many("tokens").state_at(1, 2)))
    with pytest.raises(StateError, match=r"^state is of weights='50 values, digest \w{32}', th"):
        many("tokens", weights=[1] * 50).load_state_dict(state)
    fewer = many("tokens", sources=SIZES[:30])
    with pytest.raises(StateError, match=r"^state is of sizes='50 values, digest \w{32}', weig"):
        fewer.load_state_dict(state)
    with pytest.raises(StateError, match=r"this sampler has sizes='50 values, digest \w{32}', w"):
        many("tokens").load_state_dict(fewer.state_dict() | {"sizes": "30 values"})


@pytest.mark.parametrize("by", ["examples", "tokens"])
def test_a_state_that_lists_its_many_sources_loads(by: str) -> None:
    """States were like this once."""
    sampler = many(by)
    mixture = sampler._mixture
    place = sampler._place(1, 2)
    old = {
        **sampler.state_at(1, 2),
        "taken": list(place.taken),
        "sizes": SIZES,
        "weights": list(map(str, mixture.shares)),
        "num_units": mixture.num_units,
    }
    resumed = many(by)
    resumed.load_state_dict(json.loads(json.dumps(old)))
    sampler.set_epoch(1, step=2)
    assert list(resumed) == list(sampler)
    assert resumed.state_at(1, 2) == sampler.state_at(1, 2)
    old["sizes"] = [SIZES[0] + 1, *SIZES[1:]]
    with pytest.raises(StateError, match=r"^state is of sizes=\["):
        resumed.load_state_dict(old)


def damaged(by: str) -> dict[str, str]:
    sampler = many(by)
    ahead = sampler._mixture.ahead(sampler._place(1, 2))
    apart = [ahead[0], ahead[1] + 40_000, ahead[2] - 40_000, *ahead[3:]]
    return {
        "no text of numbers": "7" * 80,
        "not ASCII": "\N{SNOWMAN}",
        "too few": text_of_ints(ahead[:-1]),
        "too many": text_of_ints([*ahead, 0]),
        "of another step": text_of_ints(sampler._mixture.ahead(sampler._place(1, 3))),
        "below 0": text_of_ints([-1, *ahead[1:]]),
        "far too many": text_of_ints([2**62, *ahead[1:]]),
        "not fair": text_of_ints(apart),
        "not whole examples": text_of_ints([ahead[0] + 1, *ahead[1:]]),
    }


@pytest.mark.parametrize("by", ["examples", "tokens"])
@pytest.mark.parametrize("kind", damaged("examples"))
def test_damaged_counts_are_refused(by: str, kind: str) -> None:
    state = many(by).state_at(1, 2) | {"taken": damaged(by)[kind]}
    sampler = many(by)
    before = list(sampler.replay(sampler.state_dict()))
    with pytest.raises(StateError, match=r"^state has taken='"):
        sampler.load_state_dict(state)
    assert list(sampler) == before


def test_a_refused_state_leaves_no_trace() -> None:
    """Of two faults the second is found later, when the counts were thought to be right."""
    options = {"by": "tokens", "lengths": [[1, 9, 2, 8], [5, 3, 4, 6]], "num_steps": 9}
    sampler, other = (MixedSampler([4, 4], 2, **options) for _ in range(2))
    state = sampler.state_at(0, 3)
    state["taken"] = [state["taken"][0] + 1, state["taken"][1] - 1]
    with pytest.raises(StateError, match="not a list of"):
        MixedSampler([4, 4], 2, **options).load_state_dict(state | {"layouts": []})
    fresh = MixedSampler([4, 4], 2, **options)
    with pytest.raises(StateError, match="state has layouts="):
        fresh.load_state_dict(state | {"layouts": []})
    fresh.set_epoch(0, step=3)
    assert list(fresh) == list(other)[3:]


@pytest.mark.parametrize(
    ("num_reshuffles", "is_listed"), [(100, True), (101, False), (4000, False)]
)
def test_thousands_of_reshuffles_of_one_epoch(num_reshuffles: int, is_listed: bool) -> None:
    def make() -> PrefetchingSampler:
        return PrefetchingSampler(20_000, 4, shuffle="keyed", seed=1)

    sampler = make()
    sampler._reshuffles = [(3, step) for step in range(1, num_reshuffles)]
    sampler.set_epoch(3, step=num_reshuffles)
    sampler.reshuffle()
    state = json.loads(json.dumps(sampler.state_at(3, 4990)))
    assert isinstance(state["reshuffles"], list) == is_listed
    assert len(json.dumps(state)) <= 4096
    resumed = make()
    resumed.load_state_dict(state)
    assert resumed.state_at(3, 4990) == state
    assert resumed._reshuffles == [(3, step) for step in range(1, num_reshuffles + 1)]
    if num_reshuffles < 4000:
        assert list(resumed) == list(sampler)[-10:]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([0, 1, 0], r"^state has reshuffles='.*', which cannot be read; pass what state_dict"),
        (text_of_ints([0, 1])[:-5], r"^state has reshuffles='.*', which cannot be read; pass what"),
        ([0, -1], r"^state has a reshuffle's step=-1, not an int between 0"),
        ([0, 9], r"^state has reshuffles at \[\[0, 9\]\], which cannot all lie, in order, before"),
    ],
)
def test_damaged_reshuffles_are_refused(numbers: Any, message: str) -> None:
    sampler = PrefetchingSampler(40, 4)
    text = numbers if isinstance(numbers, str) else text_of_ints(numbers)
    state = sampler.state_at(0, 3) | {"reshuffles": text}
    with pytest.raises(StateError, match=message):
        sampler.load_state_dict(state)


def test_a_text_that_unpacks_to_many_megabytes_is_refused_at_once() -> None:
    bomb = base64.b85encode(zlib.compress(bytes(2**26), 9)).decode()
    assert len(bomb) < 100_000
    states = [
        (PrefetchingSampler(40, 4), {"reshuffles": bomb}),
        (many("tokens"), {"taken": bomb}),
    ]
    for sampler, damage in states:
        message = f"state has {next(iter(damage))}, a text that unpacks to 2097152 bytes or more"
        began = time.perf_counter()
        with pytest.raises(StateError, match=message):
            sampler.load_state_dict(sampler.state_at(0, 3) | damage)
        assert time.perf_counter() - began < 1
