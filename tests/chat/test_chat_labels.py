"""tokenize_chat(labels=True): what loss_mask says, for those who know labels alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from tests.chat.test_chat import MIXED, NO_TAGS, TAGS, byte_tokenizer
from torch_collate_kit import ChatOptions, tokenize_chat, tokenize_chat_dataset
from torch_collate_kit.collators import PackedCollator, PaddedCollator


@pytest.fixture(scope="module", params=[TAGS, NO_TAGS], ids=["tags", "prefixes"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return byte_tokenizer(request.param)


def labels_of(row: dict[str, Any]) -> list[int]:
    pairs = list(zip(row["input_ids"], row["loss_mask"], strict=True))
    return [-100 if j == 0 or not kept else i for j, (i, kept) in enumerate(pairs)]


@pytest.mark.parametrize(
    "options", [{}, {"max_length": 60, "overflow": "truncate"}, {"train_on": "last"}]
)
def test_labels_say_what_the_mask_says(tokenizer: Any, options: dict[str, Any]) -> None:
    for record in MIXED:
        masked = tokenize_chat(record, tokenizer, ChatOptions(**options))
        labelled = tokenize_chat(record, tokenizer, ChatOptions(labels=True, **options))
        assert labelled.pop("labels") == labels_of(masked)
        del masked["loss_mask"]
        assert labelled == masked


def test_a_first_token_has_no_label() -> None:
    """Nothing predicts it; packed behind another conversation it would be trained."""
    row = tokenize_chat(
        {"prompt": "", "completion": "abc"}, byte_tokenizer(None), ChatOptions(labels=True)
    )
    assert row["labels"] == [-100, *row["input_ids"][1:]]
    assert -100 not in row["input_ids"]


def test_batches_are_the_same(tokenizer: Any) -> None:
    kept = [row for row in MIXED if not tokenize_chat(row, tokenizer)["skip_reason"]]
    masked, labelled = (
        [tokenize_chat(row, tokenizer, ChatOptions(labels=labels)) for row in kept]
        for labels in (False, True)
    )
    for collate in (PaddedCollator(0), PackedCollator(0, max_tokens=512)):
        assert collate(masked) == collate(labelled)


def test_whole_datasets(tokenizer: Any) -> None:
    source = Dataset.from_list(MIXED)
    masked, skips = tokenize_chat_dataset(source, tokenizer, ChatOptions(max_length=60))
    labelled, same = tokenize_chat_dataset(
        source, tokenizer, ChatOptions(max_length=60, labels=True)
    )
    assert skips == same
    assert labelled.column_names == ["input_ids", "labels"]
    assert labelled.features["labels"].feature.dtype == "int32"
    assert labelled["input_ids"] == masked["input_ids"]
    assert list(labelled["labels"]) == [labels_of(row) for row in masked]
    empty, _ = tokenize_chat_dataset(source.select([]), tokenizer, ChatOptions(labels=True))
    assert empty.column_names == ["input_ids", "labels"]


def test_only_bools_are_bools(tokenizer: Any) -> None:
    wrong: Any = "no"
    with pytest.raises(TypeError, match="labels must be True or False, got 'no'"):
        tokenize_chat(MIXED[0], tokenizer, ChatOptions(labels=wrong))
    with pytest.raises(TypeError, match="labels must be True or False, got 'no'"):
        tokenize_chat_dataset(Dataset.from_list(MIXED), tokenizer, ChatOptions(labels=wrong))


def test_a_numpy_length_gives_plain_numbers(tokenizer: Any) -> None:
    row = tokenize_chat(
        MIXED[2], tokenizer, ChatOptions(max_length=np.int64(40), overflow="truncate")
    )
    assert type(row["num_cut_tokens"]) is int
