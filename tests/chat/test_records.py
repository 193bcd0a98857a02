"""The forms of records: each gives what the same conversation gives as `messages`."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from tests.chat.test_chat import CALL, NO_TAGS, USER, YO, byte_tokenizer, chat, check
from torch_collate_kit import tokenize_chat, tokenize_chat_dataset
from torch_collate_kit.chat.options import ChatOptions
from torch_collate_kit.errors import DataError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(NO_TAGS)


def test_sharegpt(tokenizer: Any) -> None:
    call = {"name": "f", "arguments": {"a": "é"}}
    turns = [
        {"from": "system", "value": "be kind"},
        {"from": "human", "value": "hi"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "42"},
        {"from": "gpt", "value": "yo", "weight": 1},
    ]
    messages = [
        {"role": "system", "content": "be kind"},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": call}]},
        {"role": "tool", "content": "42"},
        YO,
    ]
    expected = tokenize_chat({"messages": messages}, tokenizer)
    assert tokenize_chat({"conversations": turns}, tokenizer) == expected
    assert tokenize_chat({"conversations": messages}, tokenizer) == expected
    turns[4]["weight"] = 0
    first = tokenize_chat({"messages": messages[:3]}, tokenizer)
    assert tokenize_chat({"conversations": turns}, tokenizer) == first


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"from": "narrator", "value": "x"}, r"conversations\[1\] is from 'narrator', .*; rename"),
        ({"from": "gpt", "text": "x"}, r"conversations\[1\] `value` must be text, got None"),
        ({"from": "gpt", "value": 3}, r"`value` must be text, got 3; convert or rename it"),
        ({"from": "function_call", "value": "f()"}, r"value 'f\(\)' is no JSON .*; fix it, or giv"),
        ({"from": "function_call", "value": '{"f": 1}'}, r"JSON of a dict with `name` and `argum"),
    ],
)
def test_sharegpt_that_cannot_be_carried_over(
    tokenizer: Any, turn: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        tokenize_chat({"conversations": [{"from": "human", "value": "hi"}, turn]}, tokenizer)


def test_prompt_and_completion_as_strings() -> None:
    tokenizer = byte_tokenizer(None)  # no template is needed
    record = {"prompt": "1+1=", "completion": "2<|im_end|>"}
    check(tokenize_chat(record, tokenizer), tokenizer, "1+1=", "2<|im_end|>")
    assert tokenize_chat(record, tokenizer, ChatOptions(train_on="each")) == [
        tokenize_chat(record, tokenizer)
    ]
    nothing = tokenize_chat({"prompt": "1+1="}, tokenizer)
    assert nothing["skip_reason"] == "no_assistant_turn"
    for name in ("system", "tools", "documents"):
        message = f"are strings, which no template renders, so `{name}` would be lost; write it in"
        with pytest.raises(DataError, match=message):
            tokenize_chat({**record, name: "x"}, tokenizer)


def test_prompt_and_completion_as_messages(tokenizer: Any) -> None:
    whole = chat("user: hi", "assistant: yo", "user: a", "assistant: b")
    for system in (None, "be kind"):
        record = {"prompt": whole["messages"][:3], "completion": whole["messages"][3:]}
        last = tokenize_chat({**whole, "system": system}, tokenizer, ChatOptions(train_on="last"))
        assert tokenize_chat({**record, "system": system}, tokenizer) == last
    empty = {"prompt": whole["messages"][:2], "completion": []}
    assert tokenize_chat(empty, tokenizer)["skip_reason"] == "no_assistant_turn"
    with pytest.raises(DataError, match=r"two strings or two lists .* got list and str; convert"):
        tokenize_chat({"prompt": [USER], "completion": "yo"}, tokenizer)


def test_the_first_form_is_read(tokenizer: Any) -> None:
    record = chat("user: hi", "assistant: yo")
    expected = tokenize_chat(record, tokenizer)
    others = {"prompt": "a", "completion": "b", "instruction": "x", "output": "y"}
    for column in ("messages", "conversations"):
        assert tokenize_chat({column: record["messages"], **others}, tokenizer) == expected
    lists = {"prompt": record["messages"][:1], "completion": record["messages"][1:]}
    assert tokenize_chat({**others, **lists}, tokenizer) == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            {"tool_calls": [{"function": {"arguments": {}}}]},
            r"messages\[1\] has a tool call without",
        ),
        (
            {"reasoning_content": ["x"]},
            r"messages\[1\] `reasoning_content` must be text, got \['x'\]",
        ),
    ],
)
def test_messages_that_cannot_be_read(tokenizer: Any, message: Any, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        tokenize_chat({"messages": [USER, {**YO, **message}]}, tokenizer)


def test_documents_must_be_dicts(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"`documents` must be a list .*; give each document as"):
        tokenize_chat({**chat("user: hi", "assistant: yo"), "documents": [3]}, tokenizer)


def test_weights_beside_a_system_column_belong_to_their_own_turns(tokenizer: Any) -> None:
    messages = [USER, {**YO, "weight": 0}, USER, YO]
    system = {"role": "system", "content": "be kind"}
    expected = tokenize_chat({"messages": [system, *messages]}, tokenizer)
    both = tokenize_chat({"messages": [system, USER, YO, USER, YO]}, tokenizer)
    assert 0 < sum(expected["loss_mask"]) < sum(both["loss_mask"])
    assert tokenize_chat({"messages": messages, "system": "be kind"}, tokenizer) == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "contents": "hi"}, "has no content, but 'contents' looks like it"),
        ({"role": "user", "Content": "hi"}, "has no content, but 'Content' looks like it"),
        ({"role": "user", "text": "hi"}, "has no `content`, only 'text' and its role"),
        (
            {"role": "assistant", "content": "x", "tool_call": [{"name": "f"}]},
            "has no tool_calls, but 'tool_call' looks like it",
        ),
    ],
)
def test_a_text_under_another_name_is_not_lost(message: dict[str, Any], expected: str) -> None:
    """No template would write it, and the rest of the record would be trained as if it were all."""
    record = {"messages": [message, {"role": "assistant", "content": "hello"}]}
    with pytest.raises(DataError, match=re.escape(f"messages[0] {expected}")):
        tokenize_chat(record, byte_tokenizer(NO_TAGS))


ANSWERED = {"prompt": "1+1=", "completion": "2<|im_end|>"}
PAIR = {"prompt": [USER], "chosen": [YO], "rejected": [{**YO, "content": "no"}]}


@pytest.mark.parametrize(
    ("record", "column"),
    [
        ({**ANSWERED, "label": True}, "label"),
        ({**ANSWERED, "label": False}, "label"),
        ({**ANSWERED, "label": "bad"}, "label"),
        ({"prompt": [USER], "completion": [YO], "label": False}, "label"),
        ({"messages": [USER, YO], "label": False}, "label"),
        ({"conversations": [USER, YO], "label": 0}, "label"),
        ({"instruction": "a", "output": "b", "label": np.bool_(True)}, "label"),
        (PAIR, "chosen"),
        ({"chosen": [USER, YO], "rejected": [USER, YO]}, "chosen"),
        ({"messages": [USER, YO], "rejected": "no"}, "rejected"),
        ({**ANSWERED, "rejected": "3"}, "rejected"),
    ],
)
def test_preference_data_are_refused_by_name(record: Any, column: str) -> None:
    """Their bad answers would be trained. In a mixed set other rows have None in these columns."""
    tokenizer = byte_tokenizer(NO_TAGS)
    message = rf"`{column}` is .* column of preference data.*; keep .* and remove the column"
    with pytest.raises(DataError, match=message):
        tokenize_chat(record, tokenizer)
    rows = [{**dict.fromkeys(record), "messages": [USER, YO]}, {"messages": None, **record}]
    with pytest.raises(DataError, match=f"example 1: {message}"):
        tokenize_chat_dataset(Dataset.from_list(rows), tokenizer)


def test_columns_that_are_no_preference_data(tokenizer: Any) -> None:
    absent = {"label": None, "chosen": None, "rejected": None}
    record = chat("user: hi", "assistant: yo")
    for columns in (absent, {"label": "greeting"}, {"label": 7}):
        assert tokenize_chat({**record, **columns}, tokenizer) == tokenize_chat(record, tokenizer)


ASKED = chat("user: a", "assistant: b", "user: c")["messages"]
PARTS = [{"type": "text", "text": " "}, {"type": "text", "text": "hi"}]
SAID = {"role": "assistant", "content": " "}


@pytest.mark.parametrize(
    ("record", "where"),
    [
        ({"messages": [USER, {**SAID, "content": None}]}, r"messages\[1\] is an .* \(None\)"),
        ({"messages": [USER, {**SAID, "content": ""}]}, r"messages\[1\] is an .* \(''\)"),
        ({"messages": [{**USER, "content": PARTS}, {**SAID, "content": []}]}, r"messages\[1\]"),
        ({"messages": [{**USER, "content": PARTS}, {**SAID, "content": PARTS[:1]}]}, r"\[1\]"),
        ({"messages": [USER, SAID, *ASKED, YO]}, r"messages\[1\]"),
        ({"messages": [*ASKED, {**SAID, "reasoning_content": "hm"}]}, r"messages\[3\]"),
        ({"messages": [*ASKED, {**SAID, "tool_calls": []}]}, r"messages\[3\]"),
        ({"system": "be kind", "messages": [USER, SAID]}, r"messages\[2\]"),
        ({"prompt": [USER], "completion": [SAID]}, r"messages\[1\]"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": ""}]}, "1"),
        ({"instruction": "a", "output": ""}, r"messages\[1\]"),
        ({"prompt": "1+1=", "completion": " \n"}, "`completion`"),
    ],
)
def test_an_empty_answer_is_trained_only_on_request(record: Any, where: str) -> None:
    tokenizer = byte_tokenizer(NO_TAGS.replace("-}}\n{", "}}{"))
    message = f"{where}.* say nothing; remove it, .*, or pass allow_empty=True"
    for train_on in ("all", "each"):
        with pytest.raises(DataError, match=message):
            tokenize_chat(record, tokenizer, ChatOptions(train_on=train_on))
    with pytest.raises(DataError, match=f"example 0: .*{message}"):
        tokenize_chat_dataset(Dataset.from_list([record]), tokenizer)
    if not any("reasoning_content" in m for m in record.get("messages", ())):
        assert sum(tokenize_chat(record, tokenizer, ChatOptions(allow_empty=True))["loss_mask"]) > 0
        tokenize_chat_dataset(Dataset.from_list([record]), tokenizer, ChatOptions(allow_empty=True))


def test_an_empty_message_that_is_not_trained_is_no_answer(tokenizer: Any) -> None:
    both = {"messages": [USER, SAID, *ASKED, YO]}
    last = tokenize_chat(both, tokenizer, ChatOptions(train_on="last"))
    assert (
        sum(last["loss_mask"])
        == sum(tokenize_chat({"messages": ASKED[:2]}, tokenizer)["loss_mask"]) + 1
    )
    for key in ("weight", "train"):
        untrained = {"messages": [USER, {**SAID, key: 0}, USER, YO]}
        assert tokenize_chat(untrained, tokenizer)["skip_reason"] == ""
    call = {"messages": [USER, {**SAID, "content": None, "tool_calls": [CALL]}]}
    assert tokenize_chat(call, tokenizer)["skip_reason"] == ""


def test_documents_and_tools_belong_in_columns() -> None:
    for name in ("documents", "tools"):
        message = rf"`chat_template_kwargs` has '{name}', .*; give the record a column `{name}`"
        kwargs = {name: [{"title": "a", "text": "b"}]}
        record, tokenizer = chat("user: hi", "assistant: yo"), byte_tokenizer(NO_TAGS)
        with pytest.raises(DataError, match=message):
            tokenize_chat(record, tokenizer, ChatOptions(chat_template_kwargs=kwargs))


@pytest.mark.parametrize("where", ["content", "tools", "tool_calls", "documents"])
def test_a_record_nested_too_deep(where: str, tokenizer: Any) -> None:
    deep: Any = []
    for _ in range(20_000):
        deep = [deep]
    text = "[" * 100_000 + "]" * 100_000
    records = {
        "content": {"messages": [USER, {**YO, "content": deep}]},
        "tools": {"messages": [USER, YO], "tools": text},
        "tool_calls": {"messages": [USER, {**YO, "tool_calls": [text]}]},
        "documents": {"messages": [USER, YO], "documents": deep},
    }
    with pytest.raises(DataError, match="the record is nested too deep"):
        tokenize_chat(records[where], tokenizer)


def test_keys_that_are_none_are_absent() -> None:
    """Arrow gives each message the keys of all others."""
    message = {"role": "user", "content": "hi", "contents": None, "tool_call": None}
    tokenizer = byte_tokenizer(NO_TAGS)
    found = tokenize_chat({"messages": [message, YO]}, tokenizer)
    assert found == tokenize_chat({"messages": [USER, YO]}, tokenizer)
