"""One chat template with the variables of a call: rendering, in the form of messages it needs."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch_collate_kit._checks import needed_package, respelt
from torch_collate_kit.chat.record_forms import is_written, leaves, text_of
from torch_collate_kit.chat.records import REASONING
from torch_collate_kit.errors import DataError

Messages = list[dict[str, Any]]
Spans = list[tuple[int, int]]

# Stands after a key that is in its mapping already, so that none is lost; removed from the text.
_REPEATED_KEY = "\U000ffffd"

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_TAG = re.compile(r"</?[^<>\s'\"{}]{1,40}>|\[/?[A-Z_]+\]")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_RESERVED = (  # arguments of apply_chat_template, and variables that it sets
    *("add_generation_prompt", "continue_final_message", "conversation", "conversations"),
    *("documents", "max_length", "messages", "padding", "processor_kwargs", "return_dict"),
    *("return_assistant_tokens_mask", "return_tensors", "tokenize", "tokenizer_kwargs", "tools"),
    *("truncation", "self", "compiled_template"),
)
_logger = logging.getLogger("torch_collate_kit.chat")
_TEMPLATES: WeakKeyDictionary[Any, dict[Any, ChatTemplate]] = WeakKeyDictionary()


class Refusal(DataError):
    """The reason why a conversation is not trained, and the way out."""

    def __init__(
        self, reason: str, way_out: str = "change the record", *, rendered: bool = True
    ) -> None:
        super().__init__(f"{reason}; {way_out}")
        self.reason = reason
        self.rendered = rendered


class ChatTemplate:
    """A template as the tokenizer renders it, with the facts known about it so far."""

    @classmethod
    def of(cls, tokenizer: Any, kwargs: Mapping[str, Any], tools: Any) -> ChatTemplate:
        """Return the template for ``kwargs``; the same object for the same settings."""
        needed_package("transformers", "tokenize_chat")
        if not getattr(tokenizer, "chat_template", None) and not kwargs.get("chat_template"):
            raise ValueError(
                f"{type(tokenizer).__name__} has no chat_template; use the tokenizer of the "
                "model's chat version, or set tokenizer.chat_template"
            )
        source = tokenizer.get_chat_template(kwargs.get("chat_template"), tools)
        variables = {**tokenizer.special_tokens_map, **kwargs}
        variables.pop("chat_template", None)
        key = len(tokenizer), repr(variables), source
        known = _TEMPLATES.setdefault(tokenizer, {})
        if key not in known:
            known[key] = cls(tokenizer, source, variables)
            _warn_of_unread(source, *sorted(set(kwargs) - {"chat_template"}))
        return known[key]

    def __init__(self, tokenizer: Any, source: str, variables: dict[str, Any]) -> None:
        reserved = next((name for name in _RESERVED if name in variables), None)
        if reserved is not None:
            column = reserved in ("documents", "tools")
            raise DataError(
                f"`chat_template_kwargs` has {reserved!r}, which tokenize_chat sets itself; "
                + (f"give the record a column `{reserved}` instead" if column else "remove it")
            )
        self.source = source
        self.code = _COMMENT.sub("", source)
        self.has_generation_tags = _GENERATION_TAG.search(self.code) is not None
        self.known_copies: dict[str, Any] = {}  # renderings of marked messages
        self.known_turns: dict[Any, tuple[int, str]] = {}  # where turns begin and end
        self.preferred: dict[bool, Style] = {}  # with and without tools
        self.plain_turn: Any = None
        tags = sorted(set(_TAG.findall(source)), key=len, reverse=True)
        self.tags = re.compile("(" + ("|".join(map(re.escape, tags)) or "(?!)") + ")")
        # Public templates let these decide whether the prompt opens thinking.
        self.switches = [
            {name: value}
            for name in ("enable_thinking", "thinking")
            for value in (False, True)
            if name not in variables and re.search(rf"\b{name}\b", self.code)
        ]
        self._variables = variables
        added = {token.content for token in tokenizer.added_tokens_decoder.values()}
        self.bos_token, self.eos_token = tokenizer.bos_token, tokenizer.eos_token
        solid = sorted((t for t in added if t.strip(" ▁\n\t")), key=len, reverse=True)
        self.added_token = re.compile("|".join(map(re.escape, solid)) or r"(?!)")

    def names_role(self, role: str) -> bool:
        """Return whether the source names a role, and does not write it as the assistant's."""
        if not role.strip() or not re.search(rf"(['\"]){re.escape(role)}\1", self.code):
            return False
        asked = {"role": "user", "content": "Q"}
        try:
            texts = (self.render([asked, {**asked, "role": name}]) for name in (role, "assistant"))
            return len({*texts}) > 1
        except Refusal:
            return True  # the record is refused, too, if it is for the role

    def render(
        self,
        messages: Messages,
        tools: Any = None,
        documents: Any = None,
        *,
        prompt: bool = False,
        switch: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text; ``switch`` holds variables that the caller has not set."""
        variables = {"add_generation_prompt": prompt, **(switch or {})}
        return self.render_tagged(messages, tools, documents, tags=False, **variables)[0]

    def render_tagged(
        self, messages: Messages, tools: Any, documents: Any, *, tags: bool = True, **switch: Any
    ) -> tuple[str, Spans | None]:
        """Return the text, and the spans in it inside generation tags (None without tags)."""
        from jinja2 import TemplateError, TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        tags = tags and self.has_generation_tags
        try:
            [text], tagged = render_jinja_template(
                [messages],
                tools=tools,
                documents=documents,
                chat_template=self.source,
                return_assistant_tokens_mask=tags,
                **self._variables,
                **switch,
            )
        except TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template is not valid Jinja, line {error.lineno}: {error.message}; fix "
                "tokenizer.chat_template"
            ) from error
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise _not_rendered(messages, str(error), rendered=False) from error
        except (ArithmeticError, MemoryError, RuntimeError) as error:  # too long, deep or large
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise _not_rendered(messages, reason, rendered=True) from None
        spans: Spans | None = tagged[0] if tags else None
        if _REPEATED_KEY not in text:
            return text, spans
        if any(map(_has_own_mark, (messages, tools, documents))):
            raise Refusal(
                "the record has the private-use character U+FFFFD, which stands for repeated keys",
                "replace or remove it",
            )
        before = [text.count(_REPEATED_KEY, 0, i) for span in spans or () for i in span]
        pairs = zip(spans or (), before[::2], before[1::2], strict=True)
        moved = [(a - i, b - j) for (a, b), i, j in pairs]
        return text.replace(_REPEATED_KEY, ""), None if spans is None else moved


@lru_cache(maxsize=4096)
def _warn_of_unread(source: str, *names: str) -> None:
    """Warn, once, of variables that a template does not read."""
    words = {*re.findall(r"\w+", _COMMENT.sub("", source)), *_RESERVED}
    for name in names:
        if name not in words:
            like = respelt(name, tuple(sorted(words)))
            hint = f"; it has {like!r}" if like else ""
            _logger.warning(
                "chat_template_kwargs has %r, which the chat template does not read%s", name, hint
            )


def _not_rendered(messages: Messages, reason: str, *, rendered: bool) -> Refusal:
    roles = ", ".join(message["role"] for message in messages)
    return Refusal(
        f"the chat template cannot render the roles [{roles}]: {reason}", rendered=rendered
    )


FORMS = {
    "content": ("text", "parts"),
    "empty": ("given", "none", "left out", "text"),
    "arguments": ("given", "mapping", "text"),
    "thinking": ("key", "part"),
}


class Style(NamedTuple):
    """The forms in which texts, empty contents, arguments and thinking are given."""

    content: str = "text"
    empty: str = "given"
    arguments: str = "given"
    thinking: str = "key"

    def apply(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message in this form; its meaning stays the same."""
        if self.thinking == "part" and message.get("reasoning_content"):
            parts = _as_parts(message["content"] or [])
            thinking = {"type": "thinking", "thinking": message["reasoning_content"]}
            message = {key: value for key, value in message.items() if key not in REASONING}
            message["content"] = [thinking, *parts]
        content = message["content"]
        if self.content == "text" and isinstance(content, str) and "tool_calls" not in message:
            return message
        styled = dict(message)
        if not content and "tool_calls" in message:
            if self.empty == "left out":
                del styled["content"]
            elif self.empty != "given":
                styled["content"] = None if self.empty == "none" else ""
        elif self.content == "text":
            styled["content"] = text_of(content or "")
        else:
            styled["content"] = _as_parts(content or "")
        if "tool_calls" in message:
            styled["tool_calls"] = [self._apply_to_call(call) for call in message["tool_calls"]]
        return styled

    def _apply_to_call(self, call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if self.arguments == "mapping" and isinstance(arguments, str):
            decoded = decoded_arguments(arguments)
            arguments = arguments if decoded is None else decoded
        elif self.arguments == "text" and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if arguments is call["function"]["arguments"]:
            return call
        return {**call, "function": {**call["function"], "arguments": arguments}}


def _as_parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def decoded_arguments(arguments: str) -> dict[str, Any] | None:
    """Return the mapping in a JSON string, repeated keys included; None for anything else."""

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            while key in found:
                key += _REPEATED_KEY
            found[key] = value
        return found

    try:
        found = json.loads(arguments, object_pairs_hook=mapping)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _has_own_mark(value: Any) -> bool:
    """Return whether a text has the mark of repeated keys that this module did not write."""
    if isinstance(value, str):
        return _REPEATED_KEY in value
    if isinstance(value, Mapping):
        keys = {key: key.rstrip(_REPEATED_KEY) for key in value if isinstance(key, str)}
        own = (_REPEATED_KEY in bare or bare not in value for bare in keys.values())
        return any(own) or any(map(_has_own_mark, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_has_own_mark, value))


def changed_arguments(arguments: Any, text: str) -> str | None:
    """Return how a mapping of arguments was changed; its strings were found by their marks."""
    if not isinstance(arguments, Mapping) or not arguments:
        return None
    if json.dumps(arguments, ensure_ascii=False).replace(_REPEATED_KEY, "") in text:
        return None
    if repr(arguments) in text:
        return "prints arguments as Python, not as JSON"
    for name, value in leaves(arguments):
        if name == "key":
            value = str(value).rstrip(_REPEATED_KEY)
        if (name == "key" or not isinstance(value, str)) and not is_written(value, text):
            return f"drops the {name} {value!r} of its arguments"
    return None


def num_shared(text: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of characters or tokens with which both begin."""
    differ = (i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b)
    return next(differ, min(len(text), len(other)))
