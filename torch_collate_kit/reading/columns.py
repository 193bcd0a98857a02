"""Columns in any form -> ndarrays, checked.

``struct`` converts lists: the fastest way (10 to 15 ns per token), and it refuses floats as ids.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
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
_NDIM, _DTYPE = attrgetter("ndim"), attrgetter("dtype")


class RowArrays:
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


Numbers = Ragged | RowArrays  # of ndarrays


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
            return RowArrays(column, _offsets(list(map(Tensor.numel, column))))
        rows = column
        if types != {np.ndarray} or set(map(_NDIM, rows)) != {1}:
            rows = [_row_array(name, i, row, typecode) for i, row in enumerate(column)]
        offsets = _offsets(list(map(len, rows)))
    dtypes = set(map(_DTYPE, rows))
    if any(dtype.kind not in kinds for dtype in dtypes):
        i, dtype = next((i, r.dtype) for i, r in enumerate(rows) if r.dtype.kind not in kinds)
        if kinds == "iu":
            advice = f"not integers; {advice} with .astype(np.int64)"
        separator = ", " if typecode == "q" else "; "
        raise DataError(f"example {i}: {name} has dtype {dtype}{separator}{advice}")
    if len(rows) == 1:
        return unchecked(rows[0], offsets)
    if len(dtypes) == 1:
        return RowArrays(rows, offsets)
    for i, row in enumerate(rows):
        if kind == "whole numbers":
            rows[i] = _whole(name, i, row)
        elif kind == "labels" and (is_bad := are_wrapped(row)).any():
            raise wrapped_label(i, int(is_bad.argmax()), row.dtype)  # joined, it would be an id
    # a uint64 among int64s would make them floats
    dtype = np.dtype({"q": np.int64, "d": np.float64}[typecode])
    return unchecked(np.concatenate(rows, dtype=dtype), offsets)


def are_wrapped(labels: np.ndarray) -> np.ndarray:
    """Return where a label is -100 wrapped around in an unsigned dtype: bool."""
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


def _is_ones(row: list[Any]) -> bool:
    return row.count(1) == len(row)


def _from_lists(name: str, rows: Sequence[list[Any]], typecode: str, first: int = 0) -> Ragged:
    """Return Python numbers as int64 ("q") or float64 ("d"), and 0/1 masks as bytes."""
    offsets = _offsets(list(map(len, rows)))
    if typecode == "d":
        try:
            if all(map(_is_ones, rows)):  # a third of the time of a copy
                return unchecked(np.ones(offsets[-1], dtype=np.uint8), offsets)
            flat = b"".join(list(map(bytearray, rows)))  # bytes() takes twice as long
            return unchecked(np.frombuffer(flat, dtype=np.uint8), offsets)
        except (TypeError, ValueError, RuntimeError):  # the last of tensors in a list
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
                hint = hint if name in ("input_ids", "prompt_ids", "response_ids") else ""
                return DataError(f"{where}, so {name} is nested; a segment is one flat list{hint}")
            if isinstance(entry, str) and entry.startswith(ROW_OF_DATASETS):
                return DataError(f"{where}, whose format was changed; read to_datasets() as it is")
            wanted = "an integer that fits 64 bits" if typecode == "q" else "a number"
            return DataError(f"{where} ({type(entry).__name__}); it must be {wanted}")
    raise AssertionError("the row converts one by one but not as a whole")


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
    if not types <= {float, np.float64}:  # beside a float NumPy would round large integers
        numbers = [int(n) if isinstance(n, float) and n.is_integer() else n for n in numbers]
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
    if isinstance(numbers, RowArrays):
        return RowArrays([row.reshape(-1, *shape) for row in numbers.arrays], offsets)
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
