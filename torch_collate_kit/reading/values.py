"""One value per example: numbers, ids, flags; and rewards, spread over response tokens."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.ma import MaskedArray
from torch import Tensor

from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.columns import tensor_to_numpy
from torch_collate_kit.reading.source import is_sequence

_TYPES = {bool: "b", int: "i", float: "f"}  # and the kinds of their dtypes


def _one_value(value: Any) -> Any:
    """Return the number in a NumPy scalar, or in an array or tensor of one entry."""
    if isinstance(value, Tensor):
        is_dense = value.layout is torch.strided and not (value.is_meta or value.is_nested)
        return value.item() if is_dense and value.numel() == 1 else value
    if isinstance(value, MaskedArray):  # of a masked entry it would be 0
        return value
    single = isinstance(value, np.generic | np.ndarray) and value.size == 1
    return value.item() if single else value


def scalar_column(name: str, column: Any, kinds: str, wanted: str) -> np.ndarray:
    """Return numbers of these kinds of dtypes: [N]; of integers alone also Python's own."""
    if isinstance(column, Tensor):
        column = tensor_to_numpy(name, None, column)
    if isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in kinds:
        return column
    types = set(map(type, column := list(column)))
    if types <= {int, np.int64} or types <= {float, np.float64}:
        array = np.array(column)
        if array.dtype in (np.int64, np.float64) and array.dtype.kind in kinds:
            return array
    numbers = [_one_value(value) for value in column]
    for i, number in enumerate(numbers):
        kind = next((kind for type_, kind in _TYPES.items() if isinstance(number, type_)), "?")
        if kind not in kinds:
            found = f"{number!r:.40} ({type(number).__name__})"
            raise DataError(f"example {i}: {name} is {found}; {wanted}")
    try:
        array = np.array(numbers, dtype=np.int64 if kinds == "iu" else None)
    except OverflowError:
        return np.array(numbers, dtype=object)
    if array.dtype.hasobject:
        raise DataError(f"{name} has a number beyond 64 bits; give numbers that fit")
    return array


def text_column(name: str, column: Iterable[Any]) -> list[str]:
    """Return the strings of a field declared ``PerExample(str)``."""
    texts = [_one_value(value) for value in column]
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(
                f"example {i}: {name} is {text!r:.40} ({type(text).__name__}); it is declared "
                "PerExample(str), so give a string"
            )
    return list(map(str, texts))


def id_column(name: str, column: Iterable[Any], row: str = "example") -> list[Hashable]:
    """Return ids as plain hashable values; ``row`` is the name of their owner in errors."""
    if set(map(type, column := list(column))) <= {str, int}:
        return column
    uids = [_one_value(value) for value in column]
    for i, uid in enumerate(uids):
        if isinstance(uid, Tensor) or not _is_hashable(uid):  # equal tensors differ as keys
            raise DataError(
                f"{row} {i}: {name} is {uid!r:.40} ({type(uid).__name__}); rollouts are grouped "
                "by it, so give a string or an integer"
            )
        if uid is None or (uid == uid) is not True:  # NaN and NA: pandas' missing values
            owner = "prompt" if name == "uid" else "trajectory"
            without = f", or no {name} in any example" if row == "example" else ""
            raise DataError(f"{row} {i}: {name} is {uid}; give the id of its {owner}{without}")
    return uids


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)  # of a tuple that holds a list, isinstance(value, Hashable) says True
    except TypeError:
        return False
    return True


def flag_column(name: str, column: Iterable[Any], row: str = "example") -> list[bool]:
    """Return True and False, or 0 and 1, as bools."""
    if isinstance(column, np.ndarray) and column.dtype == np.bool_ and column.ndim == 1:
        return column.tolist()
    if set(map(type, column := list(column))) == {bool}:
        return column
    flags = [_one_value(value) for value in column]
    for i, flag in enumerate(flags):
        if not isinstance(flag, bool | int | float) or flag not in (0, 1):
            raise DataError(f"{row} {i}: {name} is {flag!r:.40}; it must be True or False")
    return [bool(flag) for flag in flags]


def spread_numbers(name: str, column: Any, lengths: np.ndarray) -> Any:
    """Return rows: a single reward goes to the last token, an advantage to every token."""
    if isinstance(column, Ragged):
        return column
    if isinstance(column, Tensor) and column.ndim == 1:
        column = tensor_to_numpy(name, None, column)
    if isinstance(column, np.ndarray) and column.ndim == 1:
        if column.dtype.kind in "iufb":
            return _spread(name, column, lengths)
        column = column.tolist()
    types = set(map(type, column))
    if types == {list} or (types <= {np.ndarray, Tensor} and all(v.ndim for v in column)):
        return column
    are_numbers = [is_number(value) for value in column]
    numbers = np.zeros(len(lengths))
    for i, (value, is_one) in enumerate(zip(column, are_numbers, strict=True)):
        if is_one:
            numbers[i] = _number(name, i, value)
        elif not is_sequence(value) and not isinstance(value, np.ndarray | Tensor):
            kind = "None" if value is None else type(value).__name__
            raise DataError(
                f"example {i}: {name} is {kind}; give one number, or one per response token"
            )
    rows = _spread(name, numbers, lengths)
    if all(are_numbers):
        return rows
    parts = zip(column, rows, are_numbers, strict=True)
    return [row if is_one else value for value, row, is_one in parts]


def is_number(value: Any) -> bool:
    """Return whether a value is one number, or an array or tensor without dimensions."""
    if isinstance(value, np.ndarray | Tensor):
        return value.ndim == 0
    return isinstance(value, int | float | np.number | np.bool_)


def _number(name: str, index: int, value: Any) -> float:
    number = _one_value(value)
    try:
        if isinstance(number, str | bytes):
            raise TypeError
        return float(number)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise DataError(
            f"example {index}: {name} is {number!r:.40} ({type(number).__name__}); give one number "
            "that float32 holds, or one per response token"
        ) from None


def _spread(name: str, numbers: np.ndarray, lengths: np.ndarray) -> Ragged:
    with np.errstate(over="ignore"):
        short = numbers.astype(np.float32)
    if np.isfinite(short).all():  # else it is refused, as it was given
        numbers = short
    if name == "advantages":
        return Ragged.from_lengths(np.repeat(numbers, lengths), lengths)
    rows = Ragged.from_lengths(np.zeros(int(lengths.sum()), dtype=numbers.dtype), lengths)
    rows.values[rows.offsets[1:] - 1] = numbers
    return rows
