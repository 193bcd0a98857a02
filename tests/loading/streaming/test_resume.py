"""Packing a stream: stopped at every step and resumed."""

from __future__ import annotations

import copy
from itertools import islice
from typing import Any

import pytest

from tests.batch_checks import assert_same_batch
from tests.building import packed_stream
from tests.loading.streaming.streaming_oracle import (
    EXAMPLES,
    SETTINGS,
    SOURCES,
    StatefulSource,
    all_tokens,
    place_of,
    tokens_of,
)
from torch_collate_kit.loading import PackedIterableDataset
from torch_collate_kit.testing import assert_exact_resume

CASES: list[tuple[str, dict[str, Any], int]] = [
    *((name, {}, 1) for name in SOURCES),
    ("stateful", {"rows": 3, "buffer_size": 16}, 1),
    ("stateful", {"dp_rank": 1, "dp_size": 2}, 1),
    ("stateful", {"overflow": "split", "max_tokens": 5}, 1),
    ("stateful", {"overflow": "drop", "max_tokens": 5}, 1),
    ("stateful", {"buffer_size": 1}, 1),
    ("stateful", {"buffer_size": 1000}, 1),
    ("list", {"buffer_size": 4}, 5),  # many windows
    ("list", {"buffer_size": 12, "rows": 3}, 5),  # batches often end in what was held back
    ("list", {"buffer_size": 12, "rows": 3, "overflow": "split", "max_tokens": 7}, 5),
]


@pytest.mark.parametrize(("name", "more", "times"), CASES, ids=str)
def test_exact_resume(name: str, more: dict[str, Any], times: int) -> None:
    def make() -> PackedIterableDataset:
        source = EXAMPLES * 5 if times == 5 else SOURCES[name]()
        return packed_stream(source, **SETTINGS | more)

    batches = list(make())
    if "dp_rank" not in more and more.get("overflow") != "drop":
        assert tokens_of(batches) == all_tokens(EXAMPLES * times)
    assert_exact_resume(
        make,
        num_steps=len(batches) + 3,  # into the second pass
        stops=range(len(batches)) if (name, times) == ("list", 1) else range(0, len(batches), 5),
        max_state_bytes=2000,
    )


@pytest.mark.parametrize(
    "settings",
    [{}, {"strategy": "sequential"}, {"rows": 3, "max_tokens": 8, "buffer_size": 12}],
)
def test_resume_reads_at_most_one_window_again(settings: dict[str, Any]) -> None:
    options = SETTINGS | settings
    examples = EXAMPLES * 7
    dataset = packed_stream(StatefulSource(examples), **options)
    most, places = 0, set()
    for _ in dataset:
        source = StatefulSource(examples)
        resumed = packed_stream(source, **options)
        resumed.load_state_dict(dataset.state_dict())
        next(iter(resumed), None)
        most = max(most, source.num_reads)
        places.add(place_of(dataset)["num_read"])
    assert options["buffer_size"] // 2 < most <= options["buffer_size"]
    assert len(places) >= 3
    assert place_of(dataset)["num_read"] == len(examples)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_pass_ends_behind_the_last_example(rows: int) -> None:
    for num_examples in range(len(EXAMPLES)):
        settings = SETTINGS | {"rows": rows}
        dataset = packed_stream(EXAMPLES[:num_examples], **settings)
        found = list(dataset)
        state = dataset.state_dict()
        assert place_of(dataset)["num_read"] == num_examples
        assert place_of(dataset)["num_batches"] == 0
        dataset.load_state_dict(state)
        assert found or not num_examples
        assert list(dataset) == []


@pytest.mark.parametrize("num_shards", [None, 1])
@pytest.mark.parametrize("edited", ["the state given", "the state returned"])
def test_a_state_that_is_edited_does_not_move_the_stream(
    edited: str, num_shards: int | None
) -> None:
    def stream() -> PackedIterableDataset:
        source = StatefulSource(EXAMPLES)
        options = SETTINGS | {"num_shards": num_shards, "strategy": "sequential"}
        return packed_stream((lambda: source) if num_shards else source, **options)

    saved, resumed = stream(), stream()
    batches = iter(saved)
    list(islice(batches, 9))
    given = saved.state_dict()
    resumed.load_state_dict(given)
    before = copy.deepcopy(given)
    set_to_zero(given if edited == "the state given" else resumed.state_dict())
    assert resumed.state_dict() == before
    set_to_zero(saved.state_dict())
    assert saved.state_dict() == before, "in the middle of a pass"
    for batch, wanted in zip(resumed, batches, strict=True):
        assert_same_batch(batch, wanted)


def set_to_zero(state: Any) -> None:
    """All numbers of a state, however deep they lie."""
    entries = list(state.items() if isinstance(state, dict) else enumerate(state))
    for key, value in entries:
        if isinstance(value, dict | list):
            set_to_zero(value)
        elif isinstance(value, int):
            state[key] = 0
