"""Texts that are located by what is known of the template, against the marks they stand in for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat.conversations import CONVERSATIONS
from tests.chat.families import FAMILY_OF, templates, tokenizer_for
from tests.chat.test_chat import byte_tokenizer, chat
from tests.chat.test_supervision import CHATML
from torch_collate_kit import tokenize_chat
from torch_collate_kit.chat import locating, rendering
from torch_collate_kit.chat.locating import Occurrence, Part
from torch_collate_kit.chat.turns import _inside
from torch_collate_kit.errors import DataError

TEMPLATES = templates()
SOME = ("qwen2_5", "qwen3", "gptoss", "gemma4", "llama3_1", "cohere2", "glm4moe", "lfm2_v2")
THINKING = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
CALLS = (
    "{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "</call>{% endfor %}"
)
ORDERS = {  # whether the thinking is written before the text
    CHATML.replace("{{ m.content }}", THINKING + "{{ m.content }}" + CALLS): True,
    CHATML.replace("{{ m.content }}", "{{ m.content }}" + THINKING + CALLS): False,
}


def places(found: list[Occurrence]) -> list[tuple[Any, ...]]:
    return [(o.part.message, o.part.where, o.start, o.end) for o in found]


@pytest.fixture
def num_known(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts needed no marks; every one of them is located by marks, too, and compared."""
    count = [0]
    by_marks, by_both = locating._by_marks, locating.locate_parts
    asked = [False]

    def marked(*arguments: Any) -> tuple[list[Part], list[Occurrence]]:
        asked[0] = True
        return by_marks(*arguments)

    def checked(
        template: Any, conversation: Any, messages: Any, style: Any, text: str
    ) -> tuple[list[Part], list[Occurrence]]:
        asked[0] = False
        found = by_both(template, conversation, messages, style, text)
        if not asked[0]:
            count[0] += 1
            assert places(by_marks(template, conversation, messages, text)[1]) == places(found[1])
        return found

    monkeypatch.setattr(locating, "_by_marks", marked)
    monkeypatch.setattr(rendering, "locate_parts", checked)
    return count


@pytest.mark.parametrize("name", SOME)
def test_known_texts_are_located_as_by_marks(name: str, num_known: list[int]) -> None:
    tokenizer = tokenizer_for(TEMPLATES[name], FAMILY_OF[name].eos)
    for _ in range(2):
        for conversation in CONVERSATIONS.values():
            try:
                tokenize_chat(conversation, tokenizer, train_on="each")
            except DataError:
                continue
    assert num_known[0] > len(CONVERSATIONS) / 2


@pytest.mark.parametrize("template", ORDERS)
def test_order_and_escapes_are_those_of_the_marks(template: str, num_known: list[int]) -> None:
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
            result = tokenize_chat({"messages": messages}, tokenizer, train_on="last")
            pairs = zip(result["input_ids"], result["loss_mask"], strict=True)
            trained = tokenizer.decode([token for token, kept in pairs if kept])
            thought = f"<think>thought {letter}</think>"
            texts = (
                [thought, f"answer {letter}"] if ORDERS[template] else [f"answer {letter}", thought]
            )
            called = f"<call>f{letter} {json.dumps(call['function']['arguments'])}</call>"
            assert trained == "".join([*texts, called if more else "", "<|im_end|>"])
    assert num_known[0] == (11 if ORDERS[template] else 0)  # all but the first with a call


@pytest.mark.parametrize(
    "template",
    [
        # as long as what was there before, so that every text is where it was
        CHATML.replace("{{ m.role }}\n", "{{ m.role }}{{ '!' if 'x' in m.content else '\n' }}"),
        # after the end of everything that is known
        CHATML + "{% if 'x' in messages[-1].content %}{{ messages[-1].content }}{% endif %}",
    ],
)
def test_what_depends_on_a_text_is_refused_also_when_the_rest_is_known(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    record, odd = (chat("user: hi", f"assistant: {text}") for text in ("abc", "axc"))
    before = tokenize_chat(record, tokenizer)
    with pytest.raises(DataError, match=r"changes messages|depends on its text|twice"):
        tokenize_chat(odd, byte_tokenizer(template))
    with pytest.raises(DataError, match=r"changes messages|depends on its text|twice"):
        tokenize_chat(odd, tokenizer)
    assert tokenize_chat(record, tokenizer) == before


places_of_spans = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted)


@given(st.lists(places_of_spans), places_of_spans)
def test_one_span_holds_a_part(spans: list[list[int]], part: list[int]) -> None:
    """Spans of generation tags may be nested, empty, or overlap."""
    start, end = part[0], part[1] + 1
    inside = _inside([(first, last) for first, last in spans])
    assert inside(start, end) == any(first <= start and end <= last for first, last in spans)
