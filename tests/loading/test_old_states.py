"""States that were saved before runs could change their number of ranks: versions 1 and 3.

``old_states.json`` was written by the code of that time, commit aa722cf: what every state is of,
and what each rank was given after it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torch_collate_kit import (
    MixedSampler,
    PackedBatchSampler,
    PackedIterableDataset,
    ParallelLayout,
    PrefetchingSampler,
)
from torch_collate_kit.errors import StateError

OLD = json.loads((Path(__file__).parent / "old_states.json").read_text())
LENGTHS = [3 + (7 * i) % 11 for i in range(37)]
ROWS = [{"input_ids": [i + 1] * length} for i, length in enumerate(LENGTHS)]


def sampler_of(case: dict[str, Any], rank: int, world_size: int) -> Any:
    options = dict(case["options"])
    if case["kind"] == "PrefetchingSampler":
        return PrefetchingSampler(37, rank=rank, world_size=world_size, **options)
    if case["kind"] == "MixedSampler":
        return MixedSampler([20, 17], rank=rank, world_size=world_size, **options)
    return PackedBatchSampler(
        LENGTHS,
        rank=rank,
        num_loss_tokens=[n - 1 for n in LENGTHS] if options.pop("counted") else None,
        patches=[i % 4 for i in range(37)] if options.pop("patched") else None,
        parallel=ParallelLayout(dp=world_size, tp=options.pop("tp")),
        **options,
    )


def read_on(case: dict[str, Any], world_size: int) -> list[list[list[int]]]:
    """What each rank is given in as many steps after the state as were recorded."""
    samplers = [sampler_of(case, rank, world_size) for rank in range(world_size)]
    for sampler in samplers:
        sampler.load_state_dict(case["state"])
    steps: list[list[list[int]]] = []
    while len(steps) < len(case["next"]):
        for parts in zip(*samplers, strict=True):
            steps.append([getattr(part, "indices", part) for part in parts])
    return steps[: len(case["next"])]


def over_ranks(steps: list[list[list[int]]]) -> list[list[int]]:
    return [sorted(i for part in parts for i in part) for parts in steps]


def ranks_for(case: dict[str, Any]) -> set[int]:
    """Its own number of ranks, and others; a kept tail of one example has only one rank."""
    is_kept = case["kind"] == "PrefetchingSampler" and case["options"]["tail"] == "keep"
    return {1} if is_kept else {1, 2, 6, case["world_size"]}


@pytest.mark.parametrize(
    ("case", "world_size"),
    [(case, ranks) for case in OLD["samplers"] for ranks in sorted(ranks_for(case))],
    ids=lambda value: value["kind"] if isinstance(value, dict) else str(value),
)
def test_a_sampler_goes_on_from_version_1_on_any_number_of_ranks(
    case: dict[str, Any], world_size: int
) -> None:
    assert case["state"]["version"] == 1
    found = read_on(case, world_size)
    if case["kind"] != "PackedBatchSampler" and world_size == case["world_size"]:
        assert found == case["next"]
    # rows are planned by this release, so that only the examples of a step are those of then
    assert over_ranks(found) == over_ranks(case["next"])


@pytest.mark.parametrize("case", OLD["streams"], ids=lambda case: case["options"]["overflow"])
def test_a_stream_goes_on_from_version_3(case: dict[str, Any]) -> None:
    ranks = {"rank": case["rank"], "world_size": case["world_size"]}
    stream = PackedIterableDataset(ROWS, tokenizer=0, **ranks, **case["options"])
    stream.load_state_dict(case["state"])
    found = [sorted(set(batch["input_ids"].flatten().tolist()) - {0}) for batch in stream]
    assert found
    assert found == case["next"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"world_size": 4}, r"world_size=\d, the dataset has world_size=4"),
        ({"num_shards": 6, "world_size": 3}, "has version 3, of a stream without num_shards"),
        ({"rows_multiple_of": 2, "rows_per_batch": 2}, "rows_per_batch=1, the dataset has"),
    ],
)
def test_an_old_state_of_another_stream_is_refused(other: dict[str, Any], message: str) -> None:
    case = OLD["streams"][0]
    ranks = {"rank": case["rank"], "world_size": case["world_size"]}
    stream = PackedIterableDataset(ROWS, tokenizer=0, **{**ranks, **case["options"], **other})
    before = stream.state_dict()
    with pytest.raises(StateError, match=message):
        stream.load_state_dict(case["state"])
    assert stream.state_dict() == before
