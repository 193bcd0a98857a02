"""The forms of records: where the messages are, and the ones that are written in another form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch_collate_kit.errors import DataError

__all__ = ["find_messages", "find_texts"]

_NO_CHAT_TEXT = ("system", "tools", "documents")

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_call": "assistant",
}


def find_texts(example: Mapping[str, Any]) -> tuple[str, str] | None:
    """``prompt`` and ``completion`` if they are strings, which no template renders."""
    if any(example.get(name) is not None for name in ("messages", "conversations")):
        return None
    prompt, completion = example.get("prompt"), example.get("completion")
    if not isinstance(prompt, str) or not isinstance(completion, (str, type(None))):
        return None
    extra = next((name for name in _NO_CHAT_TEXT if example.get(name)), None)
    if extra is not None:
        raise DataError(
            f"`prompt` and `completion` are strings, which no template renders, so `{extra}` "
            f"would be lost; write it into the prompt, or give lists of messages"
        )
    return prompt, completion or ""


def find_messages(example: Mapping[str, Any]) -> tuple[list[Any], int]:
    """The messages, and the index of the first that may be trained."""
    if example.get("messages") is not None:
        return _checked_list(example["messages"], "`messages`"), 0
    if example.get("conversations") is not None:
        found = _checked_list(example["conversations"], "`conversations`")
        return [_read_sharegpt(m, f"conversations[{i}]") for i, m in enumerate(found)], 0
    if example.get("prompt") is not None:
        return _prompt_and_completion(example["prompt"], example.get("completion"))
    return _alpaca_messages(example), 0


def _checked_list(found: Any, what: str) -> list[Any]:
    if not isinstance(found, (list, tuple)):
        raise DataError(
            f"{what} must be a list of dicts, got {type(found).__name__}; decode a JSON "
            "string, or turn a dict of lists into a list of dicts"
        )
    return list(found)


def _read_sharegpt(found: Any, where: str) -> Any:
    if not isinstance(found, Mapping) or ("from" not in found and "role" in found):
        return found  # has `role` and `content`, or is refused as a message
    speaker, value = found.get("from"), found.get("value")
    role = _SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise DataError(
            f"{where} is from {speaker!r}, which is none of {', '.join(_SHAREGPT_ROLES)}; rename it"
        )
    if not isinstance(value, str):
        raise DataError(f"{where} `value` must be text, got {value!r:.60}; convert or rename it")
    rest = {k: v for k, v in found.items() if k not in ("from", "value")}
    if speaker != "function_call":
        return {**rest, "role": role, "content": value}
    return {**rest, "role": role, "content": None, "tool_calls": _sharegpt_calls(value, where)}


def _sharegpt_calls(value: str, where: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(value)
    except ValueError as error:
        raise DataError(
            f"{where} is a function_call, but its value {value!r:.60} is no JSON ({error}); "
            "fix it, or give it as text from gpt"
        ) from error
    calls = found if isinstance(found, list) else [found]
    for call in calls:
        if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
            raise DataError(
                f"{where} is a function_call, so its value must be the JSON of a dict with `name` "
                f"and `arguments`, got {value!r:.60}; fix it, or give it as text from gpt"
            )
    return [{"type": "function", "function": call} for call in calls]


def _prompt_and_completion(prompt: Any, completion: Any) -> tuple[list[Any], int]:
    if isinstance(prompt, (list, tuple)) and isinstance(completion, (list, tuple, type(None))):
        return [*prompt, *(completion or [])], len(prompt)
    raise DataError(
        "`prompt` and `completion` must be two strings or two lists of messages, got "
        f"{type(prompt).__name__} and {type(completion).__name__}; convert one of them"
    )


def _alpaca_messages(example: Mapping[str, Any]) -> list[Any]:
    columns = {name: example.get(name) for name in ("instruction", "input", "output")}
    if columns["instruction"] is None:
        given = sorted(key for key, value in example.items() if value is not None)
        raise DataError(
            f"no `messages` and no `instruction` in the columns {given}; rename the chat column to "
            "`messages`, or give `conversations` (ShareGPT), `prompt` and `completion`, or "
            "`instruction` and `output` (Alpaca)"
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
