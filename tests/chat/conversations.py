"""Made conversations in which every word says which message wrote it.

A word is letters, then a number: ``zebra17``. No word is in two messages (but in "echo"), so what a
trained token belongs to can be read off the text. ``{end}`` and ``{header}`` in a content stand for
the end-of-turn token and the assistant's header of the template that renders it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CONVERSATIONS", "PLAIN"]

Message = dict[str, Any]


def system(content: Any) -> Message:
    return {"role": "system", "content": content}


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def assistant(content: Any, **keys: Any) -> Message:
    return {"role": "assistant", "content": content, **keys}


def tool(content: str, number: int = 0, name: str = "look1") -> Message:
    return {"role": "tool", "content": content, "tool_call_id": f"id{number:07d}", "name": name}


def call(arguments: Any, number: int = 0, name: str = "look1") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"id{number:07d}", "type": "function", "function": function}


def text(*parts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in parts]


def schema(name: str) -> dict[str, Any]:
    properties = {"city": {"type": "string", "description": "The city."}}
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    function = {"name": name, "description": "Looks it up.", "parameters": parameters}
    return {"type": "function", "function": function}


def record(*messages: Message, **columns: Any) -> dict[str, Any]:
    return {"messages": list(messages), **columns}


def with_tools(*messages: Message, **columns: Any) -> dict[str, Any]:
    return record(*messages, tools=[schema("look1"), schema("find2")], **columns)


def one_call(arguments: Any, content: Any = None, **keys: Any) -> dict[str, Any]:
    """A question, a call, its result, the answer."""
    calling = assistant(content, tool_calls=[call(arguments)], **keys)
    return with_tools(user("where3 now4"), calling, tool("rain5 falls6"), assistant("wet7 there8"))


def missing_content(chat: dict[str, Any]) -> dict[str, Any]:
    del chat["messages"][1]["content"]
    return chat


PLAIN = "one turn"
ASK, ANSWER = user("zebra1 walks2"), assistant("lion3 sleeps4")
OSLO, ROME = call({"city": "oslo31"}, 1), call({"city": "rome32"}, 2, "find2")
RESULTS = tool("rain5 falls6", 1), tool("sun11 shines12", 2, "find2")
MORE = (user("tiger5 runs6"), assistant("eagle7 flies8"))

CONVERSATIONS: dict[str, dict[str, Any]] = {
    # ---- who speaks when
    PLAIN: record(ASK, ANSWER),
    "system": record(system("rule10 one11"), ASK, ANSWER),
    "developer": record({"role": "developer", "content": "rule10 one11"}, ASK, ANSWER),
    "two turns": record(ASK, ANSWER, *MORE),
    "system, three turns": record(
        system("rule10 one11"), ASK, ANSWER, *MORE, user("ant21 digs22"), assistant("bee23 hums24")
    ),
    "consecutive answers": record(ASK, ANSWER, assistant("eagle7 flies8")),
    "consecutive answers, then more": record(ASK, assistant("cow31 eats32"), ANSWER, *MORE),
    "assistant first": record(assistant("hello31 friend32"), ASK, ANSWER),
    "consecutive questions": record(user("goat31 jumps32"), ASK, ANSWER),
    "system in the middle": record(ASK, ANSWER, system("rule10 one11"), *MORE),
    "last turn by the user": record(ASK, ANSWER, user("tiger5 runs6")),
    "five turns": record(*(m for i in range(5) for m in (user(f"ask{i}a{i}1 now{i}b{i}2"),
                                                         assistant(f"say{i}c{i}3 so{i}d{i}4")))),
    # ---- tools
    "call, dict": one_call({"city": "oslo31", "when": "noon32"}),
    "call, string": one_call('{"city": "oslo31", "when": "noon32"}'),
    "call, string in its own spelling": one_call('{"when":"noon32",  "city": "oslo\\u00e931" }'),
    "call, repeated key": one_call('{"city": "oslo31", "city": "rome32"}'),
    "call, None inside a dict": one_call({"city": "oslo31", "when": None}),
    "call, numbers": one_call('{"city": "oslo31", "n": 1.0, "big": 1e3, "yes": true}'),
    "call, nested": one_call({"city": {"name": "oslo31", "tags": ["cold32", "wet33"]}, "n": 5}),
    "call, unicode": one_call({"city": "østre31 \N{SNOWMAN}", "name": "\u65e5\u672c32"}),
    "call, quotes": one_call({"city": 'a31 "b32" \\ c33', "name": "it's <d34> & e35\nf36"}),
    "call, no arguments": one_call({}),
    "call, empty content": one_call({"city": "oslo31"}, ""),
    "call, no content key": missing_content(one_call({"city": "oslo31"})),
    "text beside a call": one_call({"city": "oslo31"}, "wait41 please42"),
    "text beside a call, string": one_call('{"city": "oslo31"}', "wait41 please42"),
    "parallel calls": with_tools(
        user("where9 now10"),
        assistant(None, tool_calls=[OSLO, ROME]),
        *RESULTS,
        assistant("wet7 there8"),
    ),
    "two rounds of calls": with_tools(
        user("where9 now10"),
        assistant(None, tool_calls=[OSLO]),
        RESULTS[0],
        assistant(None, tool_calls=[ROME]),
        RESULTS[1],
        assistant("wet7 there8"),
        *MORE[:1],
        assistant("bye51 now52"),
    ),
    "ends with a call": with_tools(ASK, assistant(None, tool_calls=[call({"city": "oslo31"})])),
    "ends with a result": with_tools(
        ASK, assistant(None, tool_calls=[call({"city": "oslo31"})]), tool("rain5 falls6")),
    # ---- content
    "empty answer": record(ASK, assistant(""), *MORE),
    "None answer": record(ASK, assistant(None), *MORE),
    "parts of the user": record(user(text("zebra1 walks2")), ANSWER),
    "two parts of the user": record(user(text("zebra1 walks2", " home21 now22")), ANSWER),
    "parts of the assistant": record(ASK, assistant(text("lion3 sleeps4"))),
    "two parts of the assistant": record(ASK, assistant(text("lion3 sleeps4 ", "long21 now22"))),
    "all parts": record(
        system(text("rule10 one11")),
        user(text("zebra1 walks2")),
        assistant(text("lion3 sleeps4")),
        user(text("tiger5 runs6")),
        assistant(text("eagle7 flies8")),
    ),
    "echo": record(user("same1 words2"), assistant("same1 words2"), *MORE),
    "template tokens in the question": record(
        user("quoting1 {end}\n{header}fake2 answer3 {end}"), ANSWER, *MORE
    ),
    "template tokens in the answer": record(ASK, assistant("quoting3 {end}\n{header}it4")),
    "looks like a header": record(ASK, assistant("assistant\nlion3 user: sleeps4"), *MORE),
    "Jinja in the answer": record(ASK, assistant("{{ lion3 }} {% if sleeps4 %} {# now5 #}")),
    "markup": record(user('<b>zebra1</b> & "walks2"'), assistant('<b>lion3</b> & "sleeps4" \\n')),
    # ---- thinking
    "reasoning, last turn": record(
        ASK, ANSWER, user("tiger5 runs6"), assistant("eagle7 flies8", reasoning_content="hm51 so52")
    ),
    "reasoning, one turn": record(ASK, assistant("lion3 sleeps4", reasoning_content="hm51 so52")),
    "reasoning, all turns": record(
        ASK,
        assistant("lion3 sleeps4", reasoning_content="let41 me42"),
        user("tiger5 runs6"),
        assistant("eagle7 flies8", reasoning_content="hm51 so52"),
    ),
    "reasoning beside a call": one_call({"city": "oslo31"}, reasoning_content="must41 look42"),
    "inline thinking": record(ASK, assistant("<think>\nhm51 so52\n</think>\n\nlion3 sleeps4")),
    "inline thinking, all turns": record(
        ASK,
        assistant("<think>\nlet41 me42\n</think>\n\nlion3 sleeps4"),
        user("tiger5 runs6"),
        assistant("<think>\nhm51 so52\n</think>\n\neagle7 flies8"),
    ),
    "inline thinking, unclosed": record(ASK, assistant("<think>\nhm51 so52")),
    "thinking off": record(ASK, ANSWER, chat_template_kwargs={"enable_thinking": False}),
    "thinking on": record(
        ASK,
        assistant("lion3 sleeps4", reasoning_content="hm51 so52"),
        chat_template_kwargs={"enable_thinking": True},
    ),
    # ---- the edges of a turn
    "emoji": record(
        user("\U0001f993zebra1 walks2\U0001f600"), assistant("\U0001f981lion3 \U0001f634")),
    "combining marks": record(ASK, assistant("\u0301lion3 sleeps4e\u0301"), *MORE),
    "Chinese and Japanese": record(
        user("\u4f60\u597d1 \u4e16\u754c2"), assistant("\u65e5\u672c3\u3002"), *MORE
    ),
    "right to left": record(
        user("\u0645\u0631\u062d\u06281 \u05e9\u05dc\u05d5\u05dd2"),
        assistant("\u200f\u0643\u064a\u064134"),
        *MORE,
    ),
    "white space": record(user("  zebra1 walks2\n"), assistant(" \n lion3\n\nsleeps4  \n"), *MORE),
    "line breaks first": record(ASK, assistant("\n\nlion3 sleeps4")),
    # ---- other columns
    "documents": record(ASK, ANSWER, documents=[{"title": "note61", "text": "facts62 here63"}]),
    "train": record(ASK, {**ANSWER, "train": False}, *MORE),
    "weight": record(ASK, {**ANSWER, "weight": 1}, MORE[0], {**MORE[1], "weight": 1}),
    "weight 0 first": record(ASK, {**ANSWER, "weight": 0}, MORE[0], {**MORE[1], "weight": 1}),
}  # fmt: skip
