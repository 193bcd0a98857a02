"""What becomes of examples over max_length: raise, truncate or drop."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from tests.chat.test_chat import NO_TAGS, byte_tokenizer, chat
from tests.chat.test_supervision import THINKS, thinking
from torch_collate_kit import ChatOptions, tokenize_chat, tokenize_chat_dataset
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import read_records

LONG, SHORT = chat("user: hi", "assistant: " + "z" * 60), chat("user: hi", "assistant: yo")
NOTHING = {"input_ids": [], "loss_mask": [], "num_cut_tokens": 0}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(NO_TAGS)


def test_one_record(tokenizer: Any) -> None:
    whole = tokenize_chat(LONG, tokenizer)
    length = len(whole["input_ids"])
    message = (
        f"^the text has {length} tokens, more than max_length=60; raise max_length, shorten the "
        "record, or pass overflow='drop' or 'truncate'$"
    )
    for options in ({}, {"overflow": "raise"}):
        with pytest.raises(DataError, match=message):
            tokenize_chat(LONG, tokenizer, ChatOptions(max_length=60, **options))
    dropped = tokenize_chat(LONG, tokenizer, ChatOptions(max_length=60, overflow="drop"))
    assert dropped == {**NOTHING, "skip_reason": "too_long"}
    cut = tokenize_chat(LONG, tokenizer, ChatOptions(max_length=60, overflow="truncate"))
    assert (cut["input_ids"], cut["num_cut_tokens"]) == (whole["input_ids"][:60], length - 60)
    for overflow in ("raise", "drop", "truncate"):
        options = {"max_length": length, "overflow": overflow}
        assert tokenize_chat(LONG, tokenizer, ChatOptions(**options)) == whole, "it fits exactly"
        asked = tokenize_chat(
            chat("user: " + "x" * 60), tokenizer, ChatOptions(max_length=9, overflow=overflow)
        )
        assert asked["skip_reason"] == "no_assistant_turn"
    with pytest.raises(
        ValueError, match="overflow must be one of 'raise', 'truncate', 'drop', None"
    ):
        tokenize_chat(LONG, tokenizer, ChatOptions(overflow="split"))


def test_each_drops_the_turns_that_are_too_long() -> None:
    tokenizer = byte_tokenizer(THINKS)
    record = thinking("A", "B" * 50)
    first, last = tokenize_chat(record, tokenizer, ChatOptions(train_on="each"))
    limit = len(last["input_ids"]) - 1
    found = tokenize_chat(
        record, tokenizer, ChatOptions(train_on="each", max_length=limit, overflow="drop")
    )
    assert found == [first, {**NOTHING, "skip_reason": "too_long"}]
    data = Dataset.from_list([record])
    rows, skips = tokenize_chat_dataset(
        data, tokenizer, ChatOptions(train_on="each", max_length=limit)
    )
    assert (rows["input_ids"], rows["record_index"]) == ([first["input_ids"]], [0])
    assert skips == {"too_long": 1}
    with pytest.raises(DataError, match=f"the text has {limit + 1} tokens, more"):
        tokenize_chat(record, tokenizer, ChatOptions(train_on="each", max_length=limit))


def test_a_dataset_drops_and_says_so_once(tokenizer: Any, caplog: Any) -> None:
    source = Dataset.from_list([SHORT, LONG, SHORT, LONG])
    for options in ({}, {"overflow": "drop"}):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="torch_collate_kit.chat"):
            found, skips = tokenize_chat_dataset(
                source, tokenizer, ChatOptions(max_length=60, **options)
            )
        assert found.column_names == ["input_ids", "loss_mask"]
        assert skips == Counter(too_long=2)
        assert [r.getMessage() for r in caplog.records] == [
            "skipped 2 of 4 examples: {'too_long': 2}"
        ]
    with pytest.raises(DataError, match=r"example 1: the text has \d+ tokens, more"):
        tokenize_chat_dataset(source, tokenizer, ChatOptions(max_length=60, overflow="raise"))
    for limit, cut in ((60, True), (None, False)):
        found, _ = tokenize_chat_dataset(
            source, tokenizer, ChatOptions(max_length=limit, overflow="truncate")
        )
        assert [bool(num) for num in found["num_cut_tokens"]] == [False, cut, False, cut]
        assert found.features["num_cut_tokens"].dtype == "int64"


def test_real_chats_keep_their_ends(shared_data: Path, caplog: Any) -> None:
    """18 of 900 are longer than 1,024 tokens; cut, 17 of them end without their end mark."""
    chats = read_records(shared_data / "chat_tools_tm4_900.jsonl")
    name = shared_data / "tokenizers" / "mistral-32k-chatml"
    tokenizer = AutoTokenizer.from_pretrained(name)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    with caplog.at_level(logging.WARNING, logger="torch_collate_kit.chat"):
        found, skips = tokenize_chat_dataset(chats, tokenizer, ChatOptions(max_length=1024))
    assert [r.getMessage() for r in caplog.records] == [
        "skipped 18 of 900 examples: {'too_long': 18}"
    ]
    assert skips == {"too_long": 18}
    assert {ids[-2] for ids in found["input_ids"]} == {end}  # and a line break
    cut, _ = tokenize_chat_dataset(
        chats, tokenizer, ChatOptions(max_length=1024, overflow="truncate")
    )
    rows = list(zip(cut["input_ids"], cut["num_cut_tokens"], strict=True))
    assert sum(num > 0 for _, num in rows) == 18
    without_end = [num for ids, num in rows if end not in ids[-2:]]
    assert len(without_end) == 17
    assert min(without_end) > 0
