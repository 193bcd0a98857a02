"""A stream hands its plan on: what the collator makes of pieces, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.building import packed_collator, packed_stream
from tests.loading.streaming.streaming_oracle import SETTINGS, SOURCES, datasets
from torch_collate_kit.batch import PerExample, PerResponseToken, PerToken
from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import TokenizedDataset
from torch_collate_kit.packing import pack
from torch_collate_kit.packing.rank_plan import PlannedExamples
from torch_collate_kit.testing import batch_digest

FIELDS = {
    "kind": PerToken(torch.int8),
    "score": PerResponseToken(torch.float32),
    "domain": PerExample(torch.int64),
    "name": PerExample(str),
}


def examples() -> list[dict[str, Any]]:
    found = []
    for i, n in enumerate([5, 31, 2, 12, 44, 7]):
        a = min(n, 3 + 4 * i)
        found.append(
            {
                "input_ids": [100 * i + j for j in range(n)],
                "loss_mask": [j % 2 for j in range(a)],
                "num_actions": a,
                "kind": [j % 7 for j in range(n)],
                "score": [i + j / 8 for j in range(a)],
                "domain": i,
                "name": f"n{i}",
            }
        )
    return found


SOURCES_OF = {
    "lists": examples,
    "arrays": lambda: [
        {k: np.array(v) if isinstance(v, list) else v for k, v in e.items()} for e in examples()
    ],
    "columns": lambda: TokenizedDataset(examples(), columns=list(examples()[0])),
    "map-style": lambda: datasets.Dataset.from_list(examples()),
}


@pytest.mark.parametrize("name", list(SOURCES_OF))
def test_declared_fields_are_cut_with_their_example(name: str) -> None:
    settings: dict[str, Any] = {"max_tokens": 12, "overflow": "split", "fields": FIELDS}
    stream = packed_stream(SOURCES_OF[name](), tokenizer=0, buffer_size=100, rows=50, **settings)
    (batch,) = stream
    expected = packed_collator(0, **settings)(examples())
    assert batch.row_metadata["name"] == expected.row_metadata["name"]
    for field in ("input_ids", "loss_mask", "kind", "score", "domain"):
        found, wanted = batch[field], expected[field]
        if not isinstance(found, torch.Tensor):
            found, wanted = found.values, wanted.values
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(wanted)), field
    starts = "example_starts"
    assert batch.row_metadata[starts].tolist() == expected.row_metadata[starts].tolist()


def test_a_piece_of_a_long_row_copies_no_more_than_itself() -> None:
    source = TokenizedDataset([{"input_ids": np.arange(1, 1001)}])
    stream = packed_stream(source, tokenizer=0, max_tokens=16, buffer_size=4, overflow="split")
    whole = source[0]["input_ids"]
    reader_rows: list[Any] = []
    collate = stream.collate.__call__

    class Spy(PackedCollator):
        def __call__(self, planned: Any) -> Any:
            reader_rows.extend(planned.examples)
            return collate(planned)

    stream.collate.__class__ = Spy
    assert len(list(stream)) == 63
    assert len(reader_rows) == 63
    assert all(np.shares_memory(row["input_ids"], whole) for row in reader_rows)


def test_an_example_that_shrank_since_it_was_planned_is_refused() -> None:
    plan = pack([3, 5], 8)
    message = (
        "example 1 has 4 tokens, the plan reads 5 of it; an example must stay as it was when it "
        "was planned"
    )
    collate = packed_collator(0, max_tokens=8)
    with pytest.raises(DataError, match=f"^{message}$"):
        collate(PlannedExamples(plan, [{"input_ids": [1] * 3}, {"input_ids": [1] * 4}]))
    whole = [{"input_ids": [1] * 3}, {"input_ids": [2] * 5}]
    assert batch_digest(collate(PlannedExamples(plan, whole))) == batch_digest(collate(whole))


def test_an_error_names_the_token_in_its_example_not_in_its_piece() -> None:
    wrong = [{"input_ids": [1] * 30 + [-5]}]
    stream = packed_stream(wrong, overflow="split", **SETTINGS)
    with pytest.raises(DataError, match=r"^example 0 of the stream: input_ids is -5 at token 30;"):
        list(stream)


def renamed(node: Any, name: str) -> None:
    node.__class__ = type(name, (type(node),), {})


@pytest.mark.parametrize("name", ["shards", "mapped", "shuffled"])
def test_what_a_newer_datasets_calls_otherwise_is_skipped_not_restored(name: str) -> None:
    def make() -> Any:
        stream = SOURCES[name]()
        renamed(stream._ex_iterable, "SomethingNew")
        return stream

    settings = SETTINGS | {"buffer_size": 2}
    dataset = packed_stream(make(), **settings)
    batches: Iterator[Any] = iter(dataset)
    for _ in range(12):
        next(batches)
    state = json.loads(json.dumps(dataset.state_dict()))
    assert state["shards"]["0"]["num_read"] > 0
    assert "sources" not in state
    resumed = packed_stream(make(), **settings)
    resumed.load_state_dict(state)
    assert list(map(batch_digest, resumed)) == list(map(batch_digest, batches))
