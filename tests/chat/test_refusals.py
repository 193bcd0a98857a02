"""How a record is refused, what a refusal costs, and where texts are in a rendering."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from datasets import Dataset
from transformers.utils.chat_template_utils import render_jinja_template

from tests.chat.chats import (
    CALLS,
    CHATML,
    RENDER,
    SAID,
    THINKS,
    TWO,
    USER,
    YO,
    byte_tokenizer,
    chat,
    for_assistant,
    refused,
    thinking,
    tokenize,
    trained_text,
)
from torch_collate_kit import tokenize_chat_dataset
from torch_collate_kit.errors import DataError

LOGS = "{{ 'log' if messages | selectattr('role', 'equalto', 'tool') | list }}" + CHATML


@pytest.mark.parametrize(
    ("character", "message"),
    [("\U000ffffd", r"character U\+FFFFD, .*; replace"), ("\ud83d", r"has U\+D83D, .*; replace")],
)
@pytest.mark.parametrize("place", ["question", "answer", "key", "end of a key", "argument", "tool"])
def test_characters_that_no_text_has_are_named(place: str, character: str, message: str) -> None:
    """Neither blamed on the template nor removed from the text."""
    texts = dict.fromkeys(("question", "answer", "key", "argument", "tool"), "x") | {
        place: f"a{character}b", "end of a key": f"a{character}"
    }  # fmt: skip
    key = texts[place if place == "end of a key" else "key"]
    call = {"function": {"name": "f", "arguments": {key: texts["argument"]}}}
    asked = {"role": "user", "content": texts["question"]}
    turns = [asked, {"role": "assistant", "content": texts["answer"], "tool_calls": [call]}]
    record = {"messages": turns, "tools": [{"name": "f", "description": texts["tool"]}]}
    template = "{{ tools | tojson }}" + CALLS.replace("arguments }}", "arguments | tojson }}")
    refused(record, template, message)


def test_characters_of_a_completion() -> None:
    """There is no mark without a template."""
    refused({"prompt": "x", "completion": "a\ud83db"}, CHATML, r"has U\+D83D, .*; replace")
    assert not tokenize({"prompt": "x", "completion": "\U000ffffd"}, CHATML)["skip_reason"]


@pytest.mark.parametrize("broken", ["{% if %}", "{{ 'a' | nofilter }}"])
def test_a_template_that_is_no_jinja_or_missing(broken: str) -> None:
    """The template is named, not the record: no DataError, no index, no roles."""
    for template in (broken, "{% generation %}{% endgeneration %}" + broken):
        tokenizer = byte_tokenizer("\n" + template)
        message = r"^the chat template is not valid Jinja, line 2: .*fix tokenizer\.chat_template$"
        with pytest.raises(ValueError, match=message) as caught:
            tokenize(SAID, tokenizer)
        assert not isinstance(caught.value, DataError)
        with pytest.raises(ValueError, match=message):
            tokenize_chat_dataset(Dataset.from_list([SAID]), tokenizer)
    with pytest.raises(ValueError, match=r"no chat_template; .*set tokenizer\.chat_template"):
        tokenize(SAID, byte_tokenizer(None))


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ("{{ range(m.content | int) }}", "OverflowError: Range too big"),
        ("{{ 10.0 ** (m.content | int) }}", "OverflowError"),
        ("{{ 1 / (m.content | int - 900000) }}", "ZeroDivisionError"),
        ("{{ 'x' * 10 ** 15 }}", "MemoryError"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
    ],
)
def test_errors_of_python_in_a_template_are_of_the_record(broken: str, error: str) -> None:
    template = CHATML.replace("{{ m.content }}", "{{ m.content }}" + broken)
    record = chat("user: 900000", "assistant: yo")
    message = rf"cannot render the roles \[user, assistant\]: {error}.*; change the record"
    refused(record, template, message)
    if "Overflow" in error:
        dataset = Dataset.from_list([chat("user: hi"), record])
        with pytest.raises(DataError, match=rf"example 1: .*{message}"):
            tokenize_chat_dataset(dataset, byte_tokenizer(template))


def test_a_template_that_needs_tools_is_given_them() -> None:
    for needs in (
        "{% for t in tools %}{{ t | tojson }}{% endfor %}",
        "{{ (tools | tojson) if tools else raise_exception('I want tools') }}",
    ):
        refused(TWO, needs + CHATML, "cannot render the roles .*; give its tools, in a column")
        assert not tokenize({**TWO, "tools": [{"name": "f"}]}, needs + CHATML)["skip_reason"]
    given = {**TWO, "tools": [{"name": "f"}]}
    refused(given, "{{ tools[0].function.name }}" + CHATML, "cannot render .*; change the record")
    hopeless = (
        "{% if not tools %}{{ raise_exception('no') }}{% endif %}{{ raise_exception('never') }}"
    )
    refused(TWO, hopeless + CHATML, "cannot render the roles .*; change the record")


def test_a_refusal_costs_no_more_than_the_record() -> None:
    """Advice for a long record is tried on a few of its turns, wherever they are."""
    renderings = []
    for turns in (10, 40):
        for thoughts in (["hm"] * turns, [None] * (turns - 3) + ["hm", "hm", None]):
            tokenizer = byte_tokenizer(THINKS)
            with patch(RENDER, side_effect=render_jinja_template) as spy:
                message = r"drops its reasoning_content; try train_on='each' \(an"
                refused(thinking(*thoughts), tokenizer, message)
            renderings.append(spy.call_count)
    assert tokenize(thinking(*["hm"] * 10), THINKS, train_on="each")
    assert renderings[:2] == renderings[2:]
    no_way = CHATML.replace("m.content", "m.content if m.role == 'user' or loop.last")
    refused(thinking(*[None] * 20), no_way, r"messages\[1\]: .* drops its content; try train_on")
    refused(thinking(*[None] * 20), CHATML.replace("m.content", "''"), r"drops .*; set a tokenizer")
    far = {"messages": [*thinking(*[None] * 20)["messages"], {"role": "tool", "content": "r"}, YO]}
    refused(far, LOGS, r"messages\[1\]: .* differently once .*; change the record")


def test_a_question_that_only_the_answer_makes_visible_is_refused() -> None:
    """The model would be asked without it."""
    answered = "m.content if m.role == 'assistant' or messages[-1].role == 'assistant'"
    template = CHATML.replace("m.content", answered)
    refused(
        SAID, template, r"messages\[1\]: .* renders what comes before this turn differently once"
    )


OPENS = CHATML.replace(
    "{{ m.content }}", for_assistant("<think></think>{{ m.content }}", "{{ m.content }}")
)


def opened_if(condition: str, before: str) -> str:
    """A template whose prompt opens and closes thinking on a condition; every answer has it."""
    header = f"assistant\n{{{{ '<think></think>' if {condition} }}}}{{% endif"
    return before + OPENS.replace("assistant\n{% endif", header)


DEEP = "{{ 'deep' if messages | length > 4 and messages[1].reasoning_content }}" + CHATML.replace(
    "{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}"
)


def weighed(role: str, **keys: str) -> dict[str, Any]:
    """The first answer is context alone, and so is what follows it."""
    context = [{**YO, **keys, "weight": 0}, {"role": role, "content": "a", "weight": 0}]
    return {"messages": [USER, *context, YO, USER, YO]}


@pytest.mark.parametrize(
    ("template", "records", "mode"),
    [
        (opened_if("tools", "{{ tools | tojson if tools }}"),
         [TWO, {**TWO, "tools": [{"name": "f"}]}], "all"),
        (opened_if("documents", "{% for d in documents or [] %}{{ d.text }}{% endfor %}"),
         [TWO, {**TWO, "documents": [{"text": "facts"}]}], "all"),
        (LOGS, [TWO, {"messages": [*TWO["messages"], {"role": "tool", "content": "r"}, YO]}],
         "all"),
        (DEEP, [weighed("user"), weighed("user", reasoning_content="hm")], "all"),
        (DEEP, [weighed("assistant"), weighed("assistant", reasoning_content="hm")], "all"),
        (  # as Qwen3: the last answer has thinking, and any that quotes its end
            CHATML.replace(
                "{{ m.content }}",
                "{{ '<think></think>' if m.role == 'assistant' and (loop.last or '</think>' in "
                "m.content) }}{{ m.content.split('</think>')[-1] }}",
            ),
            [chat("user: hi", f"assistant: {text}", "assistant: b") for text in ("x", "</think>y")],
            "last",
        ),
    ],
)  # fmt: skip
def test_what_is_known_of_a_turn_holds_in_its_context(
    template: str, records: list[dict[str, Any]], mode: Any
) -> None:
    """The same turn with and without tools, documents, and what is in other messages."""

    def outcome(tokenizer: Any, record: dict[str, Any]) -> Any:
        try:
            return tokenize(record, tokenizer, train_on=mode)
        except DataError as error:
            return str(error)

    alone = [outcome(byte_tokenizer(template), record) for record in records]
    assert alone[0] != alone[1]
    assert not alone[0]["skip_reason"]
    for order in ((0, 1), (1, 0)):
        tokenizer = byte_tokenizer(template)
        for i in (*order, *order):
            assert outcome(tokenizer, records[i]) == alone[i]


THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
CALLS_IN_JSON = (
    "{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "</call>{% endfor %}"
)
ORDERS = {  # whether the thinking is written before the text
    CHATML.replace("{{ m.content }}", THOUGHT + "{{ m.content }}" + CALLS_IN_JSON): True,
    CHATML.replace("{{ m.content }}", "{{ m.content }}" + THOUGHT + CALLS_IN_JSON): False,
}


@pytest.mark.parametrize("template", ORDERS)
def test_order_and_escapes_are_those_of_the_marks(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    for letter in "abcdef":
        call = {"function": {"name": f"f{letter}", "arguments": {"q": f'"{letter}"\n{letter}'}}}
        texts = {"content": f"answer {letter}", "reasoning_content": f"thought {letter}"}
        answer = {"role": "assistant", **texts}
        for more in ({}, {"tool_calls": [call]}):
            messages = [{"role": "user", "content": letter}, {**answer, **more}]
            result = tokenize({"messages": messages}, tokenizer, train_on="last")
            thought, said = f"<think>thought {letter}</think>", f"answer {letter}"
            whole = thought + said if ORDERS[template] else said + thought
            called = f"<call>f{letter} {json.dumps(call['function']['arguments'])}</call>"
            whole += called if more else ""
            assert trained_text(result, tokenizer) == whole + "<|im_end|>"


@pytest.mark.parametrize(
    "template",
    [
        # as long as what was there before, so that every text is where it was
        CHATML.replace("{{ m.role }}\n", "{{ m.role }}{{ '!' if 'x' in m.content else '\n' }}"),
        # after the end of everything that is known
        CHATML + "{% if 'x' in messages[-1].content %}{{ messages[-1].content }}{% endif %}",
    ],
)
def test_what_depends_on_a_text_is_refused_also_after_a_record_that_was_not(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    record, odd = (chat("user: hi", f"assistant: {text}") for text in ("abc", "axc"))
    before = tokenize(record, tokenizer)
    for other in (byte_tokenizer(template), tokenizer):
        refused(odd, other, r"changes messages|depends on its text|twice")
    assert tokenize(record, tokenizer) == before


def test_a_template_that_asks_for_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of an earlier record is no reason to refuse the next one."""
    tokenizer = byte_tokenizer("{{ strftime_now('%Y') }}" + CHATML)
    for hour in ("01", "02"):
        fixed = SimpleNamespace(now=lambda hour=hour: SimpleNamespace(strftime=lambda _: hour))
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", fixed)
        result = tokenize(SAID, tokenizer)
        assert tokenizer.decode(result["input_ids"]).startswith(hour)
