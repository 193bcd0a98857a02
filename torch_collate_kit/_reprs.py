"""How objects show their settings: as the call that makes them, without what is the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from inspect import signature
from typing import Any

__all__ = ["Shown", "call_repr", "changed_fields", "changed_settings", "dataclass_repr"]


def call_repr(owner: Any, *positional: str, **settings: Any) -> str:
    """``Name(positional, setting=value)``.

    >>> call_repr([], "8", seed=3)
    'list(8, seed=3)'
    """
    named = (f"{name}={value!r}" for name, value in settings.items())
    return f"{type(owner).__name__}({', '.join([*positional, *named])})"


def changed_settings(owner: Any) -> dict[str, Any]:
    """The attributes that are named as an argument of the constructor and are not its default.

    >>> class Shape:
    ...     def __init__(self, *, sides=4, name=""): self.sides, self.name = sides, name
    >>> changed_settings(Shape(sides=3))
    {'sides': 3}
    """
    changed = {}
    for name, parameter in signature(type(owner).__init__).parameters.items():
        value = getattr(owner, name, parameter.default)
        if not _is_same(value, parameter.default):
            changed[name] = value
    return changed


def changed_fields(owner: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not the default.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Point:
    ...     x: int = 0
    ...     y: int = 0
    >>> changed_fields(Point(y=2)), dataclass_repr(Point(y=2))
    ({'y': 2}, 'Point(y=2)')
    """
    changed = {}
    for field in fields(owner):
        value, make = getattr(owner, field.name), field.default_factory
        if not _is_same(value, field.default if make is MISSING else make()):
            changed[field.name] = value
    return changed


def dataclass_repr(owner: Any) -> str:
    """A dataclass as the call that makes it, without fields that have the default."""
    return call_repr(owner, **changed_fields(owner))


class Shown:
    """Shows a value by its kind and size, since its contents would fill pages.

    >>> Shown([1, 2]), Shown(iter("ab")), Shown(max)
    (<list of 2>, <str_ascii_iterator>, <max>)
    """

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


def _is_same(value: Any, default: Any) -> bool:
    if default is None and isinstance(value, Mapping):
        return not value
    return type(value) is type(default) and bool(value == default)
