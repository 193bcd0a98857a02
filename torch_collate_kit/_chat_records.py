"""Reading a chat or Alpaca record: columns -> messages, tools and template variables.

What a template would silently ignore (a legacy function call, an unknown role, a weight) is
refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch_collate_kit.errors import DataError

__all__ = ["assistant_turns", "check_weights", "read_dicts", "read_messages"]

_ROLES = ("system", "developer", "user", "tool", "assistant", "function")


def read_messages(example: Mapping[str, Any], decode_arguments: bool) -> list[dict[str, Any]]:
    found, system = example.get("messages"), example.get("system")
    if found is None:
        found = _alpaca_messages(example)
    if not isinstance(found, (list, tuple)):
        raise DataError(
            f"`messages` must be a list of dicts, got {type(found).__name__}; decode a JSON "
            "string, or turn a dict of lists into a list of dicts"
        )
    messages = [_read_message(m, f"messages[{i}]", decode_arguments) for i, m in enumerate(found)]
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise DataError(f"`system` must be a string, got {type(system).__name__}; convert it")
    present = {str(m["content"]) for m in messages if m["role"] in ("system", "developer")}
    if present - {system}:
        raise DataError("the `system` column and a system message differ; remove one of the two")
    return messages if present else [{"role": "system", "content": system}, *messages]


def assistant_turns(messages: list[dict[str, Any]]) -> list[int]:
    """Indices of the assistant's messages. With none, an unknown role is an error."""
    roles = [message["role"] for message in messages]
    unknown = next((role for role in roles if role not in _ROLES), None)
    if unknown is not None and "assistant" not in roles:
        raise DataError(
            f"messages[{roles.index(unknown)}] has the unknown role {unknown!r}, and none has "
            "'assistant'; rename the role of the answers to assistant, others to "
            "system, user or tool"
        )
    return [i for i, role in enumerate(roles) if role == "assistant"]


def check_weights(messages: list[dict[str, Any]], turns: list[int]) -> None:
    """Refuse to train a turn whose own weight says otherwise."""
    for turn in turns:
        for key in ("weight", "train", "trainable"):
            value = messages[turn].get(key, 1)
            if value != 1:  # True is 1
                raise DataError(
                    f"messages[{turn}] has {key} {value!r}, but a turn is trained in full or not "
                    f"at all; remove `{key}` to train it, or make one record per turn to train, "
                    "which ends with that turn, and pass train_on='last'"
                )


def _alpaca_messages(example: Mapping[str, Any]) -> list[dict[str, Any]]:
    columns = {name: example.get(name) for name in ("instruction", "input", "output")}
    if columns["instruction"] is None:
        raise DataError(
            f"no `messages` and no `instruction` in the columns {sorted(_drop_none(example))}; "
            "rename the chat column to `messages`, or give `instruction` and `output` (Alpaca)"
        )
    if columns["output"] is None and example.get("response") is not None:
        raise DataError(
            "`instruction` has a `response` but no `output`; rename `response` to `output` "
            "(and `context`, if there is one, to `input`)"
        )
    for name, value in columns.items():
        if not isinstance(value, (str, type(None))):
            raise DataError(f"`{name}` must be a string, got {type(value).__name__}; convert it")
    prompt = "\n\n".join(part for part in (columns["instruction"], columns["input"]) if part)
    messages = [("user", prompt), ("assistant", columns["output"])]
    return [{"role": role, "content": text} for role, text in messages if text is not None]


def _read_message(found: Any, where: str, decode_arguments: bool) -> dict[str, Any]:
    message = _drop_none(found)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        got = f"keys {sorted(found)}" if isinstance(found, Mapping) else type(found).__name__
        raise DataError(
            f"{where} must be a dict with a `role` string and `content`, got {got}; rename other "
            "keys (ShareGPT: from, value) and roles (to system, user, assistant, tool)"
        )
    content = message.setdefault("content", "")
    if not isinstance(content, (str, list)):
        raise DataError(f"{where} `content` must be text, parts or None, got {content!r:.60}")
    if message.get("function_call"):
        raise DataError(
            f"{where} has a `function_call`, which chat templates no longer read; convert it to "
            "`tool_calls`: [{'type': 'function', 'function': function_call}], and the result's "
            "role from function to tool"
        )
    # An empty list would count in templates that ask `'tool_calls' in message`.
    calls = read_dicts(message.pop("tool_calls", None), f"{where} `tool_calls`")
    if calls and decode_arguments:
        calls = [_decode_call(call) for call in calls]
    return {**message, "tool_calls": calls} if calls else message


def _decode_call(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _decode_call(call["function"])}
    try:
        arguments = json.loads(call.get("arguments") or "{}")
    except (TypeError, ValueError):  # already a dict, or any text that a model wrote
        return call
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def read_dicts(found: Any, what: str) -> list[dict[str, Any]]:
    """A list of dicts, from dicts, JSON strings, or one JSON string of the whole list."""

    def decode(value: Any) -> Any:
        try:
            return json.loads(value) if isinstance(value, str) else _drop_none(value)
        except ValueError as error:
            raise DataError(f"{what}: invalid JSON {value[:60]!r} ({error}); fix it") from error

    value = decode(found or []) or []
    items = value if isinstance(value, list) else [value, "[]"]  # not a list: fails below
    dicts: list[Any] = [decode(item) if isinstance(item, str) else item for item in items]
    if not all(isinstance(item, dict) for item in dicts):
        raise DataError(
            f"{what} must be a list of dicts or of JSON strings, got {value!r:.60}; turn Python "
            "functions into schemas with transformers.utils.get_json_schema"
        )
    return dicts


def _drop_none(value: Any) -> Any:
    """A copy without keys that are None: Arrow gives each struct the keys of all others."""
    if isinstance(value, Mapping):
        return {key: _drop_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_drop_none(item) for item in value]
    return value
