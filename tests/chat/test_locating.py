"""Where texts are in a rendering: order, escapes, and templates that depend on a text."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.chat.chats import CHATML, SAID, byte_tokenizer, chat, refused, tokenize, trained_text

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
