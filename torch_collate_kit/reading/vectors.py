"""Columns of a vector per token, such as a teacher's top-k: arrays ``[T, k]`` in place of ``[T]``.

Only the declared shape says that values are vectors: lists of lists alone could be segments, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged, unchecked
from torch_collate_kit.reading.columns import Kind, Numbers, Rows, number_column, tensor_to_numpy
from torch_collate_kit.reading.source import is_sequence

_Shape = tuple[int, ...]


def vector_column(name: str, column: Any, kind: Kind, shape: _Shape) -> Numbers:
    """Return the column as arrays ``[T, *shape]`` of a NumPy dtype of its kind."""
    size = math.prod(shape)
    flat: Any
    if isinstance(column, Ragged):
        _check_shape(f"column {name}", column.values, shape)
        flat = Ragged(column.values.reshape(-1), column.offsets * size)
    else:
        column = list(column)
        flat = [_flat(name, i, row, shape) for i, row in enumerate(column)]
    try:
        numbers = number_column(name, flat, kind)
    except DataError:  # which counts all numbers of an example
        for i, row in enumerate(column):
            if is_sequence(row):
                for place, vector in _vectors(name, row, shape, i):
                    number_column(place, [vector], kind, first=i)
        raise
    offsets = numbers.offsets // size
    if isinstance(numbers, Rows):
        return Rows([row.reshape(-1, *shape) for row in numbers.arrays], offsets)
    return unchecked(numbers.values.reshape(-1, *shape), offsets)


def shape_of(column: Any) -> _Shape:
    """Return the shape of the first entry of the first row that has one; () of a number."""
    if isinstance(column, Ragged):
        return tuple(column.values.shape[1:])
    arrays = np.ndarray | Tensor
    rows = (row for row in column if is_sequence(row) or (isinstance(row, arrays) and row.ndim))
    entry: Any = next((row[0] for row in rows if len(row)), None)
    shape: list[int] = []
    while is_sequence(entry) and len(entry):
        shape, entry = [*shape, len(entry)], entry[0]
    return (*shape, *entry.shape) if isinstance(entry, arrays) else tuple(shape)


def _flat(name: str, index: int, row: Any, shape: _Shape) -> Any:
    """Return the numbers of an example, one after the other: an array, a tensor or a list."""
    is_array = isinstance(row, np.ndarray) and not (row.dtype.hasobject and row.ndim == 1)
    if isinstance(row, Tensor) and (row.is_nested or row.layout is not torch.strided):
        tensor_to_numpy(name, index, row)  # which says what is wrong
    if isinstance(row, Tensor) or is_array:
        _check_shape(f"example {index}: {name}", row, shape)
        return row.reshape(-1)
    if not isinstance(row, np.ndarray) and not is_sequence(row):
        kind = "None" if row is None else type(row).__name__
        raise DataError(f"example {index}: {name} is {kind}; give {_wanted(shape)}")
    parts = list(row)
    for i, size in enumerate(shape):
        kinds = set(map(type, parts))
        if kinds in ({np.ndarray}, {Tensor}) and {part.shape for part in parts} == {shape[i:]}:
            stack: Any = np.stack if kinds == {np.ndarray} else torch.stack
            return stack(parts).reshape(-1)
        if kinds - {list, tuple} or set(map(len, parts)) - {size}:  # wrong, or of several types
            return [number for _, vector in _vectors(name, row, shape, index) for number in vector]
        parts = list(chain.from_iterable(parts))
    return parts


def _vectors(
    place: str, value: Any, shape: _Shape, index: int, depth: int = 0
) -> Iterator[tuple[str, list[Any]]]:
    """Return the vectors in nested lists, and where each is; DataError if one has another size."""
    for i, part in enumerate(value):
        where, size = f"{place}[{i}]", shape[depth]
        if not is_sequence(part) and not (isinstance(part, np.ndarray | Tensor) and part.ndim):
            raise DataError(
                f"example {index}: {where} is {part!r:.40} ({type(part).__name__}), and the "
                f"field's shape is {shape}; give {_wanted(shape)}, or declare no shape"
            )
        if len(part) != size:
            raise DataError(
                f"example {index}: {where} has {len(part)} entries, and the field's shape "
                f"is {shape}; give {size}, and where there are fewer fill up with what your loss "
                "leaves out"
            )
        if depth + 1 < len(shape):
            yield from _vectors(where, part, shape, index, depth + 1)
        else:
            yield where, list(part)


def _check_shape(owner: str, array: Any, shape: _Shape) -> None:
    if not array.ndim or (len(array) and tuple(array.shape[1:]) != shape):
        raise DataError(
            f"{owner} has shape {tuple(array.shape)}, and the field's shape is {shape}; give "
            f"{_wanted(shape)}"
        )


def _wanted(shape: _Shape) -> str:
    return f"[tokens, {', '.join(map(str, shape))}] numbers, as lists, an array or a tensor"
