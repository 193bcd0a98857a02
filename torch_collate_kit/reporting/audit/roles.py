"""The text that a chat template writes before a message of each role, and after an answer."""

from __future__ import annotations

import copy
import itertools
import json
import re
from dataclasses import dataclass
from typing import Any

from torch_collate_kit.chat.plain_turn import plain_turn
from torch_collate_kit.chat.preview import CASES
from torch_collate_kit.chat.rendering import preferred_style
from torch_collate_kit.chat.template import ChatTemplate
from torch_collate_kit.errors import DataError

__all__ = ["RoleTexts", "role_texts"]

_RULES, _QUESTION, _ANSWER, _NEXT, _RESULT = "Rules7", "Question7", "Answer7", "Next7", "Result7"
# Written as the user's header with another name, by templates that write any role
_OTHER_ROLES = ("system", "tool", "developer", "function", "observation", "ipython", "environment")
_TAG_BEFORE = re.compile(r"(<[^<>\s]{1,40}>|\[[A-Z_]+\])\s*$")
_TAG_AFTER = re.compile(r"\s*(</[^<>\s]{1,40}>|\[/[A-Z_]+\])")


@dataclass(frozen=True)
class RoleTexts:
    """Headers by role and ends of answers, without the white space around them.

    Attributes:
        answer: headers before an answer; the first is that of the generation prompt.
        others: headers before messages of other roles, with the role.
        ends: added tokens that end an answer when something follows it.
        call: the tags around the JSON of a tool call, the second "" where there is none; or None.
        names_system: whether a system message has a header.

    Headers without an added token are left out, since any text may hold them.
    """

    answer: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()
    ends: tuple[str, ...] = ()
    call: tuple[str, str] | None = None
    names_system: bool = True


def role_texts(template: ChatTemplate, bos: str, end: str) -> RoleTexts:
    """Return the texts around messages, found by rendering small conversations.

    ``bos`` may begin a text, and is part of no header; ``end`` is the token that ends an answer.
    """
    rendered = _Rendered(template, bos)
    talk = rendered.text(("user", _QUESTION), ("assistant", _ANSWER), ("user", _NEXT))
    again = talk.partition(_ANSWER)[2].partition(_NEXT)[0]
    ends = template.added_token.findall(again)[:1]
    stops = [stop for stop in (end, template.eos_token, *ends) if stop]
    asked = rendered.text(("user", _QUESTION)).partition(_QUESTION)[0]
    user = _header(template, _common_suffix(asked, again), stops)
    ruled = rendered.text(("system", _RULES), ("user", _QUESTION), ("assistant", _ANSWER))
    system = _header(template, ruled.partition(_RULES)[0], stops) if _RULES in ruled else ""
    call, before, after = rendered.tool_call()
    if not any(stop in before for stop in stops):
        tokens = list(template.added_token.finditer(before))[-2:]
        before = before[tokens[-1].start() :] if tokens else ""
        ends += [token[0] for token in tokens[:-1]]
    tool = _header(template, before, stops)
    answer = _answer_headers(template, talk, after, stops)
    names = {}
    if user.count("user") == 1:
        names = {user.replace("user", role): role for role in _OTHER_ROLES}
    names |= {tool: "tool", system: "system", user: "user"}
    return RoleTexts(
        answer,
        tuple((header, role) for header, role in names.items() if header and header not in answer),
        tuple(dict.fromkeys(token for token in ends if token not in answer)),
        call,
        bool(system) or _RULES not in ruled,
    )


def _answer_headers(
    template: ChatTemplate, talk: str, after_tool: str, stops: list[str]
) -> tuple[str, ...]:
    """After a question, and after the result of a tool if that differs."""
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
    """The header that ``before`` ends with: what is after the end of the last turn."""
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


def _common_suffix(one: str, other: str) -> str:
    pairs = zip(reversed(one), reversed(other), strict=False)
    width = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return one[len(one) - width :]


class _Rendered:
    """Small conversations as text, in the style that the template prefers."""

    def __init__(self, template: ChatTemplate, bos: str) -> None:
        self._template, self._bos = template, bos
        self._style = preferred_style(template, None)

    def text(self, *turns: tuple[str, str]) -> str:
        """The conversation; "" if the template cannot render it."""
        return self._of([{"role": role, "content": text} for role, text in turns])

    def _of(self, messages: list[dict[str, Any]]) -> str:
        try:
            text = self._template.render([self._style.apply(m) for m in messages])
        except DataError:
            return ""
        return text.removeprefix(self._bos)

    def tool_call(self) -> tuple[tuple[str, str] | None, str, str]:
        """The tags of a call, the text between call and result, and that after the result."""
        messages = copy.deepcopy(CASES["tool call"])
        name = messages[1]["tool_calls"][0]["function"]["name"]
        messages[2]["content"], messages[3]["content"] = _RESULT, _ANSWER
        text = self._of(messages)
        before, _, after = text.partition(_RESULT)
        if not after or name not in before:
            return None, "", ""
        called, json_at = before.find(name), -1
        for match in re.finditer(r"[{[]", before):
            try:
                _, json_end = json.JSONDecoder().raw_decode(before, match.start())
            except ValueError:
                continue
            if json_end > called:
                json_at = match.start()
                break
        call = None
        if json_at >= 0:
            tag = _TAG_BEFORE.search(before[:json_at])
            close = _TAG_AFTER.match(before, json_end)
            call = (tag[1], close[1] if close else "") if tag else None
            before = before[json_end:]
        else:
            before = before[called + len(name) :]
        before = before.rpartition("Lima")[2]  # the last word of the arguments
        for word in (name, messages[2]["tool_call_id"]):  # in the header of a result
            before = before.partition(word)[0]
        return call, before, after.partition(_ANSWER)[0]
