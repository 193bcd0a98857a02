"""What other tools write into records, and templates do with it: read as meant, or refused."""

from __future__ import annotations

import json
import logging
from collections import Counter
from typing import Any

import datasets
import numpy as np
import pytest
from datasets import Dataset, Features, List, Value

from tests.chat.chats import (
    CALL,
    CALLS,
    CHATML,
    NO_TAGS,
    SAID,
    USER,
    YO,
    byte_tokenizer,
    chat,
    check,
    refused,
    tokenize,
    trained_text,
    with_call,
)
from tests.chat.families import FAMILY_OF, templates, tokenizer_for
from torch_collate_kit import ChatOptions, audit, tokenize_chat_dataset
from torch_collate_kit.errors import DataError
from torch_collate_kit.preference import tokenize_preferences

# ---- arguments of tool calls

TWICE = json.dumps('{"a": 1}')
NO_OBJECT = [
    '{"a": 1', "{'a': 1}", '{"a": 1}</s>', TWICE, "[1]", "3", "null", "true", " ", "a=1",
    '{"a": NaN}', '{"a": -1e999}', [1], [], 3, True, {"a": float("nan")}, {"a": {1, 2}},
    {"a": {"ab", "cd"}},
]  # fmt: skip
WRITES_CALLS = ("qwen2_5", "llama3_1", "gptoss", "gemma4", "qwen3", "glm4moe", "nemotron_3_nano")
WHERE = r"messages\[1\]\.tool_calls\[0\]\.arguments are not a JSON object"


@pytest.mark.parametrize("name", [*WRITES_CALLS, "mapping", "text"])
def test_arguments_that_are_no_json_object_are_refused_with_every_template(name: str) -> None:
    made = {
        "mapping": CALLS.replace("arguments }}", "arguments.items() | list | tojson }}"),
        "text": CALLS,
    }
    template = made.get(name) or templates()[name]
    tokenizer = tokenizer_for(template, FAMILY_OF[name].eos if name in FAMILY_OF else "<|im_end|>")
    for arguments in NO_OBJECT:
        refused(with_call(arguments=arguments), tokenizer, WHERE)
        shown = with_call(arguments=arguments)["messages"]
        refused({"messages": [shown[0], {**shown[1], "weight": 0}, USER, YO]}, tokenizer, WHERE)
    for arguments in ({}, {"a": None}, '{"a": 1}', ' {"a": [{}]}\n'):
        assert tokenize(with_call(arguments=arguments), tokenizer, train_on="last")["loss_mask"]
    none = [tokenize(with_call(arguments=of), tokenizer) for of in (None, "", {})]
    assert none[0] == none[1] == none[2]


def test_bad_arguments_are_named_by_place() -> None:
    calls = [CALL, {"name": "g", "arguments": "{"}]
    record = {"messages": [USER, {**YO, "tool_calls": calls}], "system": "be kind"}
    refused(record, CALLS, r"messages\[1\]\.tool_calls\[1\]\.arguments .* got '\{' \(Expecting")
    shared = [{"from": "human", "value": "hi"}, {"from": "function_call", "value": json.dumps(
        {"name": "f", "arguments": TWICE})}]  # fmt: skip
    refused({"conversations": shared}, CALLS, WHERE)


FX = {"function": {"name": "f", "arguments": {"x": 1}}}
LOST: list[tuple[dict[str, Any], str]] = [  # calls of other tools, the key that would be lost
    ({"name": "f", "args": {"x": 1}, "id": "1", "type": "tool_call"}, "args"),  # LangChain
    ({"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}, "input"),  # Anthropic
    ({"type": "custom", "name": "f", "input": "5"}, "input"),
    ({"function": {"name": "f", "parameters": {"x": 1}}}, "parameters"),  # Llama
    ({"function": {"name": "f", "arguments": "{}", "Arguements": '{"x": 1}'}}, "Arguements"),
    ({"function": {"name": "f", "arguments": None, "values": {"x": 1}}}, "values"),
    ({"function": {"name": "f"}, "arguments": '{"x": 1}'}, "arguments"),
    ({"name": "f", "argument": {"x": 1}}, "argument"),
    ({"name": "g", "arguments": {"x": 1}, "function": {"name": "g"}}, "arguments"),
    ({"name": "g", **FX}, "name"),
    ({**FX, "function_args": {"x": 2}}, "function_args"),
]
KEPT: list[dict[str, Any]] = [
    {"name": "f", "arguments": {"x": 1}, "args": None, "input": {"y": None}, "input_tokens": 3},
    {**FX, "index": 0, "call_id": "a", "extra_content": {"google": {"signature": "b"}}},
    {**FX, "name": "f", "arguments": '{"x":1}', "parsed_arguments": {"x": 1}},
    {"function": FX["function"] | {"description": "x", "input_schema": {"type": "object"}}},
]


def test_arguments_under_another_key_are_refused_by_place() -> None:
    for call, key in LOST:
        record = {"messages": [USER, {**YO, "tool_calls": [CALL, call]}]}
        refused(record, CALLS, rf"messages\[1\]\.tool_calls\[1\] has '{key}' .* not read; give")
        for of in (call, json.dumps(call)):
            rows = Dataset.from_list([{"messages": [USER, {**YO, "tool_calls": [of]}]}, SAID])
            skips = tokenize_chat_dataset(rows, byte_tokenizer(CALLS))[1]
            assert skips == Counter(bad_tool_arguments=1)
    tokenizer = byte_tokenizer(CALLS.replace("arguments }}", "arguments | tojson }}"))
    for call in KEPT:
        record = {"messages": [USER, {**YO, "tool_calls": [call]}]}
        assert '<call>f {"x": 1}</call>' in trained_text(tokenize(record, tokenizer), tokenizer)


def test_bad_arguments_are_skipped_and_counted_in_a_dataset() -> None:
    rows = [with_call(), with_call(arguments="{"), with_call(arguments=TWICE)]
    tokenizer = byte_tokenizer(CALLS)
    for options in (ChatOptions(), ChatOptions(train_on="each", group_turns=True)):
        found, skips = tokenize_chat_dataset(Dataset.from_list(rows), tokenizer, options)
        assert (len(found), skips) == (1, Counter(bad_tool_arguments=2))
    report = audit(rows, tokenizer)["refused"]
    assert report.rows.tolist() == [1, 2]
    assert "messages[1].tool_calls[0].arguments" in report.message
    sides = [r["messages"] for r in rows]
    pairs = Dataset.from_list([{"chosen": sides[0], "rejected": [USER, YO]},
                               {"chosen": [USER, YO], "rejected": sides[1]}])  # fmt: skip
    assert tokenize_preferences(pairs, tokenizer)[1] == Counter(bad_tool_arguments=1)


# ---- BOS of strings


def test_strings_get_the_bos_that_the_tokenizer_adds_once() -> None:
    tokenizer = byte_tokenizer(None)
    for prompt in ("1+1=", "<s>1+1=", ""):
        record = {"prompt": prompt, "completion": "2"}
        check(tokenize(record, tokenizer), tokenizer, "<s>" + prompt.removeprefix("<s>"), "2")
    found, _ = tokenize_chat_dataset(Dataset.from_list([{"prompt": "a", "completion": "b"}]),
                                     tokenizer)  # fmt: skip
    assert tokenizer.decode(found[0]["input_ids"]) == "<s>ab"
    for prompt in ("a", "<s>a", ""):
        pair = {"prompt": prompt, "chosen": "b", "rejected": "c"}
        labelled = [{"prompt": prompt, "completion": of, "label": True} for of in "bc"]
        for rows in ([pair], labelled):
            found, _ = tokenize_preferences(Dataset.from_list(rows), tokenizer)
            head = "<s>" + prompt.removeprefix("<s>")
            texts = [tokenizer.decode(ids) for ids in found[0]["input_ids"]]
            assert texts == [head + "b", head + "c"]
            assert found[0]["loss_mask"] == [[0] * (len(texts[0]) - 3) + [1]] * 2
    assert tokenizer.decode(tokenize(SAID, byte_tokenizer(CHATML))["input_ids"])[:3] != "<s>"
    none = tokenizer_for("", "</s>")  # adds none
    check(tokenize({"prompt": "a", "completion": "b"}, none), none, "a", "b")
    for rows in ([pair], labelled):
        with pytest.raises(DataError, match=r"example 0: the prompt is empty, .* with the BOS"):
            tokenize_preferences(Dataset.from_list(rows), none)


# ---- roles, and flags of turns

MODEL = CHATML.replace(
    "{{ m.role }}", "{{ {'assistant': 'model'}.get(m.role, m.role) }}{{ '' if 'critic' else '' }}"
).replace("assistant\n", "model\n")


@pytest.mark.parametrize(
    "role", ["Assistant", "gpt", "model", "bot", "Qwen3", "assistant ", "", "human"]
)
@pytest.mark.parametrize("template", [CHATML, MODEL])
def test_another_spelling_of_a_role_is_refused_by_name(role: str, template: str) -> None:
    before = {"messages": [USER, {"role": role, "content": "x"}, USER, YO]}
    after = {"messages": [USER, YO, USER, {"role": role, "content": "x"}]}
    for record, place in ((before, 1), (after, 3)):
        for train_on in ("all", "last", "each"):
            message = rf"messages\[{place}\] has the unknown role '{role}', .*; rename .* assistant"
            refused(record, template, message, train_on=train_on)


def test_roles_that_the_template_names_are_its_own() -> None:
    record = chat("user: hi", "critic: no", "user: hi", "assistant: yo")
    assert trained_text(tokenize(record, MODEL), byte_tokenizer(MODEL)) == "yo<|im_end|>"
    refused(record, CHATML, "unknown role 'critic'")
    llama = tokenizer_for(templates()["llama3_1"], "<|eot_id|>")
    assert tokenize(chat("user: hi", "ipython: 3", "assistant: yo"), llama)["loss_mask"]
    gemma = tokenizer_for(templates()["gemma3"], "<eos>")
    refused(chat("user: hi", "model: no", "user: hi", "assistant: yo"), gemma, "role 'model'")


def test_a_dropped_message_is_named_with_its_role() -> None:
    drops = CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'developer' }}")
    refused(chat("developer: x", "user: hi", "assistant: yo"), drops,
            r"drops messages\[0\] content of the role 'developer'; set")  # fmt: skip


@pytest.mark.parametrize(
    "flag", ["weight", "train", "trainable", "training", "loss", "loss_weight"]
)
def test_flags_of_other_tools_select_turns(flag: str) -> None:
    tokenizer, other = byte_tokenizer(CHATML), "weight" if flag == "train" else "train"
    for off, on in ((0, 1), (False, True), (0.0, 1.0), (0, None)):
        record = {"messages": [USER, {**YO, flag: off}, USER, {**YO, "content": "b", flag: on}]}
        result = tokenize(record, tokenizer)
        assert trained_text(result, tokenizer) == "b<|im_end|>"
        shared = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo", flag: off},
                  {"from": "human", "value": "hi"}, {"from": "gpt", "value": "b"}]  # fmt: skip
        assert tokenize({"conversations": shared}, tokenizer) == result
    for value in (0.5, 2, "false", [0]):
        refused({"messages": [USER, {**YO, flag: value}]}, CHATML, rf"has {flag} .* to 0 or 1")
    refused({"messages": [USER, {**YO, flag: 0, other: 1}]}, CHATML, "contradict")


def parts(*flags: Any, **message: Any) -> dict[str, Any]:
    made = [{"type": "text", "text": f"p{i}", **of} for i, of in enumerate(flags)]
    return {"messages": [USER, YO, USER, {"role": "assistant", "content": made, **message}]}


def test_flags_of_parts_are_the_turns_or_refused() -> None:
    tokenizer = byte_tokenizer(CHATML)
    for off in ({"train": False}, {"weight": 0}, {"training": 0.0}):
        assert trained_text(tokenize(parts(off, off), tokenizer), tokenizer) == "yo<|im_end|>"
        for others in ((off, {}), ({}, off), (off, dict.fromkeys(off, 1))):
            refused(parts(*others), CHATML, r"messages\[3\] has parts .* trained in full or not")
        refused(parts(off, train=True), CHATML, "contradict each other")
    on = {"train": True}
    assert "p0p1" in trained_text(tokenize(parts(on, on), tokenizer), tokenizer)
    refused(parts({"weight": 0.5}), CHATML, r"messages\[3\] has weight of its parts 0.5")


@pytest.mark.parametrize("name", ["loss_scale", "training_detail", "train_detail"])
def test_flags_for_parts_of_a_turn_are_refused_by_name(name: str) -> None:
    for value in (0, 0.5, 1.0, [{"begin_offset": 0, "end_offset": 1, "train": False}]):
        for message in (USER, YO):
            record = {"messages": [USER, {**message, name: value}, YO]}
            refused(record, CHATML, rf"messages\[1\] has `{name}`, .*; remove it")
    assert tokenize({"messages": [USER, {**YO, name: None}]}, CHATML)["loss_mask"]


def test_flags_that_are_not_read_are_refused_by_name() -> None:
    names = ("masked", "step_loss_mask", "loss_mask", "weights", "loss_weights", "Train", "TRAIN",
             "is_train", "mask", "trained", "is_trainable", "no_train", "skip_loss", "lossScale",
             "Loss Weight")  # fmt: skip
    for name in names:
        message = rf"messages\[1\] has '{name}', .* not read; remove it, .* `train`, 1 or 0"
        for value in (0, True, 0.5, [0, 1], [False], np.bool_(False), np.zeros(2)):
            refused({"messages": [USER, {**YO, name: value}, USER, YO]}, CHATML, message)
        refused(parts({}, {name: 0}), CHATML, message.replace("1", "3", 1))
        shared = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo", name: False}]
        refused({"conversations": shared}, CHATML, message)
        for none in (None, [], [None], "on", {"a": 1}):
            assert tokenize({"messages": [USER, {**YO, name: none}]}, CHATML)["loss_mask"]
    others = {"num_constraints": 3, "glossary": [1], "timestamp": 1.5}
    assert tokenize({"messages": [USER, {**YO, **others}]}, CHATML)["loss_mask"]


def test_errors_of_a_provider_are_context() -> None:
    tokenizer = byte_tokenizer(CHATML)
    for error in (True, "529 overloaded", {"code": 529}):
        failed = {**YO, "content": "API Error", "teich_provider_error": error}
        record = {"messages": [USER, failed, USER, YO]}
        assert trained_text(tokenize(record, tokenizer), tokenizer) == "yo<|im_end|>"
        alone = {"messages": [USER, failed]}
        assert tokenize(alone, tokenizer)["skip_reason"] == "no_trained_tokens"
    for none in (None, False, {"code": None}):
        assert tokenize({"messages": [USER, {**YO, "teich_provider_error": none}]}, tokenizer) == (
            tokenize(SAID, tokenizer)
        )


# ---- variables of the template


@pytest.mark.parametrize(
    "name",
    ["chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors",
     "return_dict", "tokenizer_kwargs", "add_generation_prompt", "conversation",
     "self", "compiled_template"],
)  # fmt: skip
def test_arguments_of_apply_chat_template_are_no_variables(name: str) -> None:
    reads = CHATML + f"{{{{ {name} }}}}"
    for record in (SAID, {"prompt": [USER], "completion": [YO]}):
        refused(
            record | {"chat_template_kwargs": {name: NO_TAGS}}, reads, rf"has '{name}', .*remov"
        )
        if name != "chat_template":
            refused(record, reads, rf"has '{name}'", chat_template_kwargs={name: 1})
    pair = {"chosen": [USER, YO], "rejected": [USER, YO | {"content": "no"}],
            "chat_template_kwargs": {name: NO_TAGS}}  # fmt: skip
    with pytest.raises(DataError, match=f"example 0: `chosen`: .*has '{name}'"):
        tokenize_preferences(Dataset.from_list([pair]), byte_tokenizer(reads))


def test_variables_that_the_template_does_not_read_are_named_once(caplog: Any) -> None:
    template = CHATML + "{{ '' if enable_thinking }}{# preserve_thinking #}"
    for _ in range(2):
        for kwargs in ({"enable_thinkin": False}, {"preserve_thinking": True}, {"marker": 1}):
            tokenize(SAID | {"chat_template_kwargs": kwargs}, template)
        tokenize(SAID, template, chat_template_kwargs={"enable_thinking": False})
    assert [record.getMessage() for record in caplog.records] == [
        "chat_template_kwargs has 'enable_thinkin', which the chat template does not read; it "
        "has 'enable_thinking'",
        "chat_template_kwargs has 'preserve_thinking', which the chat template does not read",
        "chat_template_kwargs has 'marker', which the chat template does not read",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


# ---- null in arguments of a dataset

HAS_JSON = hasattr(datasets, "Json")
Json: Any = getattr(datasets, "Json", object)
TEXT = Value("string")


def calls_of(arguments: Any) -> Any:
    return List({"function": {"name": TEXT, "arguments": arguments}})


def message_of(calls: Any) -> Any:
    return List({"role": TEXT, "content": TEXT, "tool_calls": calls})


NULLS: dict[str, tuple[Any, Any, Any]] = {  # feature of messages, stored arguments, those kept
    "message": (List(Json()), {"a": None}, {"a": None}),
    "calls": (message_of(List(Json())), {"a": None}, {"a": None}),
    "function": (message_of(List({"function": Json()})), {"a": None}, {"a": None}),
    "arguments": (message_of(calls_of(Json())), {"a": None, "b": [None]}, {"a": None, "b": [None]}),
    "values": (message_of(calls_of({"a": Json(), "b": Json()})), {"a": {"x": None}},
               {"a": {"x": None}}),
    "struct": (message_of(calls_of({"a": TEXT, "b": TEXT})), {"a": "x"}, {"a": "x"}),
}  # fmt: skip


@pytest.mark.skipif(not HAS_JSON, reason="this version of datasets has no Json")
@pytest.mark.parametrize("where", NULLS)
def test_null_is_kept_where_the_feature_is_json(where: str) -> None:
    feature, stored, kept = NULLS[where]
    tokenizer = byte_tokenizer(CALLS.replace("arguments }}", "arguments | tojson }}"))

    def record(arguments: Any) -> Any:
        call = {"function": {"name": "f", "arguments": arguments}}
        return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]

    expected = tokenize({"messages": record(kept)}, tokenizer)["input_ids"]
    rows = Dataset.from_list([{"messages": record(stored)}], features=Features(messages=feature))
    found, _ = tokenize_chat_dataset(rows, tokenizer)
    assert tokenizer.decode(found[0]["input_ids"]) == tokenizer.decode(expected)
    assert audit(rows, tokenizer).num_tokens == len(expected)
    sides = Dataset.from_list([{"chosen": record(stored), "rejected": [USER, YO]}],
                              features=Features(chosen=feature, rejected=feature))  # fmt: skip
    assert tokenize_preferences(sides, tokenizer)[0][0]["input_ids"][0] == expected


# ---- ends and headers

ENDS_WITH_HEADER = (
    "{% for m in messages %}<|turn|>{{ m.role }}:{% if m.role == 'assistant' %}<|say|>{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}<|turn|>assistant:"
)


def test_a_template_that_ends_every_text_with_the_header_is_told_so() -> None:
    tokenizer = tokenizer_for(ENDS_WITH_HEADER, "<|end|>")
    refused(SAID, tokenizer, r"adds no header after a message of the user: it ends every text with "
            r"'<\|turn\|>assistant:'; set a tokenizer.chat_template")  # fmt: skip


APERTUS = (
    "{% set ns = namespace(open=false, result=false) %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ '<|assistant_start|>' if not ns.open }}"
    "{% set ns.open, ns.result = true, not m.tool_calls %}{{ m.content or '' }}"
    "{% if m.tool_calls %}<|tools_prefix|>{% for c in m.tool_calls %}{{ c.function.name }}: "
    "{{ c.function.arguments }}{% endfor %}<|tools_suffix|>{% endif %}"
    "{% elif m.role == 'tool' %}{{ '[' + m.content + ']' }}{% set ns.result = true %}"
    "{% else %}{{ '<|assistant_end|>' if ns.open }}{% set ns.open = false %}"
    "{{ '<|user_start|>' + m.content + '<|user_end|>' }}{% endif %}{% endfor %}"
    "{{ '<|assistant_end|>' if ns.open and ns.result and not add_generation_prompt }}"
    "{% if add_generation_prompt and not ns.open %}<|assistant_start|>{% endif %}"
)


def test_a_call_that_a_question_follows_trains_the_eos_behind_it() -> None:
    tokenizer = tokenizer_for(APERTUS, "<|assistant_end|>")
    call = with_call()["messages"]
    called = '<|tools_prefix|>f: {"a": "é"}<|tools_suffix|>'
    check(tokenize({"messages": [*call, USER, YO]}, tokenizer), tokenizer,
          "<|user_start|>hi<|user_end|><|assistant_start|>", called + "<|assistant_end|>",
          "<|user_start|>hi<|user_end|><|assistant_start|>", "yo<|assistant_end|>")  # fmt: skip
    result = {"role": "tool", "content": "3"}
    check(tokenize({"messages": [*call, result, YO]}, tokenizer), tokenizer,
          "<|user_start|>hi<|user_end|><|assistant_start|>", called, "[3]",
          "yo<|assistant_end|>")  # fmt: skip
