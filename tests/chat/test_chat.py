"""Masks written out by hand: which tokens are trained, what is read, skips, options."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, processors

from tests.chat.chats import (
    CALL,
    HEAD,
    NO_TAGS,
    SAID,
    TAGS,
    TOOL,
    USER,
    YO,
    byte_tokenizer,
    chat,
    check,
    slow_tokenizer,
    tokenize,
    with_call,
)
from tests.chat.families import tokenizer_for
from torch_collate_kit.chat import ChatOptions, tokenize_chat, tokenize_chat_dataset
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.errors import DataError

WAYS = ["generation tags", "prefixes", "generation tags, slow", "prefixes, slow"]


@pytest.fixture(scope="module", params=WAYS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """Every way to a mask; all must give the same one."""
    template = TAGS if "tags" in request.param else NO_TAGS
    return slow_tokenizer(template) if "slow" in request.param else byte_tokenizer(template)


@pytest.fixture(scope="module")
def tagged() -> Any:
    return byte_tokenizer(TAGS)


# ---- which tokens are trained


def test_all_assistant_turns(tokenizer: Any) -> None:
    example = chat("system: be kind", "user: hi", "assistant: yo", "user: bye", "assistant: é🙂")
    check(
        tokenize(example, tokenizer),
        tokenizer,
        "<s><|im_start|>system\nbe kind<|im_end|>\n" + HEAD.removeprefix("<s>"),
        "yo<|im_end|>",
        "\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n",
        "é🙂<|im_end|>",
        "\n",
    )


def test_offsets_of_characters_without_a_token_of_their_own() -> None:
    """Trimmed offsets, an emoji of four tokens, an empty turn: nothing more, nothing less."""
    template = (
        "{% for m in messages %}{{ m.role }}{% if m.role == 'user' %}{{ m.content }}{% else %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endif %}{% endfor %}"
        "{{ 'assistant' if add_generation_prompt }}"
    )
    trimming = byte_tokenizer(template)
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    for tokenizer in (byte_tokenizer(template), trimming):
        for text in ("yo", " yo", "yo 🙂", "🙂", ""):
            example = chat("user: hi", f"assistant: {text}", "user: a", "assistant: b")
            parts = (f"{text}<|im_end|>", "useraassistant", "b<|im_end|>")
            result = tokenize(example, tokenizer, allow_empty=True)
            check(result, tokenizer, "userhiassistant", *parts)


# ---- what is read

KIND = "<s><|im_start|>system\nbe kind<|im_end|>\n" + HEAD.removeprefix("<s>")
TOOLS = f"<s><|im_start|>tools\n{json.dumps([TOOL])}<|im_end|>\n" + HEAD.removeprefix("<s>")
LOUD = HEAD.replace("hi", "hi!")
PARTS = [{"type": "text", "text": text, "image_url": None} for text in "hi"]
ADD = {"instruction": "add", "output": "3"}


def answered(**keys: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "name": None, **keys}]}


READ: list[tuple[dict[str, Any], str, str]] = [
    (with_call(arguments='{"a": "é"}'), HEAD, '<calls>f {"a": "é"}'),
    (with_call(arguments='{"a": null}'), HEAD, '<calls>f {"a": null}'),  # written by the model
    (with_call(arguments={"b": None, "c": [{}]}), HEAD, '<calls>f {"b": null, "c": [{}]}'),
    (with_call(arguments=""), HEAD, "<calls>f {}"),
    (with_call(arguments=None), HEAD, "<calls>f {}"),
    (answered(tool_calls=json.dumps([CALL])), HEAD, '<calls>f {"a": "é"}'),
    (answered(), HEAD, ""),
    (answered(content=None, tool_calls=None), HEAD, ""),  # the template asks with `in`
    (answered(content="", tool_calls=[]), HEAD, ""),
    ({"messages": [{"role": "user", "content": PARTS}, YO]}, HEAD, "yo"),
    (SAID | {"tools": [TOOL]}, TOOLS, "yo"),
    (SAID | {"tools": json.dumps([TOOL])}, TOOLS, "yo"),
    (SAID | {"tools": [json.dumps(TOOL)]}, TOOLS, "yo"),
    (SAID | {"tools": [{**TOOL, "strict": None}]}, TOOLS, "yo"),
    *((SAID | {"tools": nothing}, HEAD, "yo") for nothing in (None, "", "[]", "null", [])),
    (SAID | {"system": "be kind"}, KIND, "yo"),
    (chat("system: be kind", "user: hi", "assistant: yo", system="be kind"), KIND, "yo"),
    (SAID | {"system": ""}, HEAD, "yo"),
    (SAID | {"system": None}, HEAD, "yo"),
    (SAID | {"chat_template_kwargs": {"mark": "!", "other": None}}, LOUD, "yo"),
    (SAID | {"chat_template_kwargs": '{"mark": "!"}'}, LOUD, "yo"),
    (ADD | {"input": "1 2"}, HEAD.replace("hi", "add\n\n1 2"), "3"),
    (ADD | {"input": ""}, HEAD.replace("hi", "add"), "3"),
    (ADD | {"input": None, "messages": None, "text": "x"}, HEAD.replace("hi", "add"), "3"),
]


@pytest.mark.parametrize(("record", "head", "turn"), READ)
def test_what_is_read(tokenizer: Any, record: dict[str, Any], head: str, turn: str) -> None:
    before = copy.deepcopy(record)
    result = tokenize(record, tokenizer, allow_empty=True)
    check(result, tokenizer, head, f"{turn}<|im_end|>", "\n")
    assert record == before


def test_columns_come_before_options(tokenizer: Any) -> None:
    tools, mark = {"tools": [TOOL]}, {"chat_template_kwargs": {"mark": "!"}}
    for record, options, head in (
        (SAID | tools, {"tools": [{"name": "other"}]}, TOOLS),
        (SAID | {"tools": None}, tools, TOOLS),
        (SAID | {"tools": []}, {"tools": json.dumps([TOOL])}, TOOLS),
        (SAID, mark, LOUD),
        (SAID | mark, {"chat_template_kwargs": {"mark": "?"}}, LOUD),
    ):
        check(tokenize(record, tokenizer, **options), tokenizer, head, "yo<|im_end|>", "\n")


def test_null_inside_tools_json_is_kept(tagged: Any) -> None:
    for tools in ('[{"default": null}]', ['{"default": null}']):
        ids = tokenize(SAID | {"tools": tools}, tagged)["input_ids"]
        assert '[{"default": null}]' in tagged.decode(ids)


def test_another_template_as_text(tagged: Any) -> None:
    """Whether there are tags is read from the template in use."""
    result = tokenize(SAID, tagged, chat_template=NO_TAGS)
    assert tagged.chat_template == TAGS
    check(result, tagged, HEAD, "yo<|im_end|>", "\n")


# ---- skips and truncation


def test_truncation_keeps_the_front(tokenizer: Any) -> None:
    full = tokenize(SAID, tokenizer)
    first, length = full["loss_mask"].index(1), len(full["input_ids"])
    for limit in range(2, length + 3):
        result = tokenize(SAID, tokenizer, max_length=limit, overflow="truncate")
        kept = limit if limit > first else 0
        assert result["skip_reason"] == ("" if kept else "nothing_left_after_truncation")
        assert result["input_ids"] == full["input_ids"][:kept]
        assert result["loss_mask"] == full["loss_mask"][:kept]
        assert result["num_cut_tokens"] == (max(0, length - limit) if kept else 0)


def test_overflow(tagged: Any) -> None:
    whole = tokenize(SAID, tagged)
    length = len(whole["input_ids"])
    for options in ({}, {"overflow": "raise"}):
        with pytest.raises(DataError, match=rf"^the text has {length} tokens, more than max_len"):
            tokenize(SAID, tagged, max_length=length - 1, **options)
    dropped = tokenize(SAID, tagged, max_length=length - 1, overflow="drop")
    empty = {"input_ids": [], "loss_mask": [], "num_cut_tokens": 0}
    assert dropped == {**empty, "skip_reason": "too_long"}
    for overflow in ("raise", "drop", "truncate"):
        assert tokenize(SAID, tagged, max_length=length, overflow=overflow) == whole  # it fits
        asked = tokenize(chat("user: " + "x" * 60), tagged, max_length=9, overflow=overflow)
        assert asked["skip_reason"] == "no_assistant_turn"


def test_the_first_token_does_not_count_as_trained() -> None:
    """Nothing predicts it; after another conversation in a row its label would be trained."""
    tokenizer = tokenizer_for("", "</s>")  # which adds no BOS
    one = tokenize({"prompt": "", "completion": "x"}, tokenizer)
    assert one["skip_reason"] == "no_trained_tokens"
    result = tokenize({"prompt": "", "completion": "xy"}, tokenizer)
    assert (result["loss_mask"], result["skip_reason"]) == ([1, 1], "")
    labels = tokenize({"prompt": "", "completion": "xy"}, tokenizer, labels=True)["labels"]
    assert labels == [-100, result["input_ids"][1]]


@pytest.mark.parametrize("options", [{}, {"train_on": "last"}, {"max_length": 50}])
def test_labels_say_what_the_mask_says(tokenizer: Any, options: dict[str, Any]) -> None:
    rows = []
    for record in (SAID, chat("user: hi"), chat("user: hi", "assistant: y", "assistant: b" * 9)):
        options = {"overflow": "truncate", **options}
        masked = tokenize(record, tokenizer, **options)
        labelled = tokenize(record, tokenizer, labels=True, **options)
        pairs = zip(masked["input_ids"], masked["loss_mask"], strict=True)
        labels = [token if kept else -100 for token, kept in pairs]
        assert labelled == {
            **{name: value for name, value in masked.items() if name != "loss_mask"},
            "labels": labels,
        }
        rows += [] if masked["skip_reason"] else [(masked, labelled)]
    for collate in (PaddedCollator(0), PackedCollator(0, max_tokens=512)):
        assert collate([row for row, _ in rows]) == collate([row for _, row in rows])


# ---- options and arguments


def test_wrong_options() -> None:
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "train_on must be one of 'all', 'last', 'each'; got", {"train_on": "first"}),
        (ValueError, "overflow must be one of 'raise', 'truncate', 'drop'", {"overflow": "split"}),
        (ValueError, "max_length must be at least 2, got 1; None means no", {"max_length": 1}),
        (TypeError, "max_length must be an int, got '10' of type", {"max_length": "10"}),
        (TypeError, "max_length must be an int, got 10.0 of type", {"max_length": 10.0}),
        (TypeError, "max_length must be an int, got True of type", {"max_length": True}),
        (TypeError, "labels must be True or False, got 'no'", {"labels": "no"}),
        (ValueError, "chat_template_kwargs has 'chat_template'",
         {"chat_template_kwargs": {"chat_template": NO_TAGS}}),
    ]  # fmt: skip
    for error, message, options in cases:
        with pytest.raises(error, match=message):
            ChatOptions(**options)
    assert ChatOptions(max_length=np.int64(40)) == ChatOptions(max_length=40)
    cut = tokenize(SAID, byte_tokenizer(TAGS), max_length=np.int64(40), overflow="truncate")
    assert type(cut["num_cut_tokens"]) is int


@pytest.mark.parametrize("record", [[USER, YO], None, Dataset.from_list([SAID])])
def test_not_a_record(tagged: Any, record: Any) -> None:
    message = rf"a record is a mapping with `messages`, got {type(record).__name__}; wrap a list"
    with pytest.raises(TypeError, match=message):
        tokenize_chat(record, tagged)


@pytest.mark.parametrize("other", ["gpt2", None, Tokenizer(models.BPE())])
def test_not_a_tokenizer(other: Any) -> None:
    message = rf"tokenizer must be a tokenizer or processor, got {type(other).__name__}; load"
    with pytest.raises(TypeError, match=message):
        tokenize_chat(SAID, other)
    with pytest.raises(TypeError, match=message):
        tokenize_chat_dataset(Dataset.from_list([SAID]), other)
