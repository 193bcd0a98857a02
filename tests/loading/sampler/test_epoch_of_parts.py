"""Parts of samplers carry their epoch, also into workers: noise by (seed, epoch, index)."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from torch.utils.data import DataLoader

from torch_collate_kit import PackedBatchSampler, PackedCollator, PrefetchingSampler, PrefetchLoader


class Noisy:
    """A dataset whose labels follow from (epoch, index)."""

    def __len__(self) -> int:
        return 7

    def __getitems__(self, part: Any) -> Any:
        plan = getattr(part, "indices", part)
        if 5 in plan and part.epoch == 1:
            raise ValueError("a broken file")
        rows = [{"input_ids": [9, 9], "labels": [part.epoch, i]} for i in plan]
        return rows if plan is part else part.with_examples(rows)


COLLATE = PackedCollator(0, max_tokens=8, targets="same_token")


def sampler_of(kind: str) -> Any:
    if kind == "list":
        return PrefetchingSampler(7, batch_size=3, seed=2)
    return PackedBatchSampler([2] * 7, COLLATE, batch_size=3, seed=2)


@pytest.mark.parametrize("kind", ["list", "plan"])
def test_every_part_says_its_epoch(kind: str) -> None:
    sampler = sampler_of(kind)
    for epoch in (0, 1):
        parts = list(sampler)
        assert [part.epoch for part in parts] == [epoch] * 3
        assert [pickle.loads(pickle.dumps(part)).epoch for part in parts] == [epoch] * 3
    sampler.load_state_dict(json.loads(json.dumps(sampler.state_at(4, 2))))
    assert next(iter(sampler)).epoch == 4
    if kind == "list":
        assert parts[0] == [*parts[0]]
        assert [*parts[0]] == parts[0] == pickle.loads(pickle.dumps(parts[0]))
        assert isinstance(parts[0], list)
    else:
        assert parts[0].without([0]).epoch == 1


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["list", "plan"])
def test_a_loader_passes_it_on_and_a_resumed_run_draws_the_same(kind: str, workers: int) -> None:
    def batches(state: Any = None) -> list[list[int]]:
        loader: Any = DataLoader(
            Noisy(), batch_sampler=sampler_of(kind), collate_fn=COLLATE, num_workers=workers
        )
        found = []
        with PrefetchLoader(loader, on_error="skip") as loaded:
            if state is not None:
                loaded.load_state_dict(state)
            for batch in loaded.steps(6 - (4 if state else 0)):
                found.append(sorted(batch["labels"][batch["attention_mask"] == 1].tolist()))
                if len(found) == 4 and state is None:
                    states.append(loaded.state_dict())
        return found

    states: list[Any] = []
    whole = batches()
    assert sum(numbers.count(1) for numbers in whole[3:]) >= 5  # epoch 1, without example 5
    assert batches(states[0]) == whole[4:]
