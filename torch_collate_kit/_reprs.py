"""Reprs: the call that makes an object, without defaults; kinds, sizes and counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from inspect import signature
from typing import Any

__all__ = ["KindAndSize", "call_repr", "changed_settings", "dataclass_repr", "plural"]


def call_repr(owner: Any, *positional: str, **settings: Any) -> str:
    """Return ``Name(positional, setting=value)``."""
    named = (f"{name}={value!r}" for name, value in settings.items())
    return f"{type(owner).__name__}({', '.join([*positional, *named])})"


def changed_settings(owner: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, or the arguments of a constructor, without defaults.

    The value of an argument is that of the attribute of its name.
    """
    if is_dataclass(owner):
        factories = {f.name: f.default_factory for f in fields(owner)}
        made = {name: make() for name, make in factories.items() if make is not MISSING}
        defaults = {f.name: f.default for f in fields(owner)} | made
    else:
        parameters = signature(type(owner).__init__).parameters.values()
        defaults = {parameter.name: parameter.default for parameter in parameters}
    values = {name: getattr(owner, name, default) for name, default in defaults.items()}
    return {k: value for k, value in values.items() if not _is_same(value, defaults[k])}


def dataclass_repr(owner: Any) -> str:
    """Return a dataclass as the call that makes it, without fields that have the default."""
    return call_repr(owner, **changed_settings(owner))


class KindAndSize:
    """A value whose repr is its kind and size, since its contents would fill pages."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        value, kind = self._value, type(self._value).__name__
        if callable(value) and hasattr(value, "__qualname__"):
            return f"<{value.__qualname__}>"
        try:
            return f"<{kind} of {len(value):,}>"
        except TypeError:
            return f"<{kind}>"


def plural(number: int, noun: str) -> str:
    """Return a number and the noun, in the plural but for 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _is_same(value: Any, default: Any) -> bool:
    if default is None and isinstance(value, Mapping):
        return not value
    return type(value) is type(default) and bool(value == default)
