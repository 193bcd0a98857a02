"""Layouts in a state that no run can have had: refused, and nothing is changed."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from tests.building import packed_sampler
from torch_collate_kit import PackedBatchSampler, ParallelLayout, PrefetchingSampler
from torch_collate_kit.errors import StateError


def packed() -> PackedBatchSampler:
    return packed_sampler(
        [3, 1, 4, 2, 5, 3], batch_size=2, max_tokens=8, parallel=ParallelLayout(dp=2)
    )


BAD: dict[str, list[Any]] = {
    "max_tokens": [None, 0, "8", np.arange(2)],
    "strategy": ["x", [1]],
    "align": [-1, 1.5],
    "overflow": [None],
    "balance": [3],
    "max_sequences_per_row": [-1],
    "max_patches": ["x"],
    "cost": [None, [1], ["a", "b", "c", "d"], np.int64(3)],
    "dummy_image_tokens": [-1],
    "rows_multiple_of": [3, True],  # 2 ranks do not divide 3
    "image_costs_digest": [3, ["a"]],
}


@pytest.mark.parametrize(("key", "value"), [(key, bad) for key in BAD for bad in BAD[key]], ids=str)
def test_a_packing_that_cannot_have_been_is_refused(key: str, value: Any) -> None:
    sampler = packed()
    state = copy.deepcopy(sampler.state_at(0, 1))
    state["layout"][key] = value
    before = sampler.state_dict()
    with pytest.raises(StateError, match="a layout that no run can have had"):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == before


@pytest.mark.parametrize("key", sorted(packed().state_at(0, 1)["layout"]))
def test_a_packing_without_one_of_its_options_is_refused(key: str) -> None:
    sampler = packed()
    state = copy.deepcopy(sampler.state_at(0, 1))
    del state["layout"][key]
    with pytest.raises(StateError, match="state has layout="):
        sampler.load_state_dict(state)


@pytest.mark.parametrize("overflow", ["drop", "truncate"])
def test_another_capacity_is_refused_where_it_would_drop_or_cut_other_examples(
    overflow: str,
) -> None:
    def make(max_tokens: int) -> PackedBatchSampler:
        options = {"batch_size": 3, "overflow": overflow, "shuffle": False}
        return packed_sampler([3, 9, 4, 2, 12, 3], max_tokens=max_tokens, **options)

    state = make(16).state_at(0, 1)
    other, loaded = make(8), make(12)
    with pytest.raises(StateError, match=r"max_tokens=16, .*has max_tokens=8, .* cuts other"):
        other.load_state_dict(state)
    assert other.state_dict() == make(8).state_dict()
    loaded.load_state_dict(state)
    assert sorted(next(iter(loaded)).indices) == [3, 4, 5]


def test_a_fingerprint_that_is_an_array_is_refused() -> None:
    class Data:
        def __len__(self) -> int:
            return 4

        def fingerprint(self, num_examples: int) -> str:
            return f"of {num_examples}"

    sampler = PrefetchingSampler(Data(), batch_size=2)
    with pytest.raises(StateError, match="fingerprint=array"):
        sampler.load_state_dict(sampler.state_dict() | {"fingerprint": np.arange(2)})
