"""Random conversations over all templates: right or refused, never wrong."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.chat.conversations import call, schema, text
from tests.chat.families import FAMILY_OF, templates, tokenizer_for
from tests.chat.outcomes import MODES, outcome
from tests.chat.test_other_templates import TEMPLATES as OTHERS
from tests.chat.test_other_templates import tokenizer_of as other_tokenizer
from tests.chat.truth import Case

TEMPLATES = templates()

EDGES = ["", " ", "\n", "\n\n", "  \n", "\t", "\r\n", "\u00a0", "\u200d", "\u0301", "\u65e5",
         "\u0643", "\U0001f981", "'", '"', "\\", "<", "}", "{{", "{%", "#", "`", "[", "|",
         "user\n", "<think>", "</think>", "{end}", "{header}"]  # fmt: skip
edges = st.sampled_from(EDGES)


@cache
def tokenizer_of(name: str) -> Any:
    if name in OTHERS:
        return other_tokenizer(name)
    return tokenizer_for(TEMPLATES[name], FAMILY_OF[name].eos)


@st.composite
def chats(draw: st.DrawFn) -> dict[str, Any]:
    """Any order of roles with at least one answer; every word is numbered anew."""
    numbers = iter(range(100, 1000))

    def word() -> str:
        return f"w{next(numbers)}"

    def said(spaced: bool = True) -> str:
        between = draw(edges) if spaced else " "
        return f"{draw(edges)}{word()}{between or ' '} {word()}{draw(edges)}"

    roles = draw(
        st.lists(st.sampled_from(["user", "assistant", "call", "system"]), min_size=0, max_size=5)
    )
    messages: list[dict[str, Any]] = []
    called = 0
    for role in [*draw(st.sampled_from([["user"], ["system", "user"]])), *roles, "assistant"]:
        if role == "call":
            calls = []
            for _ in range(draw(st.integers(1, 2))):
                values = st.sampled_from([said(), 3, 1.5, True, None, [said()], {word(): said()}])
                arguments: Any = {word(): draw(values) for _ in range(draw(st.integers(0, 2)))}
                calls.append(call(arguments, called := called + 1, "look1"))
            content = draw(st.sampled_from([None, "", said()]))
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
            messages += [
                {"role": "tool", "content": said(), "tool_call_id": c["id"], "name": "look1"}
                for c in calls
            ]
            continue
        content = said() if draw(st.integers(0, 9)) else ""
        if role == "user" and not content:
            content = word()
        message: dict[str, Any] = {"role": role, "content": content}
        if draw(st.integers(0, 7)) == 0 and content:
            message["content"] = text(content, said())
        if role == "assistant" and draw(st.integers(0, 3)) == 0:
            message["reasoning_content"] = said()
        messages.append(message)
    record: dict[str, Any] = {"messages": messages}
    return {**record, "tools": [schema("look1")]} if called else record


@given(chats(), st.sampled_from([*sorted(TEMPLATES), *OTHERS]))
def test_nothing_is_silently_wrong(record: dict[str, Any], name: str) -> None:
    family = OTHERS[name][1] if name in OTHERS else None
    case = Case(name, tokenizer_of(name), record, other=family)
    for mode in MODES:
        verdict, _ = outcome(case, mode)
        assert verdict.kind != "wrong", (mode, verdict.why)
