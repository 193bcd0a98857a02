"""A shuffled stream: wrong examples, damaged states, bad arguments."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest

from tests.building import packed_stream
from tests.loading.seals import resealed
from tests.loading.streaming.streaming_oracle import EXAMPLES, SETTINGS, all_tokens, tokens_of
from torch_collate_kit import PackedIterableDataset
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading import TokenizedDataset, merge_states
from torch_collate_kit.testing import assert_exact_resume

SHUFFLED = SETTINGS | {"shuffle": True, "seed": 3}


@pytest.mark.parametrize("as_columns", [False, True])
def test_skips_wrong_examples_of_a_shuffled_stream(as_columns: bool) -> None:
    wrong = {5, 6, 20, 41, 42}
    examples = [
        example | {"input_ids": [-7] if i == 20 else []} if i in wrong else example
        for i, example in enumerate(EXAMPLES)
    ]

    def make() -> PackedIterableDataset:
        source = TokenizedDataset(examples, columns=["input_ids"]) if as_columns else examples
        return packed_stream(source, **SHUFFLED, on_error="skip")

    batches = list(make())
    skipped = [i for batch in batches for i in batch.metadata.get("skipped", [])]
    assert sorted(skipped) == sorted(wrong)
    assert tokens_of(batches) == all_tokens([e for i, e in enumerate(EXAMPLES) if i not in wrong])
    assert_exact_resume(make, num_steps=len(batches) + 2)


def saved(num_batches: int = 5, **more: Any) -> dict[str, Any]:
    dataset = packed_stream(EXAMPLES, **SHUFFLED | more)
    list(islice(dataset, num_batches))
    return json.loads(json.dumps(dataset.state_dict()))


def test_a_source_that_became_shorter_is_noticed() -> None:
    dataset = packed_stream(lambda: iter(EXAMPLES[:10]), **SHUFFLED)
    dataset.load_state_dict(
        resealed(saved(), fingerprint=None, shards={"0": {"num_read": 7, "taken": 3}})
    )
    message = "after 3 examples of a shuffled block of 3 that begins after example 7 of the stream"
    with pytest.raises(StateError, match=message):
        list(dataset)


def test_states_of_other_passes_do_not_fit_together() -> None:
    states = []
    for rank in (0, 1):
        dataset = packed_stream(EXAMPLES, **SHUFFLED, num_shards=2, dp_rank=rank, dp_size=2)
        dataset.set_epoch(rank)
        next(iter(dataset))
        states.append(dataset.state_dict())
    with pytest.raises(
        StateError, match="state 1 is of pass=1, state 0 of pass=0; merge the states"
    ):
        merge_states(states)


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="shuffle must be True or False, got 'keyed'"):
        packed_stream(EXAMPLES, shuffle="keyed", max_tokens=8)
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        packed_stream(EXAMPLES, shuffle=True, seed=-1, max_tokens=8)
    with pytest.raises(TypeError, match="epoch must be an int, got '1' of type str"):
        packed_stream(EXAMPLES, shuffle=True, max_tokens=8).set_epoch("1")
    with pytest.raises(AttributeError, match="without shuffle=True has no set_epoch; its order"):
        _ = packed_stream(EXAMPLES, max_tokens=8).set_epoch
