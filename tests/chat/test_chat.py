"""Masks written out by hand on a byte tokenizer, then the same laws on the real chats."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from torch_collate_kit.chat import ChatOptions, tokenize_chat, tokenize_chat_dataset
from torch_collate_kit.errors import DataError

TAGS = """{{- bos_token -}}
{%- if tools -%}{{- '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' -}}{%- endif -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\n' -}}
  {%- if message.role == 'assistant' -%}
    {%- generation -%}
    {{- message.content -}}
    {%- if 'tool_calls' in message -%}
      {{- '<calls>' -}}
      {%- for call in message.tool_calls -%}
        {{- call.function.name + ' ' + (call.function.arguments | tojson) -}}
      {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>' -}}
    {%- endgeneration -%}
    {{- '\n' -}}
  {%- else -%}
    {{- message.content + (mark or '') + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
NO_TAGS = TAGS.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
MARKS = ["<|im_start|>", "<|im_end|>"]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def byte_tokenizer(template: str | None, merges: list[tuple[str, str]] | None = None) -> Any:
    """One token a byte, and a post-processor that would add a second BOS if it were let."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    alphabet += [left + right for left, right in merges or []]
    vocab = {byte: i for i, byte in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges or []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    tokenizer.add_tokens(MARKS, special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def slow_tokenizer(template: str, kind: type[ByT5Tokenizer] = ByT5Tokenizer) -> Any:
    tokenizer = kind(bos_token="<s>")
    tokenizer.add_tokens(["<s>", *MARKS], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


WAYS = ["generation tags", "prefixes", "generation tags, slow", "prefixes, slow"]


@pytest.fixture(scope="module", params=WAYS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """Every way to a mask; all must give the same one."""
    template = TAGS if "tags" in request.param else NO_TAGS
    return slow_tokenizer(template) if "slow" in request.param else byte_tokenizer(template)


@pytest.fixture(scope="module")
def tagged() -> Any:
    return byte_tokenizer(TAGS)


def check(result: dict[str, Any], tokenizer: Any, *parts: str) -> None:
    """The parts are untrained, trained, untrained, ... text."""
    ids: list[int] = []
    mask: list[int] = []
    for i, part in enumerate(parts):
        part_ids = tokenizer(part, add_special_tokens=False)["input_ids"]
        ids += part_ids
        mask += [i % 2] * len(part_ids)
    assert tokenizer.decode(result["input_ids"]) == tokenizer.decode(ids)
    assert result == {
        "input_ids": ids,
        "loss_mask": mask,
        "num_cut_tokens": 0,
        "skip_reason": "",
    }


def chat(*turns: str, **columns: Any) -> dict[str, Any]:
    """ "user: hi" and so on."""
    messages = [dict(zip(("role", "content"), t.split(": ", 1), strict=True)) for t in turns]
    return {"messages": messages, **columns}


# ---- which tokens are trained


def test_all_assistant_turns(tokenizer: Any) -> None:
    example = chat("system: be kind", "user: hi", "assistant: yo", "user: bye", "assistant: é🙂")
    check(
        tokenize_chat(example, tokenizer),
        tokenizer,
        "<s><|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n",
        "yo<|im_end|>",
        "\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n",
        "é🙂<|im_end|>",
        "\n",
    )


def test_ids_by_hand() -> None:
    """The same as numbers: <s> 256, <|im_start|> 257, <|im_end|> 258, "\\n" 198."""
    tokenizer = byte_tokenizer("{% for m in messages %}{{ m.role[0] + m.content }}<|im_end|>\n"
                               "{% endfor %}{{ 'a' if add_generation_prompt }}")  # fmt: skip
    byte = {text: tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in "uaxy\n"}
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    result = tokenize_chat(chat("user: x", "assistant: yy"), tokenizer)
    u, a, x, y, newline = byte.values()
    assert result["input_ids"] == [u, x, end, newline, a, y, y, end, newline]
    assert result["loss_mask"] == [0, 0, 0, 0, 0, 1, 1, 1, 0]


def test_trailing_turns_are_cut_off(tokenizer: Any) -> None:
    example = chat("user: hi", "assistant: yo", "tool: 42", "user: thanks")
    expected = ("<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "yo<|im_end|>", "\n")
    check(tokenize_chat(example, tokenizer), tokenizer, *expected)
    check(tokenize_chat(example, tokenizer, ChatOptions(train_on="last")), tokenizer, *expected)


def test_assistant_speaks_first(tokenizer: Any) -> None:
    example = chat("assistant: hello", "user: hi", "assistant: yo")
    middle = "\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    header = "<s><|im_start|>assistant\n"
    parts = (header, "hello<|im_end|>", middle, "yo<|im_end|>", "\n")
    check(tokenize_chat(example, tokenizer), tokenizer, *parts)
    only = tokenize_chat(chat("assistant: hello"), tokenizer, ChatOptions(train_on="last"))
    check(only, tokenizer, header, "hello<|im_end|>", "\n")
    quoting = tokenize_chat(chat("assistant: a<|im_start|>assistant\nb"), tokenizer)
    check(quoting, tokenizer, header, "a<|im_start|>assistant\nb<|im_end|>", "\n")


class PairingByT5(ByT5Tokenizer):
    """A slow tokenizer for which "\\n\\n" is one token."""

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return super()._tokenize(text.replace("\n\n", "\1"))


@pytest.mark.parametrize("template", [TAGS, NO_TAGS])
def test_token_across_the_start_belongs_to_the_turn(template: str) -> None:
    """ "\\n\\n" is one token here: half header, half answer."""
    fast = byte_tokenizer(template, merges=[("Ċ", "Ċ")])
    for tokenizer, first in ((fast, "\n\n"), (slow_tokenizer(template, PairingByT5), "\1")):
        result = tokenize_chat(chat("user: hi", "assistant: \nyo"), tokenizer)
        pairs = zip(result["input_ids"], result["loss_mask"], strict=True)
        assert tokenizer.decode([i for i, mask in pairs if mask]) == first + "yo<|im_end|>"


def test_offsets_of_characters_without_a_token_of_their_own() -> None:
    """Trimmed offsets, an emoji of four tokens, an empty turn: nothing more, nothing less."""
    template = (
        "{% for m in messages %}{{ m.role }}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}"
        "{{ 'assistant' if add_generation_prompt }}"
    ).replace(
        "{{ m.role }}{% gen", "{{ m.role }}{% if m.role == 'user' %}{{ m.content }}{% else %}{% gen"
    )
    template = template.replace("{% endfor %}", "{% endif %}{% endfor %}")
    trimming = byte_tokenizer(template)
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    example = chat("user: hi", "assistant: ", "user: a", "assistant: b")
    for tokenizer in (byte_tokenizer(template), trimming):
        for text in ("yo", " yo", "yo 🙂", "🙂", ""):
            example["messages"][1]["content"] = text
            result = tokenize_chat(example, tokenizer, ChatOptions(allow_empty=True))
            parts = (f"{text}<|im_end|>", "useraassistant", "b<|im_end|>")
            check(result, tokenizer, "userhiassistant", *parts)


def test_turns_without_an_end_token_are_refused() -> None:
    """A model that is trained on them never stops."""
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
        "{{ 'assistant: ' if add_generation_prompt }}"
    )
    tokenizer = byte_tokenizer(template)
    with pytest.raises(DataError, match=r"messages\[1\]: .* no token that ends this turn; set a"):
        tokenize_chat(chat("user: hi", "assistant: yo", "user: a", "assistant: b"), tokenizer)


# ---- what is read


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}


def with_call(**changes: Any) -> dict[str, Any]:
    call = {**CALL, "function": {**CALL["function"], **changes}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [{"role": "user", "content": "hi"}, message]}


HEAD = "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        ('{"a": "é"}', '{"a": "é"}'),
        ('{"a": null}', '{"a": null}'),  # written by the model: kept
        ({"a": "é", "b": None, "c": [{}]}, '{"a": "é", "b": null, "c": [{}]}'),
        ("", "{}"),
        (None, "{}"),
        ("{broken", '"{broken"'),
        ("[1]", '"[1]"'),
    ],
)
def test_tool_call_arguments(tokenizer: Any, arguments: Any, rendered: str) -> None:
    result = tokenize_chat(with_call(arguments=arguments), tokenizer)
    check(result, tokenizer, HEAD, f"<calls>f {rendered}<|im_end|>", "\n")


def test_tool_calls_as_json(tagged: Any) -> None:
    example = with_call()
    example["messages"][1]["tool_calls"] = json.dumps([CALL])
    assert tokenize_chat(example, tagged) == tokenize_chat(with_call(), tagged)


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_null_content_renders_as_nothing(tokenizer: Any, content: dict[str, Any]) -> None:
    """And `tool_calls` that are None or empty are no tool calls: the template asks with `in`."""
    for extra in ({}, {"tool_calls": None}, {"tool_calls": []}):
        answer = {"role": "assistant", "name": None, **content, **extra}
        example = {"messages": [{"role": "user", "content": "hi"}, answer]}
        result = tokenize_chat(example, tokenizer, ChatOptions(allow_empty=True))
        check(result, tokenizer, HEAD, "<|im_end|>", "\n")


def test_content_parts(tokenizer: Any) -> None:
    """Parts that are only text are the same as their text."""
    part = {"type": "text", "text": "h", "image_url": None}
    parts = [part, {**part, "text": "i"}]
    example = {"messages": [{"role": "user", "content": parts}, *chat("assistant: yo")["messages"]]}
    check(tokenize_chat(example, tokenizer), tokenizer, HEAD, "yo<|im_end|>", "\n")


@pytest.mark.parametrize(
    "tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], [{**TOOL, "strict": None}]]
)
def test_tools(tokenizer: Any, tools: Any) -> None:
    example = chat("user: hi", "assistant: yo")
    head = f"<s><|im_start|>tools\n{json.dumps([TOOL])}<|im_end|>\n" + HEAD.removeprefix("<s>")
    for result in (
        tokenize_chat({**example, "tools": tools}, tokenizer),
        tokenize_chat(
            {**example, "tools": tools}, tokenizer, ChatOptions(tools=[{"name": "other"}])
        ),
        tokenize_chat({**example, "tools": None}, tokenizer, ChatOptions(tools=tools)),
        tokenize_chat({**example, "tools": []}, tokenizer, ChatOptions(tools=tools)),
    ):
        check(result, tokenizer, head, "yo<|im_end|>", "\n")


@pytest.mark.parametrize("tools", [None, "", "[]", "null", []])
def test_no_tools(tagged: Any, tools: Any) -> None:
    example = chat("user: hi", "assistant: yo", tools=tools)
    check(tokenize_chat(example, tagged), tagged, HEAD, "yo<|im_end|>", "\n")


def test_null_inside_tools_json_is_kept(tagged: Any) -> None:
    for tools in ('[{"default": null}]', ['{"default": null}']):
        ids = tokenize_chat(chat("user: hi", "assistant: yo", tools=tools), tagged)["input_ids"]
        assert '[{"default": null}]' in tagged.decode(ids)


def test_system_column(tokenizer: Any) -> None:
    head = "<s><|im_start|>system\nbe kind<|im_end|>\n" + HEAD.removeprefix("<s>")
    example = chat("user: hi", "assistant: yo", system="be kind")
    check(tokenize_chat(example, tokenizer), tokenizer, head, "yo<|im_end|>", "\n")
    both = chat("system: be kind", "user: hi", "assistant: yo", system="be kind")
    check(tokenize_chat(both, tokenizer), tokenizer, head, "yo<|im_end|>", "\n")
    for nothing in ("", None):
        result = tokenize_chat({**example, "system": nothing}, tokenizer)
        check(result, tokenizer, HEAD, "yo<|im_end|>", "\n")


def test_chat_template_kwargs(tokenizer: Any) -> None:
    example = chat("user: hi", "assistant: yo")
    marked = HEAD.replace("hi", "hi!")
    result = tokenize_chat(example, tokenizer, ChatOptions(chat_template_kwargs={"mark": "!"}))
    check(result, tokenizer, marked, "yo<|im_end|>", "\n")
    for own in ({"mark": "!", "other": None}, '{"mark": "!"}'):
        result = tokenize_chat(
            {**example, "chat_template_kwargs": own},
            tokenizer,
            ChatOptions(chat_template_kwargs={"mark": "?"}),
        )
        check(result, tokenizer, marked, "yo<|im_end|>", "\n")


def test_another_template_as_text(tagged: Any) -> None:
    """Whether there are tags is read from the template in use."""
    before = tagged.chat_template
    options = ChatOptions(chat_template=NO_TAGS)
    result = tokenize_chat(chat("user: hi", "assistant: yo"), tagged, options)
    assert tagged.chat_template == before
    own = {"chat_template_kwargs": {"chat_template": NO_TAGS}}
    assert tokenize_chat(chat("user: hi", "assistant: yo") | own, tagged) == result
    with pytest.raises(ValueError, match="chat_template_kwargs has 'chat_template'"):
        ChatOptions(chat_template_kwargs={"chat_template": NO_TAGS})
    check(result, tagged, HEAD, "yo<|im_end|>", "\n")


@pytest.mark.parametrize(
    ("columns", "prompt"),
    [
        ({"instruction": "add", "input": "1 2"}, "add\n\n1 2"),
        ({"instruction": "add", "input": ""}, "add"),
        ({"instruction": "add", "input": None, "messages": None}, "add"),
        ({"instruction": "add", "text": "ignored"}, "add"),
    ],
)
def test_alpaca(tokenizer: Any, columns: dict[str, Any], prompt: str) -> None:
    result = tokenize_chat({**columns, "output": "3"}, tokenizer)
    check(result, tokenizer, HEAD.replace("hi", prompt), "3<|im_end|>", "\n")


def test_example_is_not_changed(tokenizer: Any) -> None:
    example = with_call()
    example |= {"tools": [{**TOOL, "strict": None}], "system": "s", "chat_template_kwargs": {}}
    before = copy.deepcopy(example)
    tokenize_chat(example, tokenizer)
    assert example == before


# ---- skips and truncation


@pytest.mark.parametrize(
    "example",
    [
        {"messages": []},
        chat("user: hi"),
        chat("system: s", "user: hi", "tool: 3"),
        {"instruction": "hi", "output": None},
        {"instruction": "hi"},
    ],
)
def test_no_assistant_turn(tokenizer: Any, example: dict[str, Any]) -> None:
    assert tokenize_chat(example, tokenizer) == {
        "input_ids": [],
        "loss_mask": [],
        "num_cut_tokens": 0,
        "skip_reason": "no_assistant_turn",
    }


def test_truncation_keeps_the_front(tokenizer: Any) -> None:
    example = chat("user: hi", "assistant: yo")
    full = tokenize_chat(example, tokenizer)
    first = full["loss_mask"].index(1)
    length = len(full["input_ids"])
    for max_length in range(2, length + 3):
        result = tokenize_chat(
            example, tokenizer, ChatOptions(max_length=max_length, overflow="truncate")
        )
        if max_length <= first:
            assert result["skip_reason"] == "nothing_left_after_truncation"
            assert result["input_ids"] == result["loss_mask"] == []
            assert result["num_cut_tokens"] == 0
        else:
            assert result["skip_reason"] == ""
            assert result["input_ids"] == full["input_ids"][:max_length]
            assert result["loss_mask"] == full["loss_mask"][:max_length]
            assert result["num_cut_tokens"] == max(0, length - max_length)


def test_the_first_token_does_not_count_as_trained() -> None:
    """Nothing predicts it."""
    tokenizer = byte_tokenizer(None)
    assert tokenize_chat({"prompt": "", "completion": "x"}, tokenizer)["skip_reason"] == (
        "no_trained_tokens"
    )
    result = tokenize_chat({"prompt": "", "completion": "xy"}, tokenizer)
    assert (result["loss_mask"], result["skip_reason"]) == ([1, 1], "")


def test_template_that_marks_nothing(tagged: Any) -> None:
    options = ChatOptions(chat_template=TAGS.replace("message.role == 'assistant'", "false"))
    result = tokenize_chat(chat("user: hi", "assistant: x"), tagged, options)
    assert result["skip_reason"] == "no_trained_tokens"


# ---- errors


USER = {"role": "user", "content": "hi"}
YO = {"role": "assistant", "content": "yo"}


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"messages": "[]"}, r"`messages` must be a list of dicts, got str; decode a JSON string"),
        (
            {"messages": {"role": ["user"]}},
            r"got dict; .*turn a dict of lists into a list of dicts",
        ),
        ({"messages": [USER, "yo"]}, r"messages\[1\] must be a dict with a `role`.*got str"),
        ({"messages": [{"from": "human"}]}, r"messages\[0\].*got keys \['from'\]; rename .*ShareG"),
        ({"messages": [{"role": 3, "content": ""}]}, r"messages\[0\] must be .* `role` string"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\] `content` must .* got 3"),
        ({"messages": [{**YO, "tool_calls": 3}]}, r"messages\[0\] `tool_calls` must be a list of"),
        ({"messages": [{**YO, "tool_calls": "[{"}]}, r"`tool_calls`: invalid JSON '\[\{'.*fix it"),
        ({"messages": [USER, YO], "tools": TOOL}, r"`tools` must be a list of dicts .*got \{'type"),
        (
            {"messages": [USER, YO], "tools": [3]},
            r"`tools` must be .* got \[3\]; .*get_json_schema",
        ),
        ({"messages": [USER, YO], "tools": ["f("]}, r"`tools`: invalid JSON 'f\(' \(Expecting"),
        ({"messages": [USER, YO], "tools": '{"name": "f"}'}, r"`tools` must be a list of dicts"),
        ({"messages": [USER, YO], "system": 3}, r"`system` must be a string, got int; convert it"),
        (chat("system: a", "assistant: b", system="c"), r"`system` column and a system .* differ"),
        ({"messages": [USER, YO], "chat_template_kwargs": 3}, r"`chat_template_kwargs` must be"),
        ({"instruction": 3, "output": "x"}, r"`instruction` must be a string, got int; convert it"),
        ({"instruction": "x", "output": ["y"]}, r"`output` must be a string, got list; convert it"),
        (
            {"messages": None, "text": "x"},
            r"no `messages` and no `instruction` .* columns \['text'\]; rename",
        ),
        (
            {"messages": [USER, {**YO, "function_call": {"name": "f", "arguments": "{}"}}]},
            r"messages\[1\] has a `function_call`, .*; convert it to `tool_calls`: \[\{'type'",
        ),
        (
            {"instruction": "x", "context": "y", "response": "z", "output": None},
            r"a `response` but no `output`; rename `response` to `output` \(and `context`",
        ),
    ],
)
def test_bad_records(tagged: Any, example: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        tokenize_chat(example, tagged)


@pytest.mark.parametrize("role", ["gpt", "model", "bot", "Assistant", "chatgpt", "human"])
def test_unknown_role_instead_of_an_assistant(tagged: Any, role: str) -> None:
    """A role of the user's own is fine where there is an assistant, and a skip is no error."""
    message = rf"messages\[1\] has the unknown role '{role}', .* rename .* answers to assistant"
    with pytest.raises(DataError, match=message):
        tokenize_chat(chat("user: hi", f"{role}: yo"), tagged)
    assert tokenize_chat(chat(f"{role}: hi", "assistant: yo"), tagged)["skip_reason"] == ""
    known = chat("system: a", "developer: b", "user: c", "tool: d", "function: e")
    assert tokenize_chat(known, tagged)["skip_reason"] == "no_assistant_turn"


def test_turns_are_trained_in_full_or_not_at_all(tagged: Any) -> None:
    for turn, message in (
        ({"weight": 0.5}, r"messages\[1\] has weight 0.5, but .*; set `weight` to 0 or 1"),
        ({"weight": "0"}, r"messages\[1\] has weight '0'"),
        ({"weight": 1, "train": False}, r"messages\[1\] has .* which contradict .*; keep one"),
    ):
        with pytest.raises(DataError, match=message):
            tokenize_chat({"messages": [USER, {**YO, **turn}]}, tagged)


def test_keys_that_say_what_is_done_anyway(tokenizer: Any) -> None:
    answer = {**YO, "weight": 1, "train": True, "trainable": None, "function_call": None}
    example = {"messages": [{**USER, "weight": 0, "train": False}, answer]}
    check(tokenize_chat(example, tokenizer), tokenizer, HEAD, "yo<|im_end|>", "\n")
    filled_by_arrow = {**answer, "function_call": {"name": None}}
    result = tokenize_chat({"messages": [USER, filled_by_arrow]}, tokenizer)
    check(result, tokenizer, HEAD, "yo<|im_end|>", "\n")


@pytest.mark.parametrize("broken", ["{% if %}", "{{ 'a' | nofilter }}"])
def test_template_that_is_no_jinja(broken: str) -> None:
    """The template is named, not the record: no DataError, no index, no roles."""
    for template in (broken, "{% generation %}{% endgeneration %}" + broken):
        tokenizer = byte_tokenizer("\n" + template)
        message = r"^the chat template is not valid Jinja, line 2: .*fix tokenizer\.chat_template$"
        with pytest.raises(ValueError, match=message) as caught:
            tokenize_chat({"messages": [USER, YO]}, tokenizer)
        assert not isinstance(caught.value, DataError)
        with pytest.raises(ValueError, match=message):
            tokenize_chat_dataset(Dataset.from_list(MIXED), tokenizer)


def test_template_that_refuses() -> None:
    tokenizer = byte_tokenizer("{{ raise_exception('roles must alternate') }}")
    message = (
        r"cannot render the roles \[user, assistant\]: roles must alternate; change the record"
    )
    with pytest.raises(DataError, match=message):
        tokenize_chat({"messages": [USER, YO]}, tokenizer)


@pytest.mark.parametrize("form", [json.dumps, lambda arguments: arguments])
def test_template_that_joins_arguments_as_text(form: Any) -> None:
    joined = NO_TAGS.replace("(call.function.arguments | tojson)", "call.function.arguments")
    arguments = {"a": "é", "b": None}
    result = tokenize_chat(with_call(arguments=form(arguments)), byte_tokenizer(joined))
    text = (
        json.dumps(arguments) if form is json.dumps else json.dumps(arguments, ensure_ascii=False)
    )
    check(result, byte_tokenizer(joined), HEAD, f"<calls>f {text}<|im_end|>", "\n")


def test_wrong_options(tagged: Any) -> None:
    example = {"messages": [USER, YO]}
    with pytest.raises(ValueError, match="train_on must be one of 'all', 'last', 'each'; got"):
        tokenize_chat(example, tagged, ChatOptions(train_on="first"))
    with pytest.raises(
        ValueError, match="max_length must be at least 2, got 1; None means no limit"
    ):
        tokenize_chat(example, tagged, ChatOptions(max_length=1))
    with pytest.raises(ValueError, match=r"no chat_template; .*set tokenizer\.chat_template"):
        tokenize_chat(example, byte_tokenizer(None))
    message = "`chat_template_kwargs` has 'tokenize', which tokenize_chat sets itself; remove it"
    with pytest.raises(DataError, match=message):
        tokenize_chat(
            example, byte_tokenizer(NO_TAGS), ChatOptions(chat_template_kwargs={"tokenize": True})
        )


@pytest.mark.parametrize("example", [[USER, YO], None, Dataset.from_list([{"messages": [USER]}])])
def test_not_a_record(tagged: Any, example: Any) -> None:
    message = rf"a record is a mapping with `messages`, got {type(example).__name__}; wrap a list"
    with pytest.raises(TypeError, match=message):
        tokenize_chat(example, tagged)


@pytest.mark.parametrize("other", ["gpt2", None, Tokenizer(models.BPE())])
def test_not_a_tokenizer(other: Any) -> None:
    message = rf"tokenizer must be a tokenizer or processor, got {type(other).__name__}; load"
    with pytest.raises(TypeError, match=message):
        tokenize_chat({"messages": [USER, YO]}, other)
    with pytest.raises(TypeError, match=message):
        tokenize_chat_dataset(Dataset.from_list(MIXED), other)


def test_max_length_is_an_integer() -> None:
    for wrong in ("10", 10.0, True):
        message = rf"max_length must be an int, got {wrong!r} of type .*; None means no limit"
        with pytest.raises(TypeError, match=message):
            ChatOptions(max_length=wrong)
    assert ChatOptions(max_length=np.int64(40)) == ChatOptions(max_length=40)


# ---- whole datasets


MIXED = [
    chat("user: hi", "assistant: yo"),
    chat("user: hi"),
    chat("user: hi", "assistant: yo", "user: a", "assistant: b"),
    chat("user: " + "x" * 60, "assistant: yo"),
    chat("user: bye", "assistant: " + "z" * 60),
    chat("user: hi", "assistant: last"),
]


@pytest.mark.parametrize("num_proc", [None, 2])
def test_dataset(
    tagged: Any,
    num_proc: int | None,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = Dataset.from_list([{**row, "id": i} for i, row in enumerate(MIXED)])
    options: Any = {"max_length": 60, "overflow": "truncate"}
    with (
        caplog.at_level(logging.WARNING, logger="torch_collate_kit.chat"),
        patch.object(Dataset, "map", autospec=True, side_effect=Dataset.map) as spy,
    ):
        tokenized, skips = tokenize_chat_dataset(
            source, tagged, ChatOptions(**options), num_proc=num_proc
        )
    assert spy.call_args_list[0].kwargs["num_proc"] == num_proc
    assert "Tokenizing chats" in capsys.readouterr().err  # the progress bar
    alone = [tokenize_chat(row, tagged, ChatOptions(**options)) for row in MIXED]
    kept = [row for row in alone if not row["skip_reason"]]
    assert len(kept) == 4
    assert tokenized["input_ids"] == [row["input_ids"] for row in kept]
    assert tokenized["loss_mask"] == [row["loss_mask"] for row in kept]
    assert skips == Counter(no_assistant_turn=1, nothing_left_after_truncation=1)
    assert tokenized["num_cut_tokens"] == [row["num_cut_tokens"] for row in kept]
    assert tokenized.column_names == ["input_ids", "loss_mask", "num_cut_tokens"]
    assert tokenized.features["input_ids"].feature.dtype == "int32"
    assert tokenized.features["loss_mask"].feature.dtype == "int8"
    assert tokenized._indices is None
    (cut,) = [row["num_cut_tokens"] for row in kept if row["num_cut_tokens"]]
    assert [record.getMessage() for record in caplog.records] == [
        f"cut {cut} tokens off 1 of 6 examples",
        "skipped 2 of 6 examples: {'no_assistant_turn': 1, 'nothing_left_after_truncation': 1}",
    ]
    assert source.column_names == ["messages", "id"]


def test_dataset_passes_every_option_on(tagged: Any) -> None:
    options: dict[str, Any] = {
        "train_on": "last",
        "max_length": 180,
        "overflow": "truncate",
        "tools": [TOOL],
        "chat_template_kwargs": {"mark": "!"},
    }
    row = {"messages": MIXED[2]["messages"] + with_call()["messages"]}
    expected = tokenize_chat(row, tagged, ChatOptions(**options))
    assert expected["num_cut_tokens"] > 0
    assert sum(expected["loss_mask"]) > 0
    tokenized, _ = tokenize_chat_dataset(Dataset.from_list([row]), tagged, ChatOptions(**options))
    assert tokenized[0] == {k: found for k, found in expected.items() if k != "skip_reason"}
    for name in options:
        default: dict[str, Any] = {"overflow": "drop"} | {
            k: v for k, v in options.items() if k != name
        }
        assert tokenize_chat(row, tagged, ChatOptions(**default)) != expected, name


def test_arrow_fills_in_what_is_missing(tokenizer: Any) -> None:
    """Rows of one table share their keys; each must come out as if it were alone."""
    rows = [
        {**with_call(), "tools": [TOOL], "system": None, "instruction": None, "output": None},
        {**chat("user: hi", "assistant: yo"), "tools": None, "system": "be kind"},
        {"messages": None, "instruction": "hi", "output": "yo"},
        {**with_call(arguments={"q": 1}), "tools": None},
    ]
    for group in (rows[:3], rows[3:]):
        tokenized, skips = tokenize_chat_dataset(Dataset.from_list(group), tokenizer)
        assert not skips
        expected = [tokenize_chat(row, tokenizer)["input_ids"] for row in group]
        assert tokenized["input_ids"] == expected


@pytest.mark.parametrize("num_proc", [None, 2])
def test_errors_name_the_example(tagged: Any, num_proc: int | None) -> None:
    rows = [*MIXED, {"messages": [{"role": None, "content": "x"}]}]
    with pytest.raises(DataError, match=r"example 6: messages\[0\] must be a dict with a `role`"):
        tokenize_chat_dataset(Dataset.from_list(rows), tagged, num_proc=num_proc)


def test_nothing_kept(tagged: Any) -> None:
    rows = [chat("user: hi"), chat("user: hi"), chat("user: " + "x" * 60, "assistant: yo")]
    counts = "2 with no_assistant_turn, 1 with too_long"
    message = f"^all 3 examples are skipped: {counts}; a record needs an assistant"
    with pytest.raises(DataError, match=message):
        tokenize_chat_dataset(Dataset.from_list(rows), tagged, ChatOptions(max_length=60))


def test_empty_dataset(tagged: Any) -> None:
    tokenized, skips = tokenize_chat_dataset(Dataset.from_list(MIXED).select([]), tagged)
    assert (len(tokenized), skips) == (0, Counter())
    assert tokenized.column_names == ["input_ids", "loss_mask"]
    assert tokenized.features["input_ids"].feature.dtype == "int32"


def test_dataset_with_a_format(tagged: Any) -> None:
    source = Dataset.from_list(MIXED[:1])
    plain, _ = tokenize_chat_dataset(source, tagged)
    formatted, _ = tokenize_chat_dataset(source.with_format("numpy"), tagged)
    assert formatted[0] == plain[0]


def test_second_run_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A used tokenizer and a fresh one have the same fingerprint; another option has not."""
    path, cache = tmp_path / "rows.jsonl", tmp_path / "cache"
    path.write_text("\n".join(json.dumps(row) for row in MIXED))
    used = byte_tokenizer(TAGS)

    def run(tokenizer: Any, **options: Any) -> list[list[int]]:
        source = load_dataset("json", data_files=str(path), cache_dir=str(cache), split="train")
        return list(
            tokenize_chat_dataset(source, tokenizer, ChatOptions(**options))[0]["loss_mask"]
        )

    first = run(used)
    monkeypatch.delattr("torch_collate_kit.chat.dataset.tokenize_records")  # whoever maps now fails
    assert run(used) == run(byte_tokenizer(TAGS)) == first
    with pytest.raises(NameError, match="tokenize_records"):
        run(used, train_on="last")


def test_only_datasets(tagged: Any) -> None:
    stream = Dataset.from_list(MIXED).to_iterable_dataset()
    with pytest.raises(TypeError, match=r"got IterableDataset; .*stream\.map\(tokenize_chat"):
        tokenize_chat_dataset(stream, tagged)
    with pytest.raises(ValueError, match="train_on must be"):
        tokenize_chat_dataset(Dataset.from_list(MIXED), tagged, ChatOptions(train_on="x"))


def test_stream_as_the_error_says(tagged: Any) -> None:
    stream = Dataset.from_list(MIXED).to_iterable_dataset()
    stream = stream.map(tokenize_chat, fn_kwargs={"tokenizer": tagged}, remove_columns=["messages"])
    rows = list(stream.filter(lambda row: not row["skip_reason"]))
    assert len(rows) == 5
    assert rows[0] == tokenize_chat(MIXED[0], tagged)


# ---- real chats


def answer_text(message: dict[str, Any]) -> str:
    """What the shipped template writes for an assistant message, without the template."""
    text = message["content"] or ""
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        text += "\n" if text else ""
        name = call["function"]["name"]
        text += f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return text + "<|im_end|>"


def trained_texts(tokenizer: Any, result: dict[str, Any]) -> list[str]:
    """The text of every run of trained tokens."""
    runs: list[list[int]] = []
    before = 0
    for token, mask in zip(result["input_ids"], result["loss_mask"], strict=True):
        if mask and not before:
            runs.append([])
        if mask:
            runs[-1].append(token)
        before = mask
    return [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs]


@pytest.fixture(scope="module")
def mistral(shared_data: Path) -> Any:
    return AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "mistral-32k-chatml")


@pytest.fixture(scope="module")
def mistral_without_tags(mistral: Any) -> Any:
    tokenizer = copy.deepcopy(mistral)
    for tag in ("{%- generation -%}", "{%- endgeneration -%}"):
        assert tag in tokenizer.chat_template
        tokenizer.chat_template = tokenizer.chat_template.replace(tag, "")
    return tokenizer


EVERY = bool(os.environ.get("CHECK_EVERY_CHAT"))  # else a part of each file, for time
FILES = {
    "gsm8k_train_2k.jsonl": 4,
    "chat_tools_tm4_900.jsonl": 2,
    "chat_tools_tau_airline_128.jsonl": 2,
    "chat_long_squality_50.jsonl": 7,
}


@pytest.mark.parametrize("name", FILES)
def test_real_chats(shared_data: Path, mistral: Any, mistral_without_tags: Any, name: str) -> None:
    lines = (
        (shared_data / name)
        .read_text(encoding="utf-8")
        .splitlines()[:: 1 if EVERY else FILES[name]]
    )
    tools = None
    if "tau" in name:
        tools = (shared_data / "chat_tools_tau_airline.tools.json").read_text(encoding="utf-8")
    for i, line in enumerate(lines):
        example = json.loads(line)
        answers = [answer_text(m) for m in example["messages"] if m["role"] == "assistant"]
        result = tokenize_chat(example, mistral, ChatOptions(tools=tools))
        assert trained_texts(mistral, result) == answers, i
        if i % 8 and not EVERY:
            continue
        last = tokenize_chat(example, mistral, ChatOptions(tools=tools, train_on="last"))
        assert last["input_ids"] == result["input_ids"]
        assert trained_texts(mistral, last) == answers[-1:], i
        assert tokenize_chat(example, mistral_without_tags, ChatOptions(tools=tools)) == result, i
        prefix = tokenize_chat(
            example, mistral_without_tags, ChatOptions(tools=tools, train_on="last")
        )
        assert prefix == last, i
