"""What must be trained, written from the rules and from reading each template, not from the code.

``Case.verdict`` judges one result of ``tokenize_chat``. The trained tokens are turned back into
text. Who wrote that text is told by the words in it (see ``conversations``). Where the turn begins
is told by rendering the messages before it with ``add_generation_prompt=True``, as at inference.
Where it ends is told by ``families``, a table that was written by hand.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from tests.chat.chats import tokenize
from tests.chat.conversations import CONVERSATIONS
from tests.chat.families import FAMILY_OF, Family, bytes_of
from torch_collate_kit.errors import DataError

Message = dict[str, Any]

WORD = re.compile(r"[^\W\d_]+\d+")


def strings(value: Any) -> Iterator[str]:
    """Every string inside a value, keys of dicts too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from strings(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from strings(inner)


def text_parts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or []]


def calls(message: Message) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls") or []]


def words(message: Message) -> set[str]:
    said = [*text_parts(message.get("content")), message.get("reasoning_content") or ""]
    for call in calls(message):
        said += [call["name"], *strings(call["arguments"])]
    return {word for text in said for word in WORD.findall(text)}


def pieces(message: Message) -> list[str]:
    """The texts of an assistant's message; white space and <think> tags around them may change."""
    pieces = [
        piece.strip()
        for text in [*text_parts(message.get("content")), message.get("reasoning_content") or ""]
        for piece in re.split("</?think>", text)
    ]
    return [piece for piece in pieces if piece] + [call["name"] for call in calls(message)]


_PAIRS = json.JSONDecoder(object_pairs_hook=lambda pairs: ("object", pairs))


def arguments_stand(arguments: Any, text: str, verbatim: bool) -> bool:
    """Printed as they are, as the same JSON object, or item by item."""
    if isinstance(arguments, str) and (verbatim or arguments in text):
        return arguments in text
    printed = arguments if isinstance(arguments, str) else json.dumps(arguments)
    wanted = _PAIRS.decode(printed)
    for start in (match.start() for match in re.finditer("{", text)):
        try:
            if _PAIRS.raw_decode(text, start)[0] == wanted:
                return True
        except ValueError:
            continue
    return all(any(form in text for form in _spellings(leaf)) for leaf in _leaves(wanted))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for key, inner in value[1]:
            yield key
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _spellings(leaf: Any) -> list[str]:
    escaped = str(leaf).replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")  # LFM2
    strings = [str(leaf), json.dumps(leaf), json.dumps(leaf, ensure_ascii=False), escaped]
    return [string.strip('"') if isinstance(leaf, str) else string for string in strings]


_LISTED = re.compile(r"""['"]type['"]: ['"]text['"]""")


# ---- the verdict


@dataclass(frozen=True)
class Verdict:
    kind: str  # right, refused, skipped or wrong
    why: str = ""


class WrongError(Exception):
    """What is trained, or how it was refused, is wrong."""


def _need(condition: Any, why: str) -> None:
    if not condition:
        raise WrongError(why)


@dataclass(frozen=True)
class Trained:
    """A run of trained tokens: where it begins in the bytes of the text, and its last token."""

    start: int
    text: str
    last: str


@dataclass
class Case:
    """One conversation under one template."""

    name: str
    tokenizer: Any
    record: dict[str, Any]
    made: bool = True  # else words do not tell who wrote them: only contexts do
    other: Family | None = None  # of a template that is not in families
    _rendered: dict[Any, list[bytes]] = field(default_factory=dict)
    _checked: dict[Any, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.family = self.other or FAMILY_OF[self.name]
        quoted = {"{end}": self.family.ends[0], "{header}": self.family.header}
        messages = [dict(message) for message in self.record["messages"]]
        for message in messages:
            for mark, token in quoted.items():
                if self.made and isinstance(message.get("content"), str):
                    message["content"] = message["content"].replace(mark, token)
        self.record = {**self.record, "messages": messages}
        self.messages: list[Message] = messages

    def words(self) -> list[set[str]]:
        """Of each message."""
        return [words(message) for message in self.messages]

    def turns(self, mode: str) -> list[int]:
        """The messages that are to be trained."""
        turns = [
            i
            for i, message in enumerate(self.messages)
            if message["role"] == "assistant" and message.get("weight", message.get("train", 1))
        ]
        return turns[-1:] if mode == "last" else turns

    def verdict(self, mode: str, result: Any) -> Verdict:
        """``result`` is what tokenize_chat returned, or the exception that it raised."""
        try:
            if isinstance(result, Exception):
                self._check_refusal(mode, result)
                return Verdict("refused", str(result))
            examples = result if mode == "each" else [result]
            _need(isinstance(examples, list) and examples, f"got {type(result).__name__}")
            reasons = [example["skip_reason"] for example in examples]
            if any(reasons):
                _need(len(examples) == 1, "one of several examples is skipped")
                return Verdict("skipped", reasons[0])
            found = [turn for example in examples for turn in self._check_example(example)]
            _need(sorted(found) == self.turns(mode), f"trains {found}, not {self.turns(mode)}")
        except WrongError as error:
            return Verdict("wrong", str(error))
        return Verdict("right")

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token."""
        return [bytes_of(self.tokenizer)[i] for i in ids]

    @staticmethod
    def _check_refusal(mode: str, error: Exception) -> None:
        message = str(error)
        _need(isinstance(error, DataError), f"{type(error).__name__}: {message}")
        _need("; " in message and len(message) > 40, f"names no way out: {message}")
        _need(f"train_on='{mode}'" not in message, f"advises what was tried: {message}")

    def _check_example(self, example: Mapping[str, Any]) -> list[int]:
        """The messages that it trains; two modes often give the same example."""
        key = tuple(example["input_ids"]), tuple(example["loss_mask"])
        if key not in self._checked:
            self._checked[key] = self._turns_of(*key)
        return self._checked[key]

    def _turns_of(self, ids: Sequence[int], mask: Sequence[int]) -> list[int]:
        _need(len(ids) == len(mask) and set(mask) <= {0, 1}, "the mask does not fit the ids")
        pieces = self.pieces(ids)
        whole = b"".join(pieces)
        expected = self.tokenizer(whole.decode(), add_special_tokens=False)["input_ids"]
        _need(list(ids) == expected, "the ids are not those of the text")
        runs = self._runs(pieces, mask)
        _need(runs, "nothing is trained")
        turns = [self._check_run(whole, run) for run in runs]
        text = whole.decode()
        _need(not _LISTED.search(text), "content is printed as a list of parts")
        twice = self.made and '{\\"' in text and '{\\"' not in "".join(strings(self.messages))
        _need(not twice, "arguments are printed as a JSON string of JSON")
        others = [m for m in self.messages[: turns[-1]] if m["role"] != "assistant" and self.made]
        for message in others:
            missing = {word for word in words(message) if word not in text}  # JSON may abut: \\nw1
            _need(not missing, f"the {message['role']}'s {missing} are not in the text")
        documents = set(WORD.findall(" ".join(strings(self.record.get("documents")))))
        _need(documents <= set(WORD.findall(text)), "the documents are not in the text")
        return turns

    def _runs(self, pieces: Sequence[bytes], mask: Sequence[int]) -> list[Trained]:
        ends = [0, *itertools.accumulate(len(piece) for piece in pieces)]
        runs = []
        for kept, group in itertools.groupby(range(len(mask)), key=mask.__getitem__):
            if kept:
                tokens = list(group)
                try:
                    text = b"".join(pieces[i] for i in tokens).decode()
                    last = pieces[tokens[-1]].decode(errors="replace")
                except UnicodeDecodeError as error:
                    raise WrongError("the mask cuts a character") from error
                runs.append(Trained(ends[tokens[0]], text, last))
        return runs

    def _check_run(self, whole: bytes, run: Trained) -> int:
        """The message that this run trains, if it does so in full, in its place, to its end."""
        said = self.words() if self.made else [set[str]() for _ in self.messages]
        found = set(WORD.findall(run.text)) & set().union(*said)
        owners = [i for i, words in enumerate(said) if words & found]
        candidates = [
            i for i, words in enumerate(said) if found <= words and bool(found) == bool(words)
        ]
        _need(candidates, f"trains words of messages {owners} in one run: {run.text!r}")
        answers = [i for i in candidates if self.messages[i]["role"] == "assistant"]
        _need(answers, f"trains message {owners}, not the assistant's: {run.text!r}")
        answers = [i for i in answers if i in self.turns("all")]
        _need(answers, f"trains message {owners}, which is not to be trained")
        _need(run.last in self.family.ends, f"ends with {run.last!r}: {run.text!r}")
        turns = [i for i in answers if self._is_inference(whole[: run.start], i)]
        _need(
            turns, f"begins where inference does not: {whole[: run.start][-60:]!r} | {run.text!r}"
        )
        self._check_content(turns[0], run)
        # Not the whole text: gpt-oss drops the thinking of earlier calls once the answer is there.
        written = (
            self._head(whole[: run.start], turns[0]) + run.text.encode()[: -len(run.last.encode())]
        )
        completed = self._renderings(turns[0] + 1, False)
        _need(
            any(written in text for text in completed),
            f"is not written so when the turn is the last: {written!r}",
        )
        return turns[0]

    def _check_content(self, turn: int, run: Trained) -> None:
        message = self.messages[turn]
        rest = run.text
        for piece in pieces(message):
            _need(piece in run.text, f"{piece!r} of messages[{turn}] is not in {run.text!r}")
            rest = rest.replace(piece, "")
        for call in calls(message):
            stands = arguments_stand(
                call["arguments"], run.text, self.family.prints_strings(self.name)
            )
            _need(stands, f"the arguments {call['arguments']!r} are not in {run.text!r}")
        said = json.dumps(message)
        for word in ("None", "null"):
            _need(word not in rest or "null" in said.replace('"content": null', ""),
                  f"trains {word!r}: {run.text!r}")  # fmt: skip
        quoted = sum(piece.count(end) for piece in pieces(message) for end in self.family.ends)
        ends = sum(run.text.count(end) for end in self.family.ends)
        _need(ends == quoted + 1, f"trains text after the end of the turn: {run.text!r}")

    def _is_inference(self, context: bytes, turn: int) -> bool:
        """Is this what the model sees before it writes the turn?"""
        if not self._head(context, turn):
            return False
        if turn == 0:  # no template renders an empty list
            return not WORD.findall(context.decode())
        if self.messages[turn - 1]["role"] == "assistant":  # some have no prompt after an answer
            header = self.family.header.encode()
            return any(
                context in (prompt, prompt + header) for prompt in self._renderings(turn, True)
            )
        return context in self._renderings(turn, True)

    def _head(self, context: bytes, turn: int) -> bytes:
        """The header at the end of the context, or what stands in its place."""
        heads = [self.family.header + opening for opening in self.family.opens]
        roles = [message["role"] for message in self.messages[:turn]]
        heads += self.family.after_tool if "tool" in roles else ()
        if roles[-1:] == ["assistant"] and self.family.header == " [/INST]":
            heads.append("</s> ")  # LLaVA-NeXT has no header but the end of the question
        return next((h for h in map(str.encode, heads) if context.endswith(h)), b"")

    # ---- renderings

    def _renderings(self, count: int, prompt: bool) -> Iterator[bytes]:
        """Of the first messages, in all forms that a template may want them; made when needed."""
        key = count, prompt
        known = self._rendered.setdefault(key, [])
        yield from list(known)
        if (key, "all") in self._rendered:
            return
        settings: list[dict[str, Any]] = [self.record.get("chat_template_kwargs") or {}]
        if not settings[0] and "enable_thinking" in self.tokenizer.chat_template:
            settings += [{"enable_thinking": False}, {"enable_thinking": True}]
        for messages in self.forms(count):
            for setting in settings:
                text = self.render(messages, prompt, setting)
                if text is not None and text not in known:
                    known.append(text)
                    yield text
        self._rendered[key, "all"] = []

    def render(
        self, messages: list[Message], prompt: bool, setting: dict[str, Any]
    ) -> bytes | None:
        try:
            # Not apply_chat_template: it removes a content that is None, and some ask for that.
            [text], _ = render_jinja_template(
                [messages],
                chat_template=self.tokenizer.chat_template,
                tools=self.record.get("tools"),
                documents=self.record.get("documents"),
                add_generation_prompt=prompt,
                **self.tokenizer.special_tokens_map,
                **setting,
            )
        except Exception:  # the template refuses this form; any exception can come out of Jinja
            return None
        return str(text).replace(_REPEATED, "").encode()

    def forms(self, count: int) -> Iterator[list[Message]]:
        """The same messages, as strings or parts, with arguments as strings or dicts, and so on."""
        messages = self.messages[:count]
        parts = any(isinstance(m.get("content"), list) for m in messages)
        contents = ["one part", "parts"] if self.family.only_parts else ["joined"] if parts else []
        none = any(m.get("content") is None for m in messages)
        reasoning = any("reasoning_content" in m for m in messages)
        for content, empty, arguments, thinking in itertools.product(
            [*contents, "given"] if not self.family.only_parts else contents,
            ["given", "removed", "empty"] if none else ["given"],
            ["given", "dicts", "strings", "ascii"] if any(map(calls, messages)) else ["given"],
            ["reasoning_content", "thinking", "reasoning"] if reasoning else ["reasoning_content"],
        ):
            yield [_form(m, content, empty, arguments, thinking) for m in messages]


_REPEATED = "\ue0ff"


def _with_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Each key once: a mark, which is taken out of the text again, tells repeated ones apart."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        while key in found:
            key += _REPEATED
        found[key] = value
    return found


def _form(message: Message, content: str, empty: str, arguments: str, thinking: str) -> Message:
    formed = {k: v for k, v in message.items() if k not in ("train", "weight")}
    if formed.get("content") is None and empty != "given":
        formed.pop("content", None)
        formed |= {"content": ""} if empty == "empty" else {}
    if content in ("joined", "one part") and isinstance(formed.get("content"), list):
        formed["content"] = "".join(text_parts(formed["content"]))
    if content in ("parts", "one part") and isinstance(formed.get("content"), str):
        formed["content"] = [{"type": "text", "text": formed["content"]}]
    if "reasoning_content" in formed:
        formed[thinking] = formed.pop("reasoning_content")
    if "tool_calls" in formed:
        calls = [{**call, "function": dict(call["function"])} for call in formed["tool_calls"]]
        for call in (call["function"] for call in calls):
            given = call["arguments"]
            if arguments == "dicts" and isinstance(given, str):
                call["arguments"] = json.loads(given, object_pairs_hook=_with_repeated_keys)
            if arguments in ("strings", "ascii") and not isinstance(given, str):
                call["arguments"] = json.dumps(given, ensure_ascii=arguments == "ascii")
        formed["tool_calls"] = calls
    return formed


MODES = ("all", "last", "each")


def outcome(case: Case, mode: str, **options: Any) -> tuple[Verdict, Any]:
    """The verdict, and what was returned or raised: any exception but a DataError is wrong."""
    try:
        result = tokenize(case.record, case.tokenizer, train_on=mode, **options)
    except Exception as error:
        result = error
    return case.verdict(mode, result), result


def outcomes(
    name: str, tokenizer: Any, family: Family | None = None
) -> dict[tuple[str, str], tuple[Verdict, Any]]:
    """By conversation and mode."""
    found = {}
    for conversation, record in CONVERSATIONS.items():
        case = Case(name, tokenizer, record, other=family)
        for mode in MODES:
            found[conversation, mode] = outcome(case, mode, allow_empty=True)
    return found
