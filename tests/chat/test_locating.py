"""Where texts are in a rendering: order, escapes, and templates that depend on a text."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.chat.test_chat import byte_tokenizer, chat
from tests.chat.test_supervision import CHATML
from torch_collate_kit import ChatOptions, tokenize_chat
from torch_collate_kit.errors import DataError

THINKING = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
CALLS = (
    "{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "</call>{% endfor %}"
)
ORDERS = {  # whether the thinking is written before the text
    CHATML.replace("{{ m.content }}", THINKING + "{{ m.content }}" + CALLS): True,
    CHATML.replace("{{ m.content }}", "{{ m.content }}" + THINKING + CALLS): False,
}


@pytest.mark.parametrize("template", ORDERS)
def test_order_and_escapes_are_those_of_the_marks(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    for letter in "abcdef":
        call = {"function": {"name": f"f{letter}", "arguments": {"q": f'"{letter}"\n{letter}'}}}
        answer = {
            "role": "assistant",
            "content": f"answer {letter}",
            "reasoning_content": f"thought {letter}",
        }
        for more in ({}, {"tool_calls": [call]}):
            messages = [{"role": "user", "content": letter}, {**answer, **more}]
            result = tokenize_chat({"messages": messages}, tokenizer, ChatOptions(train_on="last"))
            pairs = zip(result["input_ids"], result["loss_mask"], strict=True)
            trained = tokenizer.decode([token for token, kept in pairs if kept])
            thought = f"<think>thought {letter}</think>"
            texts = (
                [thought, f"answer {letter}"] if ORDERS[template] else [f"answer {letter}", thought]
            )
            called = f"<call>f{letter} {json.dumps(call['function']['arguments'])}</call>"
            assert trained == "".join([*texts, called if more else "", "<|im_end|>"])


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
    before = tokenize_chat(record, tokenizer)
    with pytest.raises(DataError, match=r"changes messages|depends on its text|twice"):
        tokenize_chat(odd, byte_tokenizer(template))
    with pytest.raises(DataError, match=r"changes messages|depends on its text|twice"):
        tokenize_chat(odd, tokenizer)
    assert tokenize_chat(record, tokenizer) == before


def test_a_template_that_asks_for_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of an earlier record is no reason to refuse the next one."""
    tokenizer = byte_tokenizer("{{ strftime_now('%Y') }}" + CHATML)
    for hour in ("01", "02"):
        fixed = SimpleNamespace(now=lambda hour=hour: SimpleNamespace(strftime=lambda _: hour))
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", fixed)
        result = tokenize_chat(chat("user: hi", "assistant: yo"), tokenizer)
        assert tokenizer.decode(result["input_ids"]).startswith(hour)
