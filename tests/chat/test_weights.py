"""The ``weight`` of a record: kept on each of its examples, checked as collators check it."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from tests.chat.chats import (
    SAID,
    TAGS,
    THINKS,
    TWO,
    byte_tokenizer,
    chat,
    refused,
    thinking,
    tokenize,
)
from torch_collate_kit import ChatOptions, PaddedCollator, tokenize_chat_dataset
from torch_collate_kit.errors import DataError

FORMS: list[dict[str, Any]] = [
    SAID,
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
    {"prompt": "hi", "completion": "yo"},
    {"instruction": "hi", "output": "yo"},
    {"messages": [{**m, "weight": m["role"] == "assistant"} for m in SAID["messages"]]},
    chat("user: hi"),  # skipped
]
BAD = [
    ({"weight": -1}, "^weight is -1; a weight must be finite, and 0 or at least 1e-30"),
    ({"weight": -0.5}, "^weight is -0.5; a weight must be finite, and 0 or at least 1e-30"),
    ({"weight": float("nan")}, "^weight is nan; a weight must be finite"),
    ({"weight": "0.5"}, r"^weight is '0.5' \(str\); give one number per example"),
    ({"weight": None}, r"^weight is None \(NoneType\); give one number per example"),
    ({"weights": 2}, "^the record has 'weights', which is not read; name it weight if it is one"),
    ({"sample_weight": 2}, "^the record has 'sample_weight', which is not read; name it weight"),
    ({"exampleWeight": 2}, "^the record has 'exampleWeight', which is not read; name it weight"),
]


@pytest.fixture(scope="module")
def tagged() -> Any:
    return byte_tokenizer(TAGS)


@pytest.mark.parametrize("weight", [0, 0.5, True, 3])
def test_every_form_keeps_it_and_the_rest_is_the_same(weight: Any, tagged: Any) -> None:
    for record in FORMS:
        given = {**record, "weight": weight}
        assert tokenize(given, tagged) == {**tokenize(record, tagged), "weight": weight}
        assert given == {**record, "weight": weight}


def test_each_example_of_a_record_has_it() -> None:
    tokenizer, record = byte_tokenizer(THINKS), {**thinking("A", "B"), "weight": 0.25}
    found = tokenize(record, tokenizer, train_on="each")
    assert [example["weight"] for example in found] == [0.25, 0.25]
    data = Dataset.from_list([record, {**TWO, "weight": 2.0}])
    rows, _ = tokenize_chat_dataset(data, tokenizer, ChatOptions(train_on="each"))
    assert list(rows["weight"]) == [0.25, 0.25, 2.0]


def test_a_dataset_keeps_the_column_and_a_collator_multiplies_by_it(tagged: Any) -> None:
    records = [{**SAID, "weight": 0.5, "id": "a"}, {**chat("user: hi"), "weight": 9, "id": "b"}]
    records.append({**TWO, "weight": 3, "id": "c"})
    rows, skips = tokenize_chat_dataset(Dataset.from_list(records), tagged)
    assert skips == {"no_assistant_turn": 1}
    assert rows.column_names == ["input_ids", "loss_mask", "weight"]
    assert str(rows.features["weight"].dtype) == "float32"
    batch = PaddedCollator(0, normalize_loss=False)(rows)
    sums = [sum(row["loss_mask"]) * row["weight"] for row in rows]
    assert batch["loss_mask"].sum(dim=1).tolist() == sums
    empty, _ = tokenize_chat_dataset(Dataset.from_list(records).select([]), tagged)
    assert empty.column_names == rows.column_names


@pytest.mark.parametrize(("columns", "message"), BAD)
def test_what_collators_refuse_is_refused(columns: Any, message: str, tagged: Any) -> None:
    refused({**SAID, **columns}, tagged, message)
    with pytest.raises(DataError, match=f"^example 0: {message[1:]}"):
        tokenize_chat_dataset(Dataset.from_list([{**SAID, **columns}]), tagged)
