"""The text that a chat template writes before a message of each role, and after an answer."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_collate_kit.chat.plain_turn import plain_turn
from torch_collate_kit.chat.preview import CASES
from torch_collate_kit.chat.rendering import preferred_style
from torch_collate_kit.chat.template import ChatTemplate, num_shared
from torch_collate_kit.errors import DataError

_RULES, _QUESTION, _ANSWER, _NEXT, _RESULT = "Rules7", "Question7", "Answer7", "Next7", "Result7"
# Written as the user's header with another name, by templates that write any role
_OTHER_ROLES = ("system", "tool", "developer", "function", "observation", "ipython", "environment")
_TAG_BEFORE = re.compile(r"(<[^<>\s]{1,40}>|\[[A-Z_]+\])\s*$")
_TAG_AFTER = re.compile(r"\s*(</[^<>\s]{1,40}>|\[/[A-Z_]+\])")


@dataclass(frozen=True)
class RoleTexts:
    """Headers by role and ends of answers, without the white space around them.

    Headers without an added token are left out, since any text may hold them.

    Attributes:
        headers: the role of each header; empty where those before an answer are unknown.
        ends: added tokens that end an answer when something follows it.
        call: the tags around the JSON of a tool call, the second "" where there is none; or None.
        names_system: whether a system message has a header.
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    ends: tuple[str, ...] = ()
    call: tuple[str, str] | None = None
    names_system: bool = True


def role_texts(template: ChatTemplate, bos: str, end: str) -> RoleTexts:
    """Return the texts around messages, found by rendering small conversations.

    ``bos`` may begin a text, and is part of no header; ``end`` is the token that ends an answer.
    """
    style = preferred_style(template, None)

    def rendered(messages: list[dict[str, Any]]) -> str:
        try:
            return template.render([style.apply(m) for m in messages]).removeprefix(bos)
        except DataError:
            return ""

    def talk(**turns: str) -> str:
        return rendered([{"role": role.rstrip("_"), "content": of} for role, of in turns.items()])

    added = template.added_token
    whole = talk(user=_QUESTION, assistant=_ANSWER, user_=_NEXT)
    again = whole.partition(_ANSWER)[2].partition(_NEXT)[0]
    ends = added.findall(again)[:1]
    stops = [stop for stop in (end, template.eos_token, *ends) if stop]
    asked = talk(user=_QUESTION).partition(_QUESTION)[0]
    both = num_shared(asked[::-1], again[::-1])
    user = _header(template, asked[len(asked) - both :], stops)
    ruled = talk(system=_RULES, user=_QUESTION, assistant=_ANSWER)
    system = _header(template, ruled.partition(_RULES)[0], stops) if _RULES in ruled else ""
    messages = copy.deepcopy(CASES["tool call"])
    messages[2]["content"], messages[3]["content"] = _RESULT, _ANSWER
    call, before, after = _tool_call(rendered(messages), messages)
    if not any(stop in before for stop in stops):
        tokens = list(added.finditer(before))[-2:]
        before = before[tokens[-1].start() :] if tokens else ""
        ends += [token[0] for token in tokens[:-1]]
    tool = _header(template, before, stops)
    others = _OTHER_ROLES if user.count("user") == 1 else ()
    names = {user.replace("user", role): role for role in others}
    names |= {tool: "tool", system: "system", user: "user"}
    names |= dict.fromkeys(_answer_headers(template, whole, after, stops), "assistant")
    return RoleTexts(
        {text: role for text, role in names.items() if text and "assistant" in names.values()},
        tuple(dict.fromkeys(token for token in ends if names.get(token) != "assistant")),
        call,
        bool(system) or _RULES not in ruled,
    )


def _answer_headers(
    template: ChatTemplate, talk: str, after_tool: str, stops: list[str]
) -> tuple[str, ...]:
    """Return the header after a question, and the one after a tool's result if that differs."""
    header = plain_turn(template).header.partition("<think")[0].strip()
    if not header:
        header = _header(template, talk.partition(_QUESTION)[2].partition(_ANSWER)[0], stops)
    if not template.added_token.search(header):
        return ()
    tokens = list(template.added_token.finditer(after_tool))
    if not tokens or header in after_tool:
        return (header,)
    return header, after_tool[tokens[-1].start() :].strip()


def _header(template: ChatTemplate, before: str, stops: list[str]) -> str:
    """Return the header that ``before`` ends with, after the end of the last turn."""
    ends = [(before.rfind(stop), len(stop)) for stop in stops if stop in before]
    place, width = max(ends, default=(0, 0))
    header = before[place + width :]
    if not header.strip():  # the header of the next question is what ends an answer
        header = before[place:]
    tokens = list(template.added_token.finditer(header))
    if not tokens:
        return ""
    line = header.find("\n", tokens[-1].end())
    return header[tokens[0].start() : line if line >= 0 else None].strip()


def _tool_call(text: str, messages: list[Any]) -> tuple[tuple[str, str] | None, str, str]:
    """Return the tags of the call, the text from call to result, and that from result to answer."""
    name = messages[1]["tool_calls"][0]["function"]["name"]
    before, _, after = text.partition(_RESULT)
    if not after or name not in before:
        return None, "", ""
    called, call = before.find(name), None
    for match in re.finditer(r"[{[]", before):
        try:
            _, json_end = json.JSONDecoder().raw_decode(before, match.start())
        except ValueError:
            continue
        if json_end > called:
            tag = _TAG_BEFORE.search(before[: match.start()])
            close = _TAG_AFTER.match(before, json_end)
            call = (tag[1], close[1] if close else "") if tag else None
            before = before[json_end:]
            break
    else:
        before = before[called + len(name) :]
    before = before.rpartition("Lima")[2]  # the last word of the arguments
    for word in (name, messages[2]["tool_call_id"]):  # in the header of a result
        before = before.partition(word)[0]
    return call, before, after.partition(_ANSWER)[0]
