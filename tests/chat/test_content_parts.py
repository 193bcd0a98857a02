"""Contents that are lists of parts: what arrives is trained, what would be lost is refused."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from tests.chat.chats import (
    CHATML,
    NO_TAGS,
    USER,
    YO,
    byte_tokenizer,
    refused,
    tokenize,
    trained_text,
)
from torch_collate_kit import tokenize_chat_dataset
from torch_collate_kit.errors import DataError

SAYS = {"type": "text", "text": "yo"}
THINKS = {"type": "thinking", "thinking": "hm", "signature": "x1"}
TEXT = "{{ m.content }}"


def template(part: str, before: str = "") -> str:
    """ChatML whose contents may be lists; ``part`` writes a part that is no text."""
    content = (
        f"{before}{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}"
        "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}"
        f"{part}{{% endif %}}{{% endfor %}}{{% endif %}}"
    )
    return CHATML.replace(TEXT, content)


BY_KEY = template("", "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}")
BY_PART = template("{% if p.type == 'thinking' %}[{{ p.thinking }}]{% endif %}")
TEXT_ONLY = template("")
JOINED = CHATML.replace(TEXT, "{{ '' + m.content }}")


def trained(content: Any, tokenizer: Any, **keys: Any) -> str:
    record = {"messages": [USER, {"role": "assistant", "content": content, **keys}]}
    found = tokenize(record, tokenizer)
    if not isinstance(content, str):  # a column of Arrow holds one type
        content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in content]
        record["messages"][0] = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
        record["messages"][1] = {**record["messages"][1], "content": content}
    whole, _ = tokenize_chat_dataset(Dataset.from_list([record]), tokenizer)
    assert whole["input_ids"] == [found["input_ids"]]
    return trained_text(found, tokenizer)


@pytest.mark.parametrize("source", [BY_KEY, BY_PART], ids=["by key", "by part"])
@pytest.mark.parametrize(
    ("content", "keys"),
    [
        ([THINKS, SAYS], {}),
        ([THINKS, "yo"], {}),
        ([{"type": "thinking", "text": "hm"}, SAYS], {}),
        ([{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, SAYS], {}),
        ([THINKS, SAYS], {"reasoning_content": "hm"}),
        ("yo", {"reasoning_content": "hm"}),
        ([SAYS], {"thinking": "hm"}),
    ],
)
def test_thinking_arrives_in_the_form_of_the_template(
    source: str, content: Any, keys: dict[str, Any]
) -> None:
    assert trained(content, byte_tokenizer(source), **keys) == "[hm]yo<|im_end|>"


def test_thinking_that_is_written_beside_calls_alone() -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}<|im_end|>"
    source = BY_PART.replace("p.type == 'thinking'", "p.type == 'thinking' and m.tool_calls")
    tokenizer = byte_tokenizer(source.replace("<|im_end|>", calls))
    found = trained([THINKS, SAYS], tokenizer, tool_calls=[{"name": "f", "arguments": {}}])
    assert found == "[hm]yof<|im_end|>"


@pytest.mark.parametrize("source", [BY_PART, BY_KEY], ids=["by part", "by key"])
def test_earlier_thinking_is_written_where_the_template_writes_it(source: str) -> None:
    """Not dropped because the thinking of an untrained turn may be."""
    first = {"role": "assistant", "content": [THINKS, SAYS], "weight": 0}
    record = {"messages": [USER, first, USER, {"role": "assistant", "content": "bye"}]}
    tokenizer = byte_tokenizer(source)
    assert "[hm]yo" in tokenizer.decode(tokenize(record, tokenizer)["input_ids"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([SAYS, THINKS], r"content\[1\] is thinking after other parts; give all thinking of a"),
        ([THINKS, THINKS, SAYS], r"content\[1\] is thinking after other thinking; give all"),
        ([{"type": "thinking", "thinking": 3}, SAYS], r"content\[0\] `thinking` must be text, got"),
        ([{"type": "text", "value": "yo"}], r"content\[0\] is a text part .*; rename 'value' to"),
        ([{"type": "text", "text": None}], r"content\[0\] is a text part without a .*; give one"),
        ([SAYS, {"text": 3}], r"content\[1\] is a text part without a string `text`, got {'text"),
    ],
)
def test_parts_that_cannot_be_read(content: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"messages\[1\] {message}"):
        trained(content, byte_tokenizer(BY_KEY))


def test_two_texts_of_thinking_contradict_each_other() -> None:
    message = r"messages\[1\] has a thinking part and other reasoning; k"
    with pytest.raises(DataError, match=message):
        trained([THINKS, SAYS], byte_tokenizer(BY_KEY), reasoning_content="no")


LOST = {
    "thinking": (THINKS, "reasoning_content"),
    "refusal": ({"type": "refusal", "refusal": "Sorry, I can't."}, "refusal part content"),
    "tool_use": ({"type": "tool_use", "name": "f", "input": {}}, "tool_use part content"),
    "document": ({"type": "document", "source": {"data": "abc"}}, "document part content"),
    "file": ({"type": "file", "file_id": 17}, "file part content"),
    "video": ({"type": "video"}, "video part content"),
    "output_text": ({"type": "output_text", "text": "hey"}, "output_text part content"),
    "no type": ({"value": "hey"}, "part content"),
    "a number": (31, "part content"),
}


@pytest.mark.parametrize("kind", LOST)
@pytest.mark.parametrize("source", [TEXT_ONLY, CHATML, JOINED, NO_TAGS])
def test_a_part_that_does_not_arrive_is_refused_by_name(kind: str, source: str) -> None:
    """Beside text and alone, as an answer and as the question."""
    part, name = LOST[kind]
    for content in ([part, SAYS], [part]):
        if kind == "thinking" and len(content) == 1:
            continue  # an empty answer
        with pytest.raises(DataError, match=name):
            trained(content, byte_tokenizer(source))
    if source == TEXT_ONLY and kind != "thinking":
        asked = {"messages": [{"role": "user", "content": [part, SAYS]}, YO]}
        refused(asked, source, rf"messages\[0\].*{name}")


def test_a_part_that_arrives_is_trained() -> None:
    tokenizer = byte_tokenizer(template("<{{ p.refusal }}>"))
    refusal = {"type": "refusal", "refusal": "no"}
    assert trained([SAYS, refusal], tokenizer) == "yo<no><|im_end|>"
    assert trained([refusal], tokenizer) == "<no><|im_end|>"


def test_a_result_that_is_printed_whole_arrives() -> None:
    """As by Llama 3.1, for results that are lists of any data."""
    whole = "{{ m.content if m.content is string else m.content|tojson }}"
    tokenizer = byte_tokenizer(CHATML.replace(TEXT, whole))
    result = {"role": "tool", "content": [{"city": "Lima", "warm": True, "hour": 12}]}
    found = tokenize({"messages": [USER, result, YO]}, tokenizer)
    text = '[{"city": "Lima", "warm": true, "hour": 12}]'
    assert text in tokenizer.decode(found["input_ids"])
