"""Argument checks, whose errors say how to fix what was found; reprs; a cached property."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from inspect import signature
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
from numpy.ma import MaskedArray

from torch_collate_kit.errors import DataError

__all__ = ["KindAndSize", "call_repr", "changed_settings", "dataclass_repr", "plural"]

T = TypeVar("T")


class computed_once(Generic[T]):
    """A cached property without the lock of ``functools``, which hangs forks."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute

    def __get__(self, owner: Any, kind: type) -> T:
        value = vars(owner)[self.compute.__name__] = self.compute(owner)
        return value


def checked_int(name: str, value: Any, *, minimum: int = 1, hint: str = "") -> int:
    """Return ``value`` as a Python int of at least ``minimum``; NumPy integers count, not bools."""
    way_out = f"; {hint}" if hint else ""
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(
            f"{name} must be an int, got {value!r} of type {type(value).__name__}{way_out}"
        )
    number = operator.index(value)
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}{way_out}")
    return number


def checked_optional_int(name: str, value: Any, *, hint: str) -> int | None:
    """Return ``value`` as ``checked_int`` does; None is allowed and returned."""
    return None if value is None else checked_int(name, value, hint=hint)


def checked_bool(name: str, value: Any, others: str = "") -> bool:
    """Return ``value`` if it is True or False; refuse what is only truthy or falsy."""
    if not isinstance(value, bool):
        choices = f"True, False or {others}" if others else "True or False"
        raise TypeError(f"{name} must be {choices}, got {value!r}")
    return value


def checked_choice(name: str, value: Any, choices: tuple[str | None, ...]) -> None:
    """Raise ValueError, listing ``choices``, when ``value`` is not one of them."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        valid = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {valid}; got {value!r}")


def checked_lengths(lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return ``lengths`` as int64 [N], all positive: a view if they are int64, else a copy."""
    hint = "pass one int per example, such as [len(ids) for ids in input_ids]"
    if isinstance(lengths, MaskedArray):
        raise TypeError("lengths is a masked array, whose mask would be lost; pass .compressed()")
    if isinstance(lengths, (list, tuple)) and not {bool, np.bool_}.isdisjoint(map(type, lengths)):
        where = next(i for i, n in enumerate(lengths) if isinstance(n, (bool, np.bool_)))
        raise TypeError(f"lengths[{where}] is {lengths[where]!r}, a bool; {hint}")
    _check_no_examples(lengths)
    try:
        array = np.asarray(lengths)
    except ValueError as error:
        raise ValueError(f"lengths must be 1-D, got a ragged nested sequence; {hint}") from error
    if array.ndim != 1:
        raise ValueError(f"lengths must be 1-D, got shape {array.shape}; {hint}")
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    most = np.iinfo(np.int64).max
    if array.dtype.kind not in "iu" or (longest := int(array.max())) > most:
        _raise_not_integers(array, hint)
    if array.min() < 1:
        first = int(np.argmax(array < 1))
        raise DataError(
            f"example {first} has length {int(array[first])}, but a length must be at least 1; "
            "remove empty examples before packing"
        )
    if longest * len(array) > most and (total := sum(array.tolist())) > most:
        raise DataError(
            f"all lengths together are {total}, more than int64 can hold; check how the lengths "
            "were computed"
        )
    return array.astype(np.int64, copy=False)


def _check_no_examples(lengths: Any) -> None:
    """Raise TypeError for examples in place of their lengths, without their contents."""
    kind = type(lengths).__name__
    if hasattr(lengths, "lengths"):
        raise TypeError(f"lengths is a {kind}, not its lengths; pass its .lengths")
    if hasattr(lengths, "column_names"):  # of datasets, or a table of Arrow
        raise TypeError(
            f"lengths is a {kind}, not its lengths; pass TokenizedDataset(data), or its .lengths"
        )
    is_sequence = isinstance(lengths, (list, tuple)) and len(lengths) > 0
    if isinstance(lengths, Mapping) or (is_sequence and isinstance(lengths[0], Mapping)):
        raise TypeError(
            f"lengths is a {kind} of {'columns' if isinstance(lengths, Mapping) else 'examples'}; "
            'pass the length of each example: [len(example["input_ids"]) for example in examples]'
        )


def _raise_not_integers(array: npt.NDArray[Any], hint: str) -> NoReturn:
    """Raise TypeError for the first element that is not an integer, DataError if over int64."""
    for i, n in enumerate(array.tolist()):
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(
                f"lengths must be integers, got dtype {array.dtype}: lengths[{i}] is {n!r:.60}; "
                f"{hint}"
            )
    longest = max(array.tolist())
    raise DataError(
        f"example {array.tolist().index(longest)} has length {longest}, more than int64 can hold; "
        "check how the lengths were computed"
    )


@lru_cache(maxsize=4096)
def respelt(key: str, names: tuple[str, ...]) -> str | None:
    """Return the one of ``names`` that ``key`` is but for case, "_", a plural, or one slip."""
    return next((name for name in names if _is_one_slip(bare_key(key), bare_key(name))), None)


def bare_key(key: str) -> str:
    """Return a key without case, a plural, and characters other than letters and digits."""
    return "".join(filter(str.isalnum, key.lower())).rstrip("s")


def _is_one_slip(a: str, b: str) -> bool:
    """Tell whether two words differ in one letter, added, lost or changed, or in two swapped."""
    while a and b and a[0] == b[0]:
        a, b = a[1:], b[1:]
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    return (len(a) < 2 and len(b) < 2) or (len(a) == 2 and a == b[::-1])


def needed_package(name: str, purpose: str, *, install: str | None = None) -> Any:
    """Import a module that only ``purpose`` needs; the ImportError has the pip command."""
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != package:  # it is installed, but a package that it imports is not
            raise
        message = f"{purpose} needs the package {package}: pip install {install or package}"
        raise ImportError(message, name=package) from error


def type_name(value: object) -> str:
    """Return the name of a value's type with its article: "a list", "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


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
