"""A column, in any form -> ndarrays, checked: rows of numbers, or one value per example.

Ragged columns are read where they lie, arrays are joined only in the order of the rows, and Python
lists are converted once per column (10 to 15 ns per token, the most expensive step of all: hand
over arrays where speed matters). ``struct`` converts them because it is the fastest way and refuses
floats as ids; ``np.fromiter`` would cut 1.5 to 1 without a word.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import torch
from numpy.ma import MaskedArray
from torch import Tensor

from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.source import is_sequence

__all__ = [
    "Kind",
    "Numbers",
    "Rows",
    "are_wrapped",
    "flag_column",
    "id_column",
    "is_number",
    "number_column",
    "scalar_column",
    "spread_numbers",
    "tensor_to_numpy",
    "wrapped_label",
]

Kind = Literal["ids", "labels", "numbers", "whole numbers"]
_INT, _FLOAT = ("q", "iu"), ("d", "iufb")  # type code of lists, kinds of dtypes that are taken
_KINDS: dict[Kind, tuple[str, str, str]] = {
    "ids": (*_INT, "token ids index an embedding, convert them"),
    "labels": (*_INT, "labels are token ids (a mask goes into loss_mask), convert ids"),
    "numbers": (*_FLOAT, "give numbers"),
    "whole numbers": ("q", "iufb", "give numbers"),  # as integers, where they come in lists
}
_TYPES = {bool: "b", int: "i", float: "f"}  # of single values, and the kinds of their dtypes


_DTYPE_OF = attrgetter("dtype")


class Rows:
    """A column of arrays that were not joined yet: they are, when rows are put in their order."""

    def __init__(self, arrays: list[np.ndarray], offsets: np.ndarray) -> None:
        self.arrays, self.offsets = arrays, offsets

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.arrays[index]

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.arrays)

    @property
    def lengths(self) -> np.ndarray:
        return self.offsets[1:] - self.offsets[:-1]


Numbers = Ragged | Rows  # of ndarrays


def number_column(name: str, column: Any, kind: Kind) -> Numbers:
    """The column as flat arrays of a NumPy dtype that its kind may have, not copied if it is one.

    Raises:
        DataError: an entry of another form, or of another dtype.
    """
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
            return _from_lists(name, column, typecode)
        whole = _whole_rows(column, kinds) if types == {np.ndarray} else None
        if whole is not None:
            return whole
        flat = _joined_tensors(name, column) if types == {Tensor} else None
        if flat is not None:
            rows, offsets = [flat], _offsets(list(map(Tensor.numel, column)))
        else:
            rows = [_row_array(name, i, row, typecode) for i, row in enumerate(column)]
            offsets = _offsets([len(row) for row in rows])
    dtypes = {row.dtype for row in rows}
    if any(dtype.kind not in kinds for dtype in dtypes):
        i, dtype = next((i, r.dtype) for i, r in enumerate(rows) if r.dtype.kind not in kinds)
        if kinds == "iu":
            advice = f"not integers; {advice} with .astype(np.int64)"
        separator = ", " if typecode == "q" else "; "
        raise DataError(f"example {i}: {name} has dtype {dtype}{separator}{advice}")
    if kind == "whole numbers" and len(dtypes) > 1:
        rows = [_whole(name, i, row) for i, row in enumerate(rows)]
    if kind == "labels" and len(dtypes) > 1:
        for i, row in enumerate(rows):  # joined, it could not be told from a token id
            if (is_bad := are_wrapped(row)).any():
                raise wrapped_label(i, int(is_bad.argmax()), row.dtype)
    # a uint64 among int64s would make them floats
    mixed = {"q": np.int64, "d": np.float64}[typecode] if len(dtypes) > 1 else None
    return Ragged(rows[0] if len(rows) == 1 else np.concatenate(rows, dtype=mixed), offsets)


def are_wrapped(labels: np.ndarray) -> np.ndarray:
    """Return where a label is what -100 becomes in its unsigned dtype: bool.

    >>> are_wrapped(np.array([5, -100]).astype(np.uint16)).tolist()
    [False, True]
    """
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
    """Numbers among those of another dtype: int64."""
    with np.errstate(invalid="ignore"):
        whole = row.astype(np.int64)
    if not np.array_equal(whole, row):
        raise DataError(
            f"example {index}: {name} has dtype {row.dtype}, and other examples have integers; "
            "give whole numbers that fit 64 bits"
        )
    return whole


def _whole_rows(arrays: list[np.ndarray], kinds: str) -> Rows | None:
    """Flat arrays of one dtype as they are; None where they are anything else."""
    dtype = arrays[0].dtype
    if dtype.kind not in kinds or any(a.ndim != 1 or a.dtype != dtype for a in arrays):
        return None
    return Rows(arrays, _offsets([len(array) for array in arrays]))


def _joined_tensors(name: str, tensors: list[Tensor]) -> np.ndarray | None:
    """Return flat, dense tensors of one dtype end to end; None where they are anything else."""
    if len(set(map(_DTYPE_OF, tensors))) > 1:  # joined, they would be promoted
        return None
    try:
        flat = torch.cat(tensors)
    except RuntimeError:  # on several devices, or not flat
        return None
    is_dense = flat.layout is torch.strided and not (flat.is_nested or flat.is_quantized)
    if flat.ndim != 1 or flat.is_meta or not is_dense:
        return None
    return tensor_to_numpy(name, None, flat)


def _offsets(lengths: list[int]) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _from_lists(name: str, rows: Sequence[list[Any]], typecode: str, first: int = 0) -> Ragged:
    """Python numbers as int64 ("q") or float64 ("d"); 0/1 masks as bytes."""
    lengths = [len(row) for row in rows]
    if typecode == "d":
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
    numbers = Ragged.from_lengths(np.frombuffer(b"".join(parts), dtype=typecode), lengths)
    if typecode == "q":
        _refuse_bools(name, rows, numbers, first)
    return numbers


def _refuse_bools(name: str, rows: Sequence[list[Any]], ids: Ragged, first: int) -> None:
    """``struct`` takes True for 1, and a mask under the name of ids would be trained towards."""
    places = np.flatnonzero(ids.values.view(np.uint64) <= 1)  # 0 and 1, of which ids have few
    in_rows = np.searchsorted(ids.offsets, places, side="right") - 1
    columns = places - ids.offsets[in_rows]
    for i, j in zip(in_rows.tolist(), columns.tolist(), strict=True):
        if isinstance(rows[i][j], bool):
            what = "it must be an integer that fits 64 bits"
            if name == "labels":
                what = "labels are token ids or -100; a mask goes into loss_mask"
            raise DataError(f"example {first + i}: {name}[{j}] is {rows[i][j]} (bool); {what}")


@lru_cache(maxsize=8192)
def _packer(length: int, typecode: str) -> Callable[..., bytes]:
    """``struct`` itself keeps a hundred formats, and reading one takes a microsecond."""
    return struct.Struct(f"{length}{typecode}").pack


def _row_array(name: str, index: int, row: Any, typecode: str) -> np.ndarray:
    """One entry of a column as a flat array."""
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
    """A tensor of any dtype and device, shorter floats as float32; as a view if it can be one.

    No ``index``: it is the whole column.
    """
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
                return DataError(f"{where}, so {name} is nested; an example is one flat list")
            wanted = "an integer that fits 64 bits" if typecode == "q" else "a number"
            return DataError(f"{where} ({type(entry).__name__}); it must be {wanted}")
    raise AssertionError("the row converts one by one but not as a whole")


def _one_value(value: Any) -> Any:
    """The number in a NumPy scalar, or in an array or tensor of one entry."""
    if isinstance(value, Tensor):
        is_dense = value.layout is torch.strided and not (value.is_meta or value.is_nested)
        return value.item() if is_dense and value.numel() == 1 else value
    if isinstance(value, MaskedArray):  # of a masked entry it would be 0
        return value
    single = isinstance(value, np.generic | np.ndarray) and value.size == 1
    return value.item() if single else value


def scalar_column(name: str, column: Any, kinds: str, wanted: str) -> np.ndarray:
    """Numbers of these kinds of dtypes: [N]; Python's own where one is beyond 64 bits.

    >>> scalar_column("domain", [3, np.int8(4)], "iu", "give an integer")
    array([3, 4])
    """
    if isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in kinds:
        return column
    numbers = [_one_value(value) for value in column]
    for i, number in enumerate(numbers):
        kind = next((kind for type_, kind in _TYPES.items() if isinstance(number, type_)), "?")
        if kind not in kinds:
            found = f"{number!r:.40} ({type(number).__name__})"
            raise DataError(f"example {i}: {name} is {found}; {wanted}")
    try:
        return np.array(numbers, dtype=np.int64 if kinds == "iu" else None)
    except OverflowError:
        return np.array(numbers, dtype=object)


def id_column(name: str, column: Iterable[Any], row: str = "example") -> list[Hashable]:
    """Uids as plain values that can be hashed; ``row`` is the word for what has one.

    >>> id_column("uid", [np.int64(3), "a"])
    [3, 'a']
    """
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
    """True and False, or 0 and 1, as bools.

    >>> flag_column("is_last_step", np.array([0, 1]))
    [False, True]
    """
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
    """Numbers to rows: a reward to the last token, an advantage to every token."""
    if isinstance(column, Ragged):
        return column
    if isinstance(column, np.ndarray | Tensor) and column.ndim == 1:
        column = tensor_to_numpy(name, None, column) if isinstance(column, Tensor) else column
        if column.dtype.kind in "iufb":
            return _spread(name, column, lengths)
        column = column.tolist()
    types = set(map(type, column))
    if types == {list} or (types == {np.ndarray} and all(value.ndim for value in column)):
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
