"""One raw column, converted: one flat array of numbers and where its rows begin.

Ragged columns are looked at where they lie, arrays are joined, and Python lists are converted once
a column (10 to 15 ns a token, the dearest step of all: hand over arrays where speed matters).
``struct`` does it because it is the fastest way and refuses floats as ids; ``np.fromiter`` would
cut 1.5 to 1 without a word.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit._host_memory import host_array
from torch_collate_kit.collators._examples import is_sequence
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged

__all__ = ["int_column", "tensor_to_numpy", "weight_column"]


def int_column(name: str, column: Any) -> Ragged:
    advice = "not integers; token ids index an embedding, convert them with .astype(np.int64)"
    return _column(name, column, "q", "iu", advice)


def weight_column(name: str, column: Any, advice: str = "give 0/1 or weights") -> Ragged:
    return _column(name, column, "f", "iufb", advice)


def _column(name: str, column: Any, typecode: str, kinds: str, advice: str) -> Ragged:
    """Flat values of a NumPy dtype of these kinds, and offsets from 0 on."""
    if isinstance(column, Ragged):
        values = column.flat_values
        flat = values if isinstance(values, np.ndarray) else tensor_to_numpy(name, None, values)
        if flat.ndim != 1:
            raise DataError(f"column {name} has {flat.ndim}-D values; a column holds flat rows")
        rows, offsets = [flat], column.offsets - column.offsets[0]
    else:
        types = set(map(type, column))
        if types == {list}:
            return _from_lists(name, column, typecode)
        # a pandas column has labels, not places
        joined = _joined(list(column), kinds) if types == {np.ndarray} else None
        if joined is not None:
            return joined
        rows = [_as_array(name, i, row, typecode) for i, row in enumerate(column)]
        offsets = np.cumsum([0, *map(len, rows)])
    dtypes = {row.dtype for row in rows}
    if any(dtype.kind not in kinds for dtype in dtypes):
        i, dtype = next((i, r.dtype) for i, r in enumerate(rows) if r.dtype.kind not in kinds)
        separator = ", " if typecode == "q" else "; "
        raise DataError(f"example {i}: {name} has dtype {dtype}{separator}{advice}")
    if len(rows) == 1:
        return Ragged(rows[0], offsets)
    # a uint64 among int64s would make them floats
    mixed = {"q": np.int64, "f": np.float64}[typecode] if len(dtypes) > 1 else None
    flat = host_array(int(offsets[-1]), mixed or rows[0].dtype)
    return Ragged(np.concatenate(rows, out=flat, casting="same_kind"), offsets)


def _joined(arrays: Sequence[np.ndarray], kinds: str) -> Ragged | None:
    """Flat arrays of one dtype, end to end; None where they are anything else."""
    dtype, ndim = arrays[0].dtype, arrays[0].ndim
    if dtype.kind not in kinds or ndim != 1:
        return None
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays)), out=offsets[1:])
    flat = host_array(int(offsets[-1]), dtype)
    try:
        return Ragged(np.concatenate(arrays, out=flat, casting="no"), offsets)
    except (TypeError, ValueError):  # another dtype, or more dimensions
        return None


def _from_lists(name: str, rows: Sequence[list[Any]], typecode: str, first: int = 0) -> Ragged:
    """Python numbers as int64 ("q") or float32 ("f"); 0/1 masks as bytes."""
    lengths = [len(row) for row in rows]
    if typecode == "f":
        try:
            flat = b"".join([bytes(row) for row in rows])
            return Ragged.from_lengths(np.frombuffer(flat, dtype=np.uint8), lengths)
        except (TypeError, ValueError):
            pass  # floats, other numbers, or no numbers at all
    parts = []
    for i, row in enumerate(rows, start=first):
        try:
            parts.append(_packer(len(row), typecode)(*row))
        except (struct.error, TypeError, OverflowError):
            raise _bad_entry(name, i, row, typecode) from None
    return Ragged.from_lengths(np.frombuffer(b"".join(parts), dtype=typecode), lengths)


@lru_cache(maxsize=8192)
def _packer(length: int, typecode: str) -> Callable[..., bytes]:
    """``struct`` itself keeps a hundred formats, and reading one takes a microsecond."""
    return struct.Struct(f"{length}{typecode}").pack


def _as_array(name: str, index: int, row: Any, typecode: str) -> np.ndarray:
    if isinstance(row, Tensor):
        row = tensor_to_numpy(name, index, row)
    elif is_sequence(row):
        return _from_lists(name, [list(row)], typecode, index).values
    elif not isinstance(row, np.ndarray):
        raise DataError(
            f"example {index}: {name} is {'None' if row is None else type(row).__name__}; give a "
            "list, a 1-D ndarray or a 1-D tensor"
        )
    if row.ndim != 1:
        raise DataError(
            f"example {index}: {name} is {row.ndim}-D with shape {row.shape}; an example is one "
            f"flat row, take it out of its batch first ({name}[0])"
        )
    return row


def tensor_to_numpy(name: str, index: int | None, tensor: Tensor) -> np.ndarray:
    """A tensor of any dtype and device; floats as float32. No ``index``: it is the whole column."""
    try:
        values = tensor.detach().cpu()
        return (values.float() if values.is_floating_point() else values).numpy()
    except (NotImplementedError, TypeError):  # a meta or sparse tensor
        where = f"column {name}" if index is None else f"example {index}: {name}"
        raise DataError(
            f"{where} is a tensor of layout {tensor.layout} on device {tensor.device}; give a "
            "dense one that holds its values"
        ) from None


def _bad_entry(name: str, index: int, row: list[Any], typecode: str) -> DataError:
    for j, entry in enumerate(row):
        try:
            struct.pack(typecode, entry)
        except (struct.error, TypeError, OverflowError):
            where = f"example {index}: {name}[{j}] is {entry!r:.40}"
            if isinstance(entry, list | tuple | np.ndarray):
                return DataError(f"{where}, so {name} is nested; an example is one flat list")
            wanted = "an integer that fits 64 bits" if typecode == "q" else "a number"
            return DataError(f"{where} ({type(entry).__name__}); it must be {wanted}")
    raise AssertionError("the row converts one by one but not as a whole")
