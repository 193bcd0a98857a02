"""Reading a record: the forms that people have -> one :class:`Conversation`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from numbers import Real
from typing import Any

from torch_collate_kit._checks import respelt
from torch_collate_kit.chat.options import ChatSetup
from torch_collate_kit.chat.record_forms import (
    ImageSource,
    find_messages,
    images_of_record,
    num_images,
    read_parts,
    text_of,
)
from torch_collate_kit.errors import DataError

REASONING = ("reasoning_content", "thinking", "reasoning")
ROLES = ("system", "developer", "user", "tool", "assistant", "function")
_SELECTORS = ("weight", "train", "trainable", "training", "loss", "loss_weight")
_OF_PARTS = ("loss_scale", "training_detail", "train_detail")  # refused by name
_PROVIDER_ERROR = "teich_provider_error"
_KNOWN = ("role", "name", "id", "tool_call_id", "function_call", *_SELECTORS)
_LEFT_OUT = frozenset({"tool_calls", *_SELECTORS, _PROVIDER_ERROR})  # not given to the template
_WRITTEN = ("content", "tool_calls", *REASONING, "tool_responses")
_READ_OF_CALL, _AROUND_CALL = ("name", "arguments"), ("id", "type", "index", "function")
# Keys of other tools: what the letters of their names have.
_OF_ARGUMENTS = re.compile("argument|args?$|param|input")
_OF_TRAINING = re.compile("(?<!cons)train|(?<!g)loss|mask|weight")
_OF_THINKING = re.compile("think|thought|reasoning")
_OF_CALLS = re.compile("(tool|function)s?(call|use|invocation)")
_ABOUT = re.compile("(id|name|type|index|effort|signature|mode|budget|level|language|status)s?$")


class BadArguments(DataError):
    """Arguments of a tool call that are not a JSON object."""

    skip_reason = "bad_tool_arguments"


@dataclass(frozen=True)
class Conversation:
    """Messages in one form, the trained ones, and the other variables of the template."""

    messages: list[dict[str, Any]]
    has_assistant: bool = False
    trained: list[int] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    images: list[ImageSource] = field(default_factory=list)
    """One for each image part of ``messages``, in order."""
    placeholder: str = ""
    """The text that the template writes for an image part; "" if it is not known."""

    def around(self, reason: str) -> Conversation:
        """Return the system messages and the turns around the message that ``reason`` names."""
        messages, trained = self.messages, self.trained
        named = re.search(r"messages\[(\d+)\]", reason)
        middle = sum(turn < int(named[1]) for turn in trained) if named else 0
        kept = trained[max(middle - 1, 0) : middle + 2]
        heads = ("system", "developer")
        head = next((i for i, m in enumerate(messages) if m["role"] not in heads), 0)
        asked = (i for i in range(kept[0], head, -1) if messages[i]["role"] == "user")
        start = next(asked, head)
        part = messages[:head] + messages[start : kept[-1] + 1]
        turns, images = [turn - start + head for turn in kept], self.images[: num_images(part)]
        return replace(self, messages=part, trained=turns, images=images)


def read_record(example: Mapping[str, Any], setup: ChatSetup, from_arrow: bool) -> Conversation:
    """Return the conversation of ``example``; ``from_arrow`` removes None from arguments, too."""
    listed, first = find_messages(example)
    messages = [_read_message(m, f"messages[{i}]", from_arrow) for i, m in enumerate(listed)]
    images: list[ImageSource] = []
    if setup.images is not None:
        messages, images = images_of_record(messages, example)
    elif num_images(messages):
        raise DataError(
            "the messages have images, which a tokenizer alone does not read; pass "
            "AutoProcessor.from_pretrained(...) in place of the tokenizer"
        )
    messages, shift = _with_system(messages, example.get("system"))
    first += shift
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first]
    tools = [_read_dicts(found, "`tools`") for found in (example.get("tools"), setup.options.tools)]
    own_kwargs = _decoded(example.get("chat_template_kwargs") or {}, "`chat_template_kwargs`") or {}
    if not isinstance(own_kwargs, dict):
        raise DataError(
            f"`chat_template_kwargs` must be a dict or the JSON of one, got {own_kwargs!r:.60}; "
            "give the variables of the template by name, such as {'enable_thinking': False}"
        )
    kwargs = {**setup.options.template_variables, **own_kwargs}
    if "chat_template" in own_kwargs:
        raise DataError(
            "`chat_template_kwargs` has 'chat_template', which would replace the template that the "
            "model is asked with; remove it, or pass ChatOptions(chat_template=...) for all records"
        )
    template = setup.chat_template(kwargs.get("chat_template"), tools[0] or tools[1])
    return Conversation(
        messages=messages,
        has_assistant=bool(turns),
        trained=[i for i in turns if _is_selected(listed[i - shift], i)],
        tools=tools[0] or tools[1] or None,
        documents=_read_dicts(example.get("documents"), "`documents`") or None,
        kwargs=kwargs if template is None else {**kwargs, "chat_template": template},
        images=images,
        placeholder="" if setup.images is None else setup.images.placeholder,
    )


def _decoded(value: Any, what: str) -> Any:
    """Return the value of a JSON string, or any other value without None."""
    try:
        return json.loads(value) if isinstance(value, str) else drop_none(value)
    except ValueError as error:
        raise DataError(f"{what}: invalid JSON {value[:60]!r} ({error}); fix it") from error


def _read_dicts(found: Any, what: str) -> list[dict[str, Any]]:
    """Return a list of dicts, from dicts, JSON strings, or one JSON string of the list."""
    if not found:
        return []
    value = _decoded(found, what) or []
    items = value if isinstance(value, list) else [None]  # fails below
    dicts: list[Any] = [_decoded(item, what) if isinstance(item, str) else item for item in items]
    if not all(isinstance(item, dict) for item in dicts):
        way_out = "write each as {'function': {'name': ..., 'arguments': ...}}"
        if isinstance(value, dict):
            way_out = "put the dict into a list"
        elif what == "`documents`":
            way_out = "give each document as {'title': ..., 'text': ...}"
        elif what == "`tools`":
            way_out = "turn Python functions into schemas with transformers.utils.get_json_schema"
        raise DataError(
            f"{what} must be a list of dicts or of JSON strings, got {value!r:.60}; {way_out}"
        )
    return dicts


def _with_system(messages: list[dict[str, Any]], system: Any) -> tuple[list[dict[str, Any]], int]:
    """Return the messages after the ``system`` column, and the number of messages added."""
    if system is None or system == "":
        return messages, 0
    if not isinstance(system, str):
        raise DataError(f"`system` must be a string, got {type(system).__name__}; convert it")
    present = [text_of(m["content"]) for m in messages if m["role"] in ("system", "developer")]
    if any(content != system for content in present):
        raise DataError("the `system` column and a system message differ; remove one of the two")
    return (messages, 0) if present else ([{"role": "system", "content": system}, *messages], 1)


def _is_selected(message: Mapping[str, Any], turn: int) -> bool:
    """Return whether its flags, or those that all of its parts have, let a message be trained."""
    content = message.get("content")
    of_content = content if isinstance(content, (list, tuple)) else ()
    parts = [part if isinstance(part, Mapping) else {} for part in of_content]
    values, *of_parts = (
        {key: part[key] for key in _SELECTORS if part.get(key) is not None}
        for part in (message, *parts)
    )
    if any(flags != of_parts[0] for flags in of_parts):
        raise DataError(
            f"messages[{turn}] has parts of which {of_parts} says what is trained, but a turn is "
            "trained in full or not at all; give the message one flag, or split it"
        )
    values |= {f"{key} of its parts": value for key, value in (of_parts or [{}])[0].items()}
    for key, value in values.items():
        if value not in (0, 1):  # True is 1
            raise DataError(
                f"messages[{turn}] has {key} {value!r}, but a turn is trained in full or not at "
                f"all; set `{key}` to 0 or 1"
            )
    if len(set(map(bool, values.values()))) > 1:
        raise DataError(f"messages[{turn}] has {values}, which contradict each other; keep one")
    return all(values.values()) and not drop_none(message.get(_PROVIDER_ERROR))


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _read_message(found: Any, where: str, from_arrow: bool) -> dict[str, Any]:
    if not isinstance(found, (dict, Mapping)) or not isinstance(found.get("role"), str):
        got = f"keys {sorted(found)}" if isinstance(found, Mapping) else type(found).__name__
        raise DataError(
            f"{where} must be a dict with a `role` string and `content`, got {got}; rename other "
            "keys (ShareGPT belongs in a `conversations` column) and roles (to system, user, "
            "assistant, tool)"
        )
    _check_message_keys(found, where)
    message = {
        key: value if isinstance(value, str) else drop_none(value)
        for key, value in found.items()
        if value is not None and key not in _LEFT_OUT
    }
    content, thinking = message.get("content"), None
    if isinstance(content, list):
        content, thinking = read_parts(content, where)
        content = content or ""
    elif not isinstance(content, (str, type(None))):
        raise DataError(f"{where} `content` must be text, parts or None, got {content!r:.60}")
    others = message.get("thinking", message.get("reasoning", thinking))
    reasoning = message.get("reasoning_content", others)
    if thinking is not None and reasoning != thinking:
        raise DataError(f"{where} has a thinking part and other reasoning; keep one of the two")
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise DataError(f"{where} `reasoning_content` must be text, got {reasoning!r:.60}")
        # The two names that templates read; transformers fills them in like this, too.
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    message["content"] = content
    calls = found.get("tool_calls")
    if calls and not (_is_list(calls) and all(isinstance(c, Mapping) for c in calls)):
        calls = _read_dicts(calls, f"{where} `tool_calls`")
    if calls:  # an empty list would count in templates that ask `'tool_calls' in message`
        message["tool_calls"] = [
            _read_call(call, where, i, from_arrow) for i, call in enumerate(calls)
        ]
    return message


def _check_message_keys(message: Mapping[str, Any], where: str) -> None:
    """Check that no text has a misspelt key: the rest would be trained as if it were all."""
    parts = message.get("content")
    for found in (message, *parts) if isinstance(parts, (list, tuple)) else (message,):
        is_text = isinstance(found, Mapping) and found.get("type", "text") == "text"
        for key in _flags(tuple(found)) if is_text else ():
            if _is_number(found[key]):
                raise DataError(
                    f"{where} has {key!r}, which is not read; remove it, and if it says whether "
                    "the turn is trained, give `train`, 1 or 0"
                )
    for key in _OF_PARTS:
        if message.get(key) not in (None, [], ""):
            raise DataError(
                f"{where} has `{key}`, but a turn is trained in full or not at all; remove it, and "
                "set `train` to 0 or 1"
            )
    odd, others = _odd_keys(tuple(message), message["role"] == "assistant")
    for key, names in odd:
        found = drop_none(message[key])
        if found and not isinstance(found, Real) and not any(map(message.get, names)):
            raise DataError(
                f"{where} has no {names[0]}, but {key!r} looks like it; rename or convert it "
                f"to {names[0]}, or remove it"
            )
    if others and (others := [key for key in others if message[key]]):
        raise DataError(
            f"{where} has no `content`, only {', '.join(map(repr, others))} and its role; "
            "rename the key of its text to content"
        )
    if message.get("function_call") and drop_none(message["function_call"]):
        raise DataError(
            f"{where} has a `function_call`, which chat templates no longer read; convert it to "
            "`tool_calls`: [{'type': 'function', 'function': function_call}], and the result's "
            "role from function to tool"
        )


@lru_cache(maxsize=4096)
def _odd_keys(
    keys: tuple[Any, ...], is_answer: bool
) -> tuple[list[tuple[Any, tuple[str, ...]]], list[Any]]:
    """Return keys that look like names of a text, and without such a name all unknown ones."""
    others = [key for key in keys if key not in (*_KNOWN, *_WRITTEN)]
    odd: list[tuple[Any, tuple[str, ...]]] = []
    for key in others:
        name, letters = respelt(str(key), _WRITTEN), _letters(key)
        if name is not None:
            odd.append((key, (name,)))
        elif is_answer and not _ABOUT.search(letters):
            odd += [(key, REASONING)] if _OF_THINKING.search(letters) else []
            odd += [(key, ("tool_calls",))] if _OF_CALLS.search(letters) else []
    return odd, [] if any(name in keys for name in _WRITTEN) else others


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, a bool, or a list of them alone."""
    value = drop_none(value.tolist() if hasattr(value, "tolist") else value)
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(isinstance(number, Real) for number in values)


def _letters(key: Any) -> str:
    return re.sub("[^a-z]", "", str(key).lower())


@lru_cache(maxsize=4096)
def _flags(keys: tuple[Any, ...]) -> list[Any]:
    """Return the unknown keys whose names are about training."""
    others = [key for key in keys if key not in (*_SELECTORS, *_OF_PARTS)]
    return [key for key in others if _OF_TRAINING.search(_letters(key))]


def _read_call(call: Mapping[str, Any], where: str, i: int, from_arrow: bool) -> dict[str, Any]:
    """Return ``{"type": "function", "function": {"name", "arguments"}}`` and the call's id."""
    function = call.get("function") or call
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(
            f"{where} has a tool call without a name, got {dict(call)!r:.60}; write it as "
            "{'type': 'function', 'function': {'name': ..., 'arguments': ...}}"
        )
    _check_call(call, function, f"{where}.tool_calls[{i}]")
    arguments = _read_arguments(function.get("arguments"), f"{where}.tool_calls[{i}].arguments")
    if from_arrow and not isinstance(arguments, str):
        arguments = drop_none(arguments)
    outer = {k: v for k, v in call.items() if v is not None and k not in ("name", "arguments")}
    return {
        "type": "function",
        **outer,
        "function": {"name": function["name"], "arguments": arguments},
    }


def _check_call(call: Mapping[str, Any], function: Mapping[str, Any], where: str) -> None:
    """Check that no arguments have another key or place: the call would be trained without them."""

    def decoded(value: Any) -> Any:
        try:
            return json.loads(value) if isinstance(value, str) else drop_none(value)
        except ValueError:
            return value

    unread = [] if function is call else [key for key in call if key not in _AROUND_CALL]
    inside = [key for key in function if key not in _READ_OF_CALL and key not in _AROUND_CALL]
    for holder, key in [*((call, key) for key in unread), *((function, key) for key in inside)]:
        given = function.get(key if key in _READ_OF_CALL else "arguments")
        value = decoded(holder[key])
        letters = _letters(key)
        is_named = key in _READ_OF_CALL or respelt(str(key), _READ_OF_CALL[1:]) is not None
        is_like = _OF_ARGUMENTS.search(letters) is not None and "schema" not in letters
        is_alone = given is None and isinstance(value, dict)
        is_text = value not in (None, "", {}, []) and not isinstance(holder[key], (int, float))
        if (is_named or is_like or is_alone) and is_text and value != decoded(given):
            raise BadArguments(
                f"{where} has {key!r} {holder[key]!r:.60}, which is not read; give a call its name "
                "and arguments once, as `name` and `arguments`, both in `function` if it has one"
            )


def _read_arguments(found: Any, where: str) -> Any:
    """Return a mapping, or the JSON of one as it is; None and "" are a call without arguments."""
    if found is None or found == "":
        return {}
    why = ""
    try:
        if isinstance(found, Mapping):
            json.dumps(found, default=_as_dict, allow_nan=False)
            return found
        # int refuses NaN and Infinity, which are not JSON
        options: dict[str, Any] = {"parse_constant": int, "parse_float": _finite}
        if isinstance(found, str) and isinstance(json.loads(found, **options), dict):
            return found
    except (TypeError, ValueError) as error:
        why = f" ({error})"
    raise BadArguments(
        f"{where} are not a JSON object, got {found!r:.60}{why}; give a dict, or the JSON of one "
        "encoded once"
    )


def _finite(number: str) -> float:
    """Return a number of a JSON text; 1e999 would be written as Infinity."""
    if math.isinf(value := float(number)):
        raise ValueError(f"{number:.20} is too large")
    return value


def _as_dict(value: Any) -> dict[Any, Any]:
    """Return a mapping for JSON; ``dict`` would also take a set of pairs of letters."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def without_padding(records: Any, from_arrow: Any) -> tuple[Any, bool]:
    """Return records without keys that Arrow gave to arguments, and whether others have some.

    ``from_arrow``: the features of their dataset, or whether they are Arrow's.
    """
    if not isinstance(from_arrow, Mapping):
        return records, from_arrow is True

    def bare(value: Any, feature: Any, is_inside: bool) -> Any:
        if isinstance(value, Mapping) and isinstance(feature, Mapping):  # a struct, not Json
            return {
                k: bare(item, feature.get(k), is_inside or k == "arguments")
                for k, item in value.items()
                if item is not None or not is_inside
            }
        inner = getattr(feature, "feature", None)
        return [bare(v, inner, is_inside) for v in value] if inner and _is_list(value) else value

    return [bare(record, from_arrow, False) for record in records], False


def drop_none(value: Any) -> Any:
    """Return a copy without None: in Arrow each struct has the keys of all others."""
    if isinstance(value, Mapping):
        return {key: drop_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [drop_none(item) for item in value]
    return value
