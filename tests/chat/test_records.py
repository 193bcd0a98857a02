"""Records in all forms: the result of the same conversation as `messages`, or a refusal."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from tests.chat.chats import (
    CALL,
    HEAD,
    NO_TAGS,
    SAID,
    TAGS,
    THINKS,
    TOOL,
    TWO,
    USER,
    YO,
    byte_tokenizer,
    chat,
    check,
    refused,
    thinking,
    tokenize,
    trained_text,
    with_call,
)
from torch_collate_kit import ChatOptions, PaddedCollator, tokenize_chat_dataset
from torch_collate_kit.errors import DataError

Record = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(NO_TAGS)


# ---- the same conversation

SYSTEM = {"role": "system", "content": "be kind"}
FUNCTION = {"name": "f", "arguments": {"a": "é"}}
CALLED = [
    SYSTEM,
    USER,
    {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": FUNCTION}]},
    {"role": "tool", "content": "42"},
]
SHARED = [
    {"from": "system", "value": "be kind"},
    {"from": "human", "value": "hi"},
    {"from": "function_call", "value": json.dumps(FUNCTION)},
    {"from": "observation", "value": "42"},
]
GPT, ASKS = {"from": "gpt", "value": "yo"}, {"role": "user"}
OTHERS = {"prompt": "a", "completion": "b", "instruction": "x", "output": "y"}
ABSENT = {"role": "user", "content": "hi", "contents": None, "tool_call": None}
ABOUT = {"reasoning_tokens": 9, "reasoning_effort": "low", "thought_signature": "a1",
         "has_tool_calls": True, "function_calls": [], "thoughts": {"text": None}}  # fmt: skip
UNTRAINED = {**YO, "weight": 0}
SAYS = {**YO, "weight": 1, "train": True, "trainable": None, "function_call": None}
SAME: list[tuple[Record, list[Record]]] = [
    ({"conversations": [*SHARED, {**GPT, "weight": 1}]}, [*CALLED, YO]),
    ({"conversations": [*SHARED, {**GPT, "weight": 0}]}, CALLED[:3]),
    ({"conversations": [*CALLED, YO]}, [*CALLED, YO]),
    ({"conversations": [{**GPT, "from": "user"}, {**GPT, "from": "assistant"}]}, [YO | ASKS, YO]),
    ({"messages": [USER, YO], **OTHERS}, [USER, YO]),
    ({"conversations": [USER, YO], **OTHERS}, [USER, YO]),
    ({**OTHERS, "prompt": [USER], "completion": [YO]}, [USER, YO]),
    ({"prompt": [USER, YO, USER], "completion": [YO]}, [USER, UNTRAINED, USER, YO]),
    ({"prompt": [USER, YO, USER], "completion": [YO], "system": "be kind"},
     [SYSTEM, USER, UNTRAINED, USER, YO]),
    ({"prompt": [USER, YO], "completion": [YO], "system": "be kind"},
     [SYSTEM, USER, UNTRAINED, YO]),
    ({"messages": [USER, UNTRAINED, USER, YO], "system": "be kind"},
     [SYSTEM, USER, UNTRAINED, USER, YO]),
    ({"messages": [USER | {"thoughts": "x"}, YO | ABOUT]}, [USER, YO]),
    ({"messages": [ABSENT, YO]}, [USER, YO]),  # Arrow gives each message the keys of all others
    ({"messages": [{**USER, "weight": 0, "train": False}, SAYS]}, [USER, YO]),
    ({"messages": [USER, {**SAYS, "function_call": {"name": None}}]}, [USER, YO]),
    (SAID | {"label": None, "chosen": None, "rejected": None}, [USER, YO]),
    (SAID | {"label": "greeting"}, [USER, YO]),
    (SAID | {"chat_template_kwargs": "null", "tools": "null"}, [USER, YO]),
    (SAID | {"label": 7}, [USER, YO]),
]  # fmt: skip


@pytest.mark.parametrize(("record", "messages"), SAME)
def test_the_same_as_messages(tokenizer: Any, record: Record, messages: list[Record]) -> None:
    for train_on in ("all", "each"):
        expected = tokenize({"messages": messages}, tokenizer, train_on=train_on)
        assert tokenize(record, tokenizer, train_on=train_on) == expected


def test_blocks_beside_thinking_that_is_read_are_a_copy_of_it() -> None:
    blocks = {"thinking_blocks": [{"type": "thinking", "thinking": "hm"}]}
    assert tokenize(answer(**blocks, reasoning="hm"), THINKS) == tokenize(
        answer(reasoning="hm"), THINKS
    )


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("1+1=", "2<|im_end|>"), ("a1\n", "\nb2"), ("", "b2"), ("a1 <|im_end|>", "é\U0001f981")],
)
def test_strings_are_joined_as_they_are(prompt: str, completion: str) -> None:
    tokenizer = byte_tokenizer(None)  # no template is needed
    record = {"prompt": prompt, "completion": completion}
    check(tokenize(record, tokenizer), tokenizer, "<s>" + prompt, completion)
    assert tokenize(record, tokenizer, train_on="each") == [tokenize(record, tokenizer)]


SKIPPED = [
    {"messages": []},
    chat("user: hi"),
    chat("system: s", "user: hi", "tool: 3"),
    chat("system: a", "developer: b", "user: c", "tool: d", "function: e"),
    {"instruction": "hi", "output": None},
    {"instruction": "hi"},
    {"prompt": "1+1="},
    {"prompt": [USER, YO], "completion": []},
]


@pytest.mark.parametrize("record", SKIPPED)
def test_no_assistant_turn(tokenizer: Any, record: Record) -> None:
    empty = {"input_ids": [], "loss_mask": [], "num_cut_tokens": 0}
    assert tokenize(record, tokenizer) == {**empty, "skip_reason": "no_assistant_turn"}


# ---- records that cannot be read


def gpt(**turn: Any) -> Record:
    return {"conversations": [{"from": "human", "value": "hi"}, turn]}


def answer(**keys: Any) -> Record:
    return {"messages": [USER, {**YO, **keys}]}


SCHEMA, DOCUMENTS = {"name": "f"}, [{"title": "a", "text": "b"}]
REFUSED: list[tuple[Record, str]] = [
    ({"messages": "[]"}, r"`messages` must be a list of dicts, got str; decode a JSON string"),
    ({"messages": {"role": ["user"]}}, r"got dict; .*turn a dict of lists into a list of dicts"),
    ({"messages": [USER, "yo"]}, r"messages\[1\] must be a dict with a `role`.*got str"),
    ({"messages": [{"from": "human"}]}, r"messages\[0\].*got keys \['from'\]; rename .*ShareG"),
    ({"messages": [{"role": 3, "content": ""}]}, r"messages\[0\] must be .* `role` string"),
    ({"messages": [{**USER, "content": 3}]}, r"messages\[0\] `content` must .* got 3"),
    (answer(tool_calls=3), r"messages\[1\] `tool_calls` must be a list of .* 3; write each as"),
    (answer(tool_calls=FUNCTION), r"`tool_calls` must be a list .*; put the dict into a list"),
    (answer(tool_calls="[{"), r"`tool_calls`: invalid JSON '\[\{'.*fix it"),
    (answer(tool_calls=[{"function": {"arguments": {}}}]), r"messages\[1\] has a tool call witho"),
    (answer(reasoning_content=["x"]), r"messages\[1\] `reasoning_content` must be text, got"),
    (answer(function_call=SCHEMA), r"messages\[1\] has a `function_call`, .*; convert it to `tool"),
    *((answer(**{key: value}), rf"\[1\] has no reasoning_content, but '{key}' looks like it; ren")
      for key in ("thinking_blocks", "reasoning_details", "thoughts", "reasoning_text", "think",
                  "reasoningContent", "chain_of_thought")
      for value in ("hm", [{"type": "thinking", "thinking": "hm"}])),
    *((answer(**{key: [SCHEMA], "tool_calls": []}), rf"has no tool_calls, but '{key}' looks like")
      for key in ("function_calls", "toolCalls", "toolInvocations", "tool_use")),
    (answer(content=None, contents="yo"), r"\[1\] has no content, but 'contents' looks like it"),
    (answer(tool_call=[SCHEMA]), r"messages\[1\] has no tool_calls, but 'tool_call' looks like it"),
    ({"messages": [{"role": "user", "contents": "hi"}, YO]}, r"\[0\] has no content, but 'conte"),
    ({"messages": [{"role": "user", "Content": "hi"}, YO]}, r"\[0\] has no content, but 'Content"),
    ({"messages": [{"role": "user", "text": "hi"}, YO]}, r"\[0\] has no `content`, only 'text' "),
    (SAID | {"tools": TOOL}, r"`tools` must be a list of dicts .*got \{'type.* put the dict into"),
    (SAID | {"tools": [3]}, r"`tools` must be .* got \[3\]; .*get_json_schema"),
    (SAID | {"tools": ["f("]}, r"`tools`: invalid JSON 'f\(' \(Expecting"),
    (SAID | {"tools": '{"name": "f"}'}, r"`tools` must be a list of dicts"),
    (SAID | {"documents": [3]}, r"`documents` must be a list .*; give each document as"),
    (SAID | {"system": 3}, r"`system` must be a string, got int; convert it"),
    (chat("system: a", "assistant: b", system="c"), r"`system` column and a system .* differ"),
    *((SAID | {"chat_template_kwargs": of}, r"`chat_template_kwargs` must be a dict or .*; give t")
      for of in (3, [1], "[1]", "3")),
    (SAID | {"chat_template_kwargs": {"tokenize": True}}, r"has 'tokenize', which tokenize_chat s"),
    (SAID | {"chat_template_kwargs": {"tools": DOCUMENTS}}, r"has 'tools', .* a column `tools`"),
    (SAID | {"chat_template_kwargs": {"documents": DOCUMENTS}}, r", .* a column `documents`"),
    ({"instruction": 3, "output": "x"}, r"`instruction` must be a string, got int; convert it"),
    ({"instruction": "x", "output": ["y"]}, r"`output` must be a string, got list; convert it"),
    ({"messages": None, "text": "x"}, r"no `messages` and no .* columns \['text'\]; rename"),
    ({"completion": "b2"}, r"no `messages` and no `instruction`"),
    ({"instruction": "x", "context": "y", "response": "z", "output": None},
     r"a `response` but no `output`; rename `response` to `output` \(and `context`"),
    (gpt(**{"from": "narrator"}, value="x"), r"conversations\[1\] is from 'narrator', .*; rename"),
    (gpt(value="x"), r"conversations\[1\] is from None"),
    (gpt(**{"from": "gpt"}, text="x"), r"conversations\[1\] `value` must be text, got None"),
    (gpt(**{"from": "gpt"}, value=3), r"`value` must be text, got 3; convert or rename it"),
    (gpt(**{"from": "function_call"}, value="f()"), r"value 'f\(\)' is not JSON .*; fix it, or gi"),
    (gpt(**{"from": "function_call"}, value='{"f": 1}'), r"JSON of a dict with `name` and `argum"),
    ({"conversations": ["a1", "c3"]}, r"messages\[0\] must be a dict"),
    ({"conversations": "a1"}, r"`conversations` must be a list of dicts, got str"),
    ({"prompt": [USER], "completion": "yo"}, r"two strings or two lists .* got list and str; conv"),
    ({"prompt": "a", "completion": [YO]}, r"two strings or two lists .* got str and list; conv"),
    ({"prompt": "a", "completion": 3}, r"two strings or two lists .* got str and int; conv"),
    *(({"prompt": "a", "completion": "b", column: "x"},
       f"are strings, which no template renders, so `{column}` would be lost; write it in")
      for column in ("system", "tools", "documents")),
]  # fmt: skip


@pytest.mark.parametrize(("record", "message"), REFUSED)
def test_records_that_cannot_be_read(tokenizer: Any, record: Record, message: str) -> None:
    for train_on in ("all", "each"):
        refused(record, tokenizer, message, train_on=train_on)


@pytest.mark.parametrize("where", ["content", "tools", "tool_calls", "documents", "arguments"])
def test_a_record_nested_too_deep(where: str, tokenizer: Any) -> None:
    deep: Any = []
    for _ in range(20_000):
        deep = [deep]
    text = "[" * 100_000 + "]" * 100_000
    records = {
        "content": answer(content=deep),
        "tools": SAID | {"tools": text},
        "tool_calls": answer(tool_calls=[text]),
        "documents": SAID | {"documents": deep},
        "arguments": with_call(arguments={"a": deep}),
    }
    refused(records[where], tokenizer, "the record is nested too deep")


# ---- weights, preference data, empty answers


ANSWERED = {"prompt": "1+1=", "completion": "2<|im_end|>"}
PAIR = {"prompt": [USER], "chosen": [YO], "rejected": [{**YO, "content": "no"}]}


@pytest.mark.parametrize(
    ("record", "column"),
    [
        ({**ANSWERED, "label": True}, "label"),
        ({**ANSWERED, "label": False}, "label"),
        ({**ANSWERED, "label": "bad"}, "label"),
        ({"prompt": [USER], "completion": [YO], "label": False}, "label"),
        (SAID | {"label": False}, "label"),
        ({"conversations": [USER, YO], "label": 0}, "label"),
        ({"instruction": "a", "output": "b", "label": np.bool_(True)}, "label"),
        (PAIR, "chosen"),
        ({"chosen": [USER, YO], "rejected": [USER, YO]}, "chosen"),
        (SAID | {"rejected": "no"}, "rejected"),
        ({**ANSWERED, "rejected": "3"}, "rejected"),
    ],
)
def test_preference_data_are_refused_by_name(tokenizer: Any, record: Any, column: str) -> None:
    """Their bad answers would be trained. In a mixed set other rows have None in these columns."""
    way_out = "pass .* to preference.tokenize_preferences, or for SFT keep .* and remove the column"
    message = rf"`{column}` is .* column of preference data.*; {way_out}"
    refused(record, tokenizer, message)
    rows = [{**dict.fromkeys(record), **SAID}, {"messages": None, **record}]
    with pytest.raises(DataError, match=f"example 1: {message}"):
        tokenize_chat_dataset(Dataset.from_list(rows), tokenizer)


ASKED = chat("user: a", "assistant: b", "user: c")["messages"]
PARTS = [{"type": "text", "text": " "}, {"type": "text", "text": "hi"}]
BLANK = {"role": "assistant", "content": " "}


@pytest.mark.parametrize(
    ("record", "where"),
    [
        (answer(content=None), r"messages\[1\] is an .* \(None\)"),
        (answer(content=""), r"messages\[1\] is an .* \(''\)"),
        ({"messages": [{**USER, "content": PARTS}, {**BLANK, "content": []}]}, r"messages\[1\]"),
        ({"messages": [{**USER, "content": PARTS}, {**BLANK, "content": PARTS[:1]}]}, r"\[1\]"),
        ({"messages": [USER, BLANK, *ASKED, YO]}, r"messages\[1\]"),
        ({"messages": [*ASKED, {**BLANK, "reasoning_content": "hm"}]}, r"messages\[3\]"),
        ({"messages": [*ASKED, {**BLANK, "tool_calls": []}]}, r"messages\[3\]"),
        ({"system": "be kind", "messages": [USER, BLANK]}, r"messages\[2\]"),
        ({"prompt": [USER], "completion": [BLANK]}, r"messages\[1\]"),
        (gpt(**{"from": "gpt"}, value=""), r"messages\[1\]"),
        ({"instruction": "a", "output": ""}, r"messages\[1\]"),
        ({"prompt": "1+1=", "completion": " \n"}, "`completion`"),
        (answer(content="<think>a</think>"), r"messages\[1\] is an .* \('<think>a"),
        (answer(content="<think></think> \n"), r"messages\[1\]"),
        (answer(content=[{"type": "text", "text": "a</think>"}, PARTS[0]]), r"messages\[1\]"),
        ({"prompt": "1+1=", "completion": "<think>a</think>"}, "`completion`"),
    ],
)
def test_an_empty_answer_is_trained_only_on_request(record: Any, where: str) -> None:
    tokenizer = byte_tokenizer(NO_TAGS.replace("-}}\n{", "}}{"))
    message = f"{where}.* say nothing; remove it, .*, or pass allow_empty=True"
    for train_on in ("all", "each"):
        refused(record, tokenizer, message, train_on=train_on)
    if not any("reasoning_content" in m for m in record.get("messages", ())):
        assert sum(tokenize(record, tokenizer, allow_empty=True)["loss_mask"]) > 0


def test_an_empty_message_that_is_not_trained_is_no_answer(tokenizer: Any) -> None:
    both = tokenize({"messages": [USER, BLANK, *ASKED, YO]}, tokenizer, train_on="last")
    assert trained_text(both, tokenizer) == "yo<|im_end|>"
    call = with_call()["messages"][1]
    for key in ("weight", "train"):
        for context in ({**BLANK, key: 0}, {**call, "content": " "}):
            record = {"messages": [USER, context, *TWO["messages"]]}
            assert tokenize(record, tokenizer)["skip_reason"] == ""


def test_documents_stand_in_the_text(tokenizer: Any) -> None:
    printing = "{% for d in documents or [] %}{{ d.title + d.text }}{% endfor %}" + NO_TAGS
    for documents in (DOCUMENTS, json.dumps(DOCUMENTS)):
        result = tokenize(SAID | {"documents": documents}, printing)
        assert tokenizer.decode(result["input_ids"]).startswith("ab" + HEAD)
    refused(SAID | {"documents": DOCUMENTS}, tokenizer, re.escape("drops documents[0]['title']"))


FORMS: list[dict[str, Any]] = [
    SAID,
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
    {"prompt": "hi", "completion": "yo"},
    {"instruction": "hi", "output": "yo"},
    {"messages": [{**m, "weight": m["role"] == "assistant"} for m in SAID["messages"]]},
    chat("user: hi"),  # skipped
]
BAD_WEIGHTS = [
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


@pytest.mark.parametrize(("columns", "message"), BAD_WEIGHTS)
def test_what_collators_refuse_is_refused(columns: Any, message: str, tagged: Any) -> None:
    refused({**SAID, **columns}, tagged, message)
    with pytest.raises(DataError, match=f"^example 0: {message[1:]}"):
        tokenize_chat_dataset(Dataset.from_list([{**SAID, **columns}]), tagged)
