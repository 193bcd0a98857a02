"""Shards of context ranks: the cells of the oracle, and joined the batch they were cut from."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.batch_checks import assert_same_batch
from tests.strategies import FORMS, FUZZ, batches
from torch_collate_kit import (
    Batch,
    PackedCollator,
    PaddedCollator,
    ParallelLayout,
    PerExample,
    PerResponseToken,
    PerToken,
    RolloutCollator,
)

LAYOUTS = ("zigzag", "contiguous", "head_tail")
SIZES = (1, 2, 3, 4, 8, 16)
FIELDS = {
    "kind": PerToken(torch.int16, pad=-1),
    "top_ids": PerToken(torch.int32, pad=-7, shape=(2,)),
    "ref_logps": PerResponseToken(torch.float32, pad=0.5),
    "year": PerExample(torch.int64),
}
PADS = {"kind": -1, "top_ids": -7, "ref_logps": 0.5}


def with_fields(examples: list[dict[str, Any]], number: int = 100) -> list[dict[str, Any]]:
    """The examples with a value of every declared field, each its own."""
    found = []
    for i, example in enumerate(examples):
        tokens = range(i * number, i * number + len(example["input_ids"]))
        responses = example.get("num_actions", 0)
        more = {
            "kind": list(tokens),
            "top_ids": [[t, -t] for t in tokens],
            "ref_logps": [-0.5 * t for t in tokens][len(tokens) - responses :],
            "year": i,
        }
        found.append(example | more)
    return found


def fields_for(form: str) -> dict[str, Any]:
    """Response tokens are known where examples say how many they have."""
    return {name: of for name, of in FIELDS.items() if name != "ref_logps" or form == "num_actions"}


def as_oracle(batch: Batch) -> dict[str, Any]:
    """The batch in the form of the oracle, which the fuzz of collators compares it with."""
    return {k: v if isinstance(v, torch.Tensor) else v.tolist() for k, v in batch.items()}


def assert_shards(batch: Batch, size: int, layout: Any, pads: dict[str, float]) -> list[Batch]:
    expected_of = as_oracle(batch)
    shards = [batch.context_shard(rank, size, layout=layout) for rank in range(size)]
    for rank, shard in enumerate(shards):
        expected = oracle.context_shard(expected_of, rank, size, layout, pads)
        assert shard.cells.tolist() == expected.pop("cells")
        for name, values in expected.items():
            assert shard[name].dtype == values.dtype, name
            assert torch.equal(shard[name], values), (name, shard[name], values)
        others = {"year", "rollout_expert_indices"}
        assert {*shard} - others == {*expected}
        if "year" in batch:
            assert shard["year"] == batch["year"]
        assert shard.metadata["num_loss_tokens"] == batch.metadata["num_loss_tokens"]
        assert shard.num_cells == batch.num_cells // size
    cells = torch.cat([shard.cells for shard in shards])
    assert cells.sort().values.tolist() == list(range(batch.num_cells)), "not a partition"
    assert sum(shard.num_tokens for shard in shards) == batch.num_tokens
    return shards


@pytest.mark.parametrize("form", FORMS)
@settings(FUZZ, max_examples=settings().max_examples // 3)  # of every form
@given(data=st.data())
def test_packed_rows_are_those_of_the_oracle(form: str, data: st.DataObject) -> None:
    drawn = data.draw(batches(form, max_examples=6, columns=False))
    size, cut = data.draw(st.sampled_from(SIZES)), data.draw(st.sampled_from((1, 1, 2)))
    parallel = ParallelLayout(dp=data.draw(st.sampled_from((1, 2))), cp=size * cut)
    align = parallel.align
    room = -(-max(drawn.lengths) // align) * align * data.draw(st.integers(1, 4))
    collate = PackedCollator(
        9, max_tokens=room, parallel=parallel, fields=fields_for(form), train_all=form == "none"
    )
    batch = collate(with_fields(drawn.plain))
    for layout in LAYOUTS:
        assert_shards(batch, size, layout, PADS)


@FUZZ
@given(data=st.data())
def test_padded_rows_are_those_of_the_oracle(data: st.DataObject) -> None:
    drawn = data.draw(batches(max_examples=4, columns=False))
    size, side = data.draw(st.sampled_from(SIZES)), data.draw(st.sampled_from(("left", "right")))
    options = {
        "padding_side": side,
        "pad_to_multiple_of": 2 * size,
        "fields": fields_for(drawn.form),
    }
    batch = PaddedCollator(9, train_all=drawn.form == "none", **options)(with_fields(drawn.plain))
    for layout in LAYOUTS[1:]:
        assert_shards(batch, size, layout, PADS)


def rollouts(rng: np.random.Generator) -> list[dict[str, Any]]:
    found = []
    for _ in range(rng.integers(1, 5)):
        prompt, response = int(rng.integers(1, 6)), int(rng.integers(1, 9))
        found.append(
            {
                "prompt_ids": rng.integers(1, 90, prompt).tolist(),
                "response_ids": rng.integers(1, 90, response).tolist(),
                "rewards": rng.random(response).tolist(),
                "loss_mask": rng.integers(0, 2, response).tolist(),
                "logprobs": (-rng.random(response)).tolist(),
                "rollout_expert_indices": rng.integers(0, 5, (prompt + response - 1, 2, 2)),
            }
        )
    return found


@pytest.mark.parametrize("seed", range(20))
def test_rollouts_are_those_of_the_oracle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, examples = int(rng.choice(SIZES)), rollouts(rng)
    padded = RolloutCollator(9, pad_to_multiple_of=2 * size)(examples)
    parallel = ParallelLayout(cp=size)
    packed = PackedCollator(9, max_tokens=96, parallel=parallel)(examples)
    for batch in (padded, packed):
        for layout in LAYOUTS[batch is padded :]:
            shards = assert_shards(batch, size, layout, {})
            for shard in shards:
                routes = batch["rollout_expert_indices"].flatten(0, 1)[shard.cells]
                assert torch.equal(shard["rollout_expert_indices"].flatten(0, 1), routes)


def small(size: int = 2, **options: Any) -> Batch:
    examples = [
        {"input_ids": list(range(10 * i + 1, 10 * i + 1 + n))} for i, n in enumerate((6, 3))
    ]
    return PackedCollator(0, max_tokens=16, parallel=ParallelLayout(cp=size), **options)(examples)


def test_a_shard_survives_pickling_and_copies() -> None:
    shard = small().context_shard(1, 2)
    again = pickle.loads(pickle.dumps(shard))
    assert again == shard
    assert_same_batch(again, shard)
    assert again.cells.tolist() == shard.cells.tolist() == [2, 3, 4, 5, 9, 10]


def test_fields_changed_before_are_cut_as_they_are() -> None:
    batch = small()
    batch["labels"][0, 2] = 55
    batch["position_ids"][0, 1] = 77
    batch["loss_mask"][0, 0] = 0.5
    batch = batch.with_fields(
        values=torch.arange(12.0).view(1, 12), pairs=torch.arange(22).view(1, 11, 2)
    )
    shard = batch.context_shard(0, 2)
    assert shard.cells.tolist() == [0, 1, 6, 7, 8, 11]
    assert shard["targets"].tolist() == [[2, 55, -100, -100, 12, -100]]
    assert shard["position_ids"].tolist() == [[0, 77, 6, 7, 0, 3]]
    assert shard["loss_mask"][0, 0] == 0.5
    assert torch.equal(shard["loss_mask"][0, 1:] != 0, torch.tensor([1, 0, 0, 1, 0]) == 1)
    assert shard["values"].tolist() == [[1, 2, 0, 0, 9, 0]]
    assert shard["pairs"].tolist() == [[[0, 1], [2, 3], [0, 0], [0, 0], [16, 17], [0, 0]]]
    assert "labels" not in shard
