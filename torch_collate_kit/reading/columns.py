"""Columns in any form -> ndarrays, checked.

``struct`` converts lists: the fastest way (10 to 15 ns per token), and it refuses floats as ids.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import torch
from numpy.ma import MaskedArray
from torch import Tensor

from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged, unchecked
from torch_collate_kit.reading.source import is_sequence

ROW_OF_DATASETS = "PackedRows.to_datasets() row"  # and its number, in place of token ids
Kind = Literal["ids", "labels", "numbers", "whole numbers"]
_INT, _FLOAT = ("q", "iu"), ("d", "iufb")  # type code of lists, kinds of dtypes that are accepted
_KINDS: dict[Kind, tuple[str, str, str]] = {
    "ids": (*_INT, "token ids index an embedding, convert them"),
    "labels": (*_INT, "labels are token ids (a mask goes into loss_mask), convert ids"),
    "numbers": (*_FLOAT, "give numbers"),
    "whole numbers": ("q", "iufb", "give numbers"),  # as integers, where they come in lists
}
_FORM_OF = attrgetter("dtype", "ndim", "layout", "is_cpu")


class Rows:
    """Column of arrays or tensors that are joined only when rows are put in their order."""

    def __init__(self, arrays: list[Any], offsets: np.ndarray) -> None:
        self.arrays, self.offsets = arrays, offsets

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: int) -> np.ndarray:
        array: Any = self.arrays[index]
        return tensor_to_numpy("", None, array) if isinstance(array, Tensor) else array

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self.__getitem__, range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        """Entries per row: int64 [N]."""
        return self.offsets[1:] - self.offsets[:-1]


Numbers = Ragged | Rows  # of ndarrays


def number_column(name: str, column: Any, kind: Kind, *, first: int = 0) -> Numbers:
    """Return the column as flat arrays of its kind; errors count examples from ``first``."""
    typecode, kinds, advice = _KINDS[kind]
    if isinstance(column, Ragged):
        flat, offsets = column.values, column.offsets
        flat = tensor_to_numpy(name, None, flat) if isinstance(flat, Tensor) else flat
        if flat.ndim != 1:
            raise DataError(f"column {name} has {flat.ndim}-D values; a column holds flat rows")
        rows = [flat]
    else:
        column = list(column)  # a pandas column has labels
        types = set(map(type, column))
        if types == {list}:
            return _from_lists(name, column, typecode, first)
        if types == {Tensor} and _are_plain(name, column, kinds):
            return Rows(column, _offsets(list(map(Tensor.numel, column))))
        rows = column
        if types != {np.ndarray} or any(row.ndim != 1 for row in rows):
            rows = [_row_array(name, i, row, typecode) for i, row in enumerate(column)]
        offsets = _offsets(list(map(len, rows)))
    dtypes = {row.dtype for row in rows}
    if any(dtype.kind not in kinds for dtype in dtypes):
        i, dtype = next((i, r.dtype) for i, r in enumerate(rows) if r.dtype.kind not in kinds)
        if kinds == "iu":
            advice = f"not integers; {advice} with .astype(np.int64)"
        separator = ", " if typecode == "q" else "; "
        raise DataError(f"example {i}: {name} has dtype {dtype}{separator}{advice}")
    if len(rows) == 1:
        return unchecked(rows[0], offsets)
    if len(dtypes) == 1:
        return Rows(rows, offsets)
    for i, row in enumerate(rows):
        if kind == "whole numbers":
            rows[i] = _whole(name, i, row)
        elif kind == "labels" and (is_bad := are_wrapped(row)).any():
            raise wrapped_label(i, int(is_bad.argmax()), row.dtype)  # joined, it would be an id
    # a uint64 among int64s would make them floats
    dtype = np.dtype({"q": np.int64, "d": np.float64}[typecode])
    return unchecked(np.concatenate(rows, dtype=dtype), offsets)


def are_wrapped(labels: np.ndarray) -> np.ndarray:
    """Return where a label is what -100 becomes in its unsigned dtype: bool."""
    if labels.dtype.kind != "u":
        return np.zeros(len(labels), dtype=np.bool_)
    is_wrapped: np.ndarray = labels == np.array(IGNORE_INDEX).astype(labels.dtype)
    return is_wrapped


def wrapped_label(example: int, token: int, dtype: np.dtype[Any]) -> DataError:
    """Return the error for a label that is -100 in an unsigned dtype."""
    value = np.array(IGNORE_INDEX).astype(dtype)
    return DataError(
        f"example {example}: labels is {value} at token {token} in dtype {dtype}, which is what "
        f"{IGNORE_INDEX} becomes there, so the token would be trained; store labels in a signed "
        "dtype such as int32"
    )


def _whole(name: str, index: int, row: np.ndarray) -> np.ndarray:
    """Return numbers among those of another dtype as int64."""
    with np.errstate(invalid="ignore"):
        whole = row.astype(np.int64)
    if not np.array_equal(whole, row):
        raise DataError(
            f"example {index}: {name} has dtype {row.dtype}, and other examples have integers; "
            "give whole numbers that fit 64 bits"
        )
    return whole


def _are_plain(name: str, tensors: list[Tensor], kinds: str) -> bool:
    """Return whether torch joins these tensors without a change: flat, dense, of one dtype."""
    forms, dtype = set(map(_FORM_OF, tensors)), tensors[0].dtype
    is_plain = forms == {(dtype, 1, torch.strided, True)}
    return is_plain and tensor_to_numpy(name, 0, tensors[0][:0]).dtype.kind in kinds


def _offsets(lengths: list[int]) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _from_lists(name: str, rows: Sequence[list[Any]], typecode: str, first: int = 0) -> Ragged:
    """Return Python numbers as int64 ("q") or float64 ("d"), and 0/1 masks as bytes."""
    offsets = _offsets(list(map(len, rows)))
    if typecode == "d":
        try:
            flat = b"".join(list(map(bytes, rows)))
            return unchecked(np.frombuffer(flat, dtype=np.uint8), offsets)
        except (TypeError, ValueError):
            pass  # floats, other numbers, or no numbers at all
    parts = []
    for i, row in enumerate(rows, start=first):
        try:
            parts.append(_packer(len(row), typecode)(*row))
        except (struct.error, TypeError, OverflowError):
            raise _bad_entry(name, i, row, typecode) from None
    numbers = np.frombuffer(b"".join(parts), dtype=typecode)
    if typecode == "d":
        return unchecked(numbers, offsets)
    # struct takes True for 1, and a mask under the name of ids would be trained towards
    places = np.flatnonzero(numbers.view(np.uint64) <= 1)  # 0 and 1, of which ids have few
    in_rows = np.searchsorted(offsets, places, side="right") - 1
    for i, j in zip(in_rows.tolist(), (places - offsets[in_rows]).tolist(), strict=True):
        if isinstance(rows[i][j], bool):
            what = "it must be an integer that fits 64 bits"
            if name == "labels":
                what = "labels are token ids or -100; a mask goes into loss_mask"
            raise DataError(f"example {first + i}: {name}[{j}] is {rows[i][j]} (bool); {what}")
    return unchecked(numbers, offsets)


@lru_cache(maxsize=8192)
def _packer(length: int, typecode: str) -> Callable[..., bytes]:
    """Return a packer: ``struct`` itself keeps a hundred, and making one takes a microsecond."""
    return struct.Struct(f"{length}{typecode}").pack


def _row_array(name: str, index: int, row: Any, typecode: str) -> np.ndarray:
    """Return one entry of a column as a flat array."""
    if isinstance(row, Tensor):
        row = tensor_to_numpy(name, index, row)
    elif is_sequence(row):
        return _from_lists(name, [list(row)], typecode, index).values
    elif not isinstance(row, np.ndarray):
        raise DataError(
            f"example {index}: {name} is {'None' if row is None else type(row).__name__}; give a "
            "list, a 1-D ndarray or a 1-D tensor"
        )
    elif isinstance(row, MaskedArray):
        raise DataError(
            f"example {index}: {name} is a masked array, whose mask would be lost; give "
            ".compressed() or .filled(value)"
        )
    if row.ndim != 1:
        raise DataError(
            f"example {index}: {name} is {row.ndim}-D with shape {row.shape}; an example is one "
            f"flat row, take it out of its batch first ({name}[0])"
        )
    return row


def tensor_to_numpy(name: str, index: int | None, tensor: Tensor) -> np.ndarray:
    """Return a tensor of any dtype and device as an array, a view if it can be one."""
    where = f"column {name}" if index is None else f"example {index}: {name}"
    if tensor.is_nested:
        raise DataError(f"{where} is a nested tensor; give each example its own, as of .unbind()")
    if tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized):
        values = tensor.detach().cpu().resolve_conj().resolve_neg()
        is_short = values.is_floating_point() and values.dtype != torch.float64
        return (values.float() if is_short else values).numpy()
    kind = "quantized tensor" if tensor.is_quantized else f"tensor of layout {tensor.layout}"
    raise DataError(
        f"{where} is a {kind} on device {tensor.device}; give a dense one that holds its values"
    )


def _bad_entry(name: str, index: int, row: list[Any], typecode: str) -> DataError:
    for j, entry in enumerate(row):
        try:
            struct.pack(typecode, entry)
        except (struct.error, TypeError, OverflowError):
            where = f"example {index}: {name}[{j}] is {entry!r:.40}"
            if isinstance(entry, list | tuple | np.ndarray):
                hint = ", and examples are lists of segments all or none"
                hint = hint if name == "input_ids" else ""
                return DataError(f"{where}, so {name} is nested; a segment is one flat list{hint}")
            if isinstance(entry, str) and entry.startswith(ROW_OF_DATASETS):
                return DataError(f"{where}, whose format was changed; read to_datasets() as it is")
            wanted = "an integer that fits 64 bits" if typecode == "q" else "a number"
            return DataError(f"{where} ({type(entry).__name__}); it must be {wanted}")
    raise AssertionError("the row converts one by one but not as a whole")
