"""``batch.metadata`` says of which epoch and step a batch is; nothing else is touched."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.loading.prefetch.toy_data import COLLATORS, EXAMPLES, make_loader, make_sampler
from torch_collate_kit.loading import PrefetchingSampler, PrefetchLoader

TWO_EPOCHS = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]


def names(batch: Any) -> tuple[int, int]:
    return batch.metadata["epoch"], batch.metadata["step"]


def test_steps_count_from_the_beginning_of_the_epoch_after_a_jump_a_resume_and_a_reshuffle():
    with make_loader() as loader:
        assert [names(batch) for batch in loader.steps(2)] == [(0, 0), (0, 1)]
        state = json.loads(json.dumps(loader.state_dict()))
        loader.reshuffle()
        assert [names(batch) for batch in loader] == [(0, 2), (0, 3)]
        loader.set_epoch(5)
        assert names(next(loader.steps(1))) == (5, 0)
        loader.load_state_dict(state)
        assert names(next(loader.steps(1))) == (0, 2)


def test_names_go_wherever_other_metadata_goes():
    loader = DataLoader(EXAMPLES, batch_sampler=make_sampler(), collate_fn=COLLATORS["padded"])
    with PrefetchLoader(loader, device="meta") as loader:
        moved = list(loader)[2]
    with make_loader(COLLATORS["padded"]) as loader:
        batch = list(loader)[2]
    parts = [batch[1:], batch.chunk(2)[1], batch.select([0]), batch.with_fields(), moved]
    parts += [batch.to("meta"), pickle.loads(pickle.dumps(batch)), batch.pad_rows(multiple_of=8)]
    assert [names(part) for part in parts] == [(0, 2)] * len(parts)
    assert list(batch.metadata)[-2:] == ["epoch", "step"]


def test_a_batch_that_the_collate_function_keeps_is_not_changed():
    kept = COLLATORS["packed"](EXAMPLES[:2])
    kept.metadata["step"] = "mine"
    before = dict(kept.metadata)
    with make_loader(lambda examples: kept) as loader:
        first, second = list(loader)[:2]
    assert (names(first), names(second)) == ((0, 0), (0, 1))  # the loader's, not the function's
    assert kept.metadata == before
    assert kept.column("input_ids").data_ptr() == first.column("input_ids").data_ptr()


@pytest.mark.parametrize("batch", [{"x": torch.ones(1)}, [1], (COLLATORS["packed"](EXAMPLES),)])
def test_what_is_not_a_batch_is_left_alone(batch):
    with make_loader(lambda examples: batch) as loader:
        assert next(loader.steps(1)) is batch


def test_a_batch_of_a_sampler_with_a_wrapped_tail_is_named_by_the_epoch_it_ends_in():
    sampler = PrefetchingSampler(
        3, batch_size=2, shuffle=False, tail="wrap"
    )  # 1, 2, 1, 2, ... steps
    collate = COLLATORS["padded"]
    with PrefetchLoader(DataLoader(EXAMPLES[:3], batch_sampler=sampler, collate_fn=collate)) as it:
        assert [names(batch) for batch in it.steps(4)] == [(0, 0), (1, 0), (1, 1), (2, 0)]
