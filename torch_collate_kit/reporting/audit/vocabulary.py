"""The special tokens of a tokenizer, and the texts its chat template writes around messages."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from torch_collate_kit.chat.preview import CASES
from torch_collate_kit.chat.rendering import preferred_style
from torch_collate_kit.chat.template import ChatTemplate, num_shared
from torch_collate_kit.chat.tokenize import ids_around
from torch_collate_kit.chat.turns import plain_turn
from torch_collate_kit.errors import DataError

THINKING_TAGS = ("think", "thinking", "reasoning")

_MEDIA_WORDS = ("image", "video", "audio", "vision", "pad")
_REPLACEMENT = "\ufffd"
_QUESTION, _THINKING, _ANSWER = "Who?", "A thought", "An answer"
_KNOWN: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
_RULES, _ASKED, _ANSWERED, _NEXT, _RESULT = "Rules7", "Question7", "Answer7", "Next7", "Result7"
# Written as the user's header with another name, by templates that write any role
_OTHER_ROLES = ("system", "tool", "developer", "function", "observation", "ipython", "environment")
_TAG_BEFORE = re.compile(r"(<[^<>\s]{1,40}>|\[[A-Z_]+\])\s*$")
_TAG_AFTER = re.compile(r"\s*(</[^<>\s]{1,40}>|\[/[A-Z_]+\])")


class Vocabulary:
    """Special tokens and headers of a tokenizer, of a processor's, or of None, which has none.

    They are ids; None or empty where the tokenizer does not have them.

    Attributes:
        tokenizer, size, template: the tokenizer, its number of ids, and its chat template.
        bos_id, eos_id, pad_id, unk_id: special tokens; unk_id differs from the others.
        end_ids: tokens that end an answer: EOS, and the one that the chat template writes.
        late_end_ids: tokens that end an answer when something follows it.
        prompt_ids: the generation prompt of the chat template.
        header_ids: the same without the white space around it, and without a tag of thinking; the
            header in ``role_ids`` where texts without the prompt end otherwise (Phi-3).
        role_ids: the role of each message header; empty if the headers of answers, or the tokens
            that end them, are unknown.
        repeats_header: whether the model, too, writes the header: between thinking and answer
            (gpt-oss).
        call_tags: the tags around the JSON of a tool call, or None.
        names_system: whether a system message has a header.
        added_ids: tokens that were added to the vocabulary, such as all of a chat template.
        control_ids: special tokens but those that stand for a part of an image or a sound.
        template_ids: added tokens whose text is in the source of the chat template.

    Raises:
        TypeError: an object without ``decode``.
    """

    def __init__(self, tokenizer: Any = None, template_kwargs: dict[str, Any] | None = None):
        kwargs = dict(template_kwargs or {})
        if hasattr(tokenizer, "image_processor") and hasattr(tokenizer, "tokenizer"):
            own = getattr(tokenizer, "chat_template", None)
            own = own.get("default") if isinstance(own, dict) else own
            kwargs = {"chat_template": own, **kwargs} if own else kwargs
            tokenizer = tokenizer.tokenizer
        if tokenizer is not None and not hasattr(tokenizer, "decode"):
            raise TypeError(
                f"tokenizer must be a tokenizer or a processor, got {type(tokenizer).__name__}; "
                "load it with AutoTokenizer.from_pretrained, or leave it out"
            )
        self.tokenizer = tokenizer
        self.size = len(tokenizer) if hasattr(tokenizer, "__len__") else None
        self.bos_id, self.eos_id, self.pad_id = (
            getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")
        )
        unknown = getattr(tokenizer, "unk_token_id", None)
        known = (self.bos_id, self.eos_id, self.pad_id)
        self.unk_id = None if unknown in known else unknown
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.added_ids = frozenset(added)
        self.control_ids = frozenset(
            token
            for token, text in added.items()
            if text.special and not any(word in text.content.lower() for word in _MEDIA_WORDS)
        )
        self.template: ChatTemplate | None = None
        text = getattr(tokenizer, "chat_template", None) or kwargs.get("chat_template")
        if tokenizer is not None and text:
            self.template = ChatTemplate.of(tokenizer, kwargs, None)
        source = "" if self.template is None else self.template.source
        self.template_ids = frozenset(
            token for token, added_token in added.items() if added_token.content in source
        )
        self._read_turns()

    def _read_turns(self) -> None:
        """Find the headers and ends that the chat template writes."""
        header, end = self._plain_turn()
        self.prompt_ids = self.encode(header)
        ends = () if self.eos_id is None else (self.eos_id,)
        of_template = self.encode(end)
        if len(of_template) == 1:
            ends = tuple(dict.fromkeys((*ends, *of_template)))
        self.end_ids: tuple[int, ...] = ends
        roles = RoleTexts()
        if self.template is not None:
            bos = getattr(self.tokenizer, "bos_token", None) or ""
            roles = _known(self.template, "roles", role_texts, self.template, bos, end)
        self.call_tags, self.names_system = roles.call, roles.names_system
        answers = (text for text, role in roles.headers.items() if role == "assistant")
        header = header.partition("<think")[0].strip() or next(answers, "")
        self.header_ids = self.encode(header)
        if self.template is not None and not self.prompt_ids:
            rest = plain_turn(self.template).prompt.rpartition(header)[2] if header else ""
            self.prompt_ids = self.encode(header + rest)
        self.repeats_header = bool(header) and self._writes_twice(header)
        late_ends = map(self.encode, roles.ends)
        self.late_end_ids = frozenset(ids[0] for ids in late_ends if len(ids) == 1)
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        by_ids = {self.encode(text): role for text, role in roles.headers.items() if ends}
        self.role_ids = {
            ids: role
            for ids, role in by_ids.items()
            if self.added_ids & {*ids} and unknown not in ids
        }

    def _plain_turn(self) -> tuple[str, str]:
        """Return the text before an answer, and the added token after it; "" if unknown."""
        if self.template is None:
            return "", ""
        turn = plain_turn(self.template)
        try:
            # What begins the next question ends an answer where nothing else does
            end = turn.end or next(iter(self.template.added_token.findall(turn.after)), "")
            return turn.header, end
        except DataError:
            return "", ""

    def _writes_twice(self, header: str) -> bool:
        """Return whether ``header`` comes between thinking and an answer, too."""
        assert self.template is not None
        turn = {"role": "assistant", "content": _ANSWER}
        turn |= dict.fromkeys(("thinking", "reasoning_content"), _THINKING)
        try:
            text = self.template.render([{"role": "user", "content": _QUESTION}, turn])
        except DataError:
            return False
        return header in text.partition(_THINKING)[2].partition(_ANSWER)[0]

    @cached_property
    def border_ids(self) -> list[int]:
        """Added tokens that begin or end turns."""
        return sorted({*(ids[0] for ids in self.role_ids), *self.end_ids} & self.added_ids)

    @cached_property
    def begins_with_bos(self) -> tuple[bool, bool]:
        """Whether the chat template writes BOS before a chat, and the tokenizer before a text."""
        bos = getattr(self.tokenizer, "bos_token", None) or ""
        is_written = self.template is not None and plain_turn(self.template).begins_with(bos)
        return is_written, callable(self.tokenizer) and self.bos_id in ids_around(self.tokenizer)[0]

    def ids_of_tag(self, tag: str) -> set[tuple[int, ...]]:
        """Return the fewest ids that hold ``tag``, given without ">", in several surroundings."""
        if self.tokenizer is None:
            return set()
        found: set[tuple[int, ...]] = _known(self.tokenizer, (self.size, tag), self._tag_ids, tag)
        return found

    def _tag_ids(self, tag: str) -> set[tuple[int, ...]]:
        around = itertools.product(("", "\n", " "), (">", ">\n"))
        found = (self.fewest_ids(f"{before}{tag}{after}a", tag, tag) for before, after in around)
        return set().union(*found)

    def fewest_ids(self, text: str, first: str, last: str) -> set[tuple[int, ...]]:
        """Return the ids of ``text`` from the start of ``first`` to the end of ``last``, if any."""
        ids = self.encode(text)
        tails = self.texts([ids[i:] for i in range(len(ids))])
        heads = self.texts([ids[: i + 1] for i in range(len(ids))])
        starts = [i for i, tail in enumerate(tails) if first in tail]
        stops = [i + 1 for i, head in enumerate(heads) if last in head]
        return {ids[starts[-1] : stops[0]]} if starts and stops else set()

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text without special tokens around it; none without a tokenizer."""
        if not text or not callable(self.tokenizer):
            return ()
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def texts(self, spans: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each of these spans of ids, which the vocabulary must have."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return [self.text(ids) for ids in spans]
        found: list[str] = backend.decode_batch(spans, skip_special_tokens=False)
        return found

    @property
    def partial_ids(self) -> np.ndarray:
        """Ids, int64, that are not a whole character by themselves."""
        return self.ids_with(_REPLACEMENT)

    def ids_with(self, pattern: str) -> np.ndarray:
        """Return the ids, int64, whose text has a match of a pattern."""
        if self.tokenizer is None or self.size is None:
            return np.empty(0, dtype=np.int64)
        key = self.size, pattern
        found: np.ndarray = _known(self.tokenizer, key, self._ids_with, *key)
        return found

    def _ids_with(self, size: int, pattern: str) -> np.ndarray:
        has = re.compile(pattern).search
        return np.flatnonzero([bool(has(t)) for t in self.texts([[i] for i in range(size)])])

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids, or the numbers without a tokenizer or over its size."""
        is_known = self.size is None or not ids or (min(ids) >= 0 and max(ids) < self.size)
        try:
            if self.tokenizer is not None and is_known:
                return str(self.tokenizer.decode(list(ids)))
        except (IndexError, KeyError, OverflowError, TypeError):  # holes in a vocabulary
            pass
        return " ".join(map(str, ids))


def _known(owner: Any, key: Any, make: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``make(*arguments)``, called once for each key of ``owner``."""
    known = _KNOWN.setdefault(owner, {})
    if key not in known:
        known[key] = make(*arguments)
    return known[key]


@dataclass(frozen=True)
class RoleTexts:
    """Headers by role and ends of answers, without the white space around them.

    Headers without an added token are left out, since any text may hold them.

    Attributes:
        headers: the role of each header; empty where those before an answer are unknown.
        ends: added tokens that end an answer when something follows it.
        call: the tags around the JSON of a tool call, the second may be ""; or None.
        names_system: whether a system message has a header.
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    ends: tuple[str, ...] = ()
    call: tuple[str, str] | None = None
    names_system: bool = True


def role_texts(template: ChatTemplate, bos: str, end: str) -> RoleTexts:
    """Return the texts around messages, found by rendering small conversations.

    ``bos`` may begin a text before its header; ``end`` is the token that ends an answer.
    """
    style = preferred_style(template, None)

    def rendered(messages: list[dict[str, Any]]) -> str:
        try:
            return template.render([style.apply(m) for m in messages]).removeprefix(bos)
        except DataError:
            return ""

    def talk(**turns: str) -> str:
        return rendered([{"role": who.rstrip("_"), "content": text} for who, text in turns.items()])

    added = template.added_token
    whole = talk(user=_ASKED, assistant=_ANSWERED, user_=_NEXT)
    again = whole.partition(_ANSWERED)[2].partition(_NEXT)[0]
    ends = added.findall(again)[:1]
    stops = [stop for stop in (end, template.eos_token, *ends) if stop]
    asked = talk(user=_ASKED).partition(_ASKED)[0]
    both = num_shared(asked[::-1], again[::-1])
    user = _header(template, asked[len(asked) - both :], stops)
    ruled = talk(system=_RULES, user=_ASKED, assistant=_ANSWERED)
    system = _header(template, ruled.partition(_RULES)[0], stops) if _RULES in ruled else ""
    messages = copy.deepcopy(CASES["tool call"])
    messages[2]["content"], messages[3]["content"] = _RESULT, _ANSWERED
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
        header = _header(template, talk.partition(_ASKED)[2].partition(_ANSWERED)[0], stops)
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
    return call, before, after.partition(_ANSWERED)[0]
