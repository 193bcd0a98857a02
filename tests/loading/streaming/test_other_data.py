"""A state of other data is refused where these can be read; what is noticed of each source."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.building import packed_stream
from tests.loading.streaming.streaming_oracle import SETTINGS, datasets
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading import TokenizedDataset

Examples = list[dict[str, Any]]
DATA: Examples = [{"input_ids": [i, i + 1, i + 2][: 1 + i % 3]} for i in range(2, 102)]


class Sized:
    """Examples that have a number, but cannot be indexed."""

    def __init__(self, examples: Examples) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._examples)


def of_files(examples: Examples) -> Any:
    return datasets.Dataset.from_list(examples).to_iterable_dataset(num_shards=len(examples) // 20)


SOURCES: dict[str, Callable[[Examples], Any]] = {
    "list": list,
    "columns": TokenizedDataset,
    "dataset": datasets.Dataset.from_list,
    "numpy": lambda made: datasets.Dataset.from_list(made).with_format("numpy"),
    "transformed": lambda made: datasets.Dataset.from_list(made).with_transform(lambda rows: rows),
    "sized": Sized,
    "files": of_files,
    "callable": lambda made: lambda: iter(made),
}
OTHERS: dict[str, Examples] = {
    "fewer": DATA[:40],
    "more": DATA + DATA[:2],
    "a length": [{"input_ids": [7] * 9}, *DATA[1:]],
    "ids": [{"input_ids": [i + 1 for i in DATA[0]["input_ids"]]}, *DATA[1:]],
    "order": DATA[::-1],
    "ids of row 71": [*DATA[:71], {"input_ids": [5] * len(DATA[71]["input_ids"])}, *DATA[72:]],
}
NUMBER = {"fewer", "more"}
READ = {"fewer", "more", "a length", "ids", "order"}  # row 71 is none of the 64 of 100
NOTICED: dict[str, set[str]] = {
    **dict.fromkeys(("list", "columns", "dataset", "numpy"), READ),
    **dict.fromkeys(("transformed", "sized"), NUMBER),
    "files": {"fewer"},
    "callable": set(),
}


@pytest.mark.parametrize("change", OTHERS)
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("num_shards", [None, 2])
def test_other_data_are_noticed(name: str, change: str, num_shards: int | None) -> None:
    options = SETTINGS | {"num_shards": num_shards}
    saved, other, again = (
        packed_stream(SOURCES[name](data), **options) for data in (DATA, OTHERS[change], DATA)
    )
    batches = iter(saved)
    next(batches)
    state = json.loads(json.dumps(saved.state_dict()))
    again.load_state_dict(state)
    assert again.state_dict() == state
    if change in NOTICED[name]:
        before = other.state_dict()
        with pytest.raises(StateError, match=r"the state is of data with .*, the source has .*; r"):
            other.load_state_dict(state)
        assert other.state_dict() == before
    else:
        other.load_state_dict(state)


def test_wrong_examples_have_a_fingerprint_too() -> None:
    wrong = [{}, {"input_ids": None}, {"input_ids": ["a"]}, {"input_ids": [[1], [2]]}, None, 3]
    wrong += [{"input_ids": np.array(5)}, {"input_ids": [1.5]}, {"input_ids": [2**70]}]
    state = packed_stream([*wrong, *DATA], **SETTINGS).state_dict()
    assert state["fingerprint"]["num_examples"] == len(wrong) + 100
    nulls = datasets.Dataset.from_dict({"input_ids": [[1, 2], None, [3]]})
    state = packed_stream(nulls, **SETTINGS).state_dict()
    assert state["fingerprint"] == {"num_examples": 3}
