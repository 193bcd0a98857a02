"""Columns of numbers: read from any form, and taken in the order of a batch's rows.

Ragged columns are read where they lie, arrays are joined only in the order of the rows, and Python
lists are converted once per column (10 to 15 ns per token, the most expensive step of all: hand
over arrays where speed matters). ``struct`` converts them because it is the fastest way and refuses
floats as ids; ``np.fromiter`` would cut 1.5 to 1 without a word.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.batch.placement import Pieces
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged, span_indices
from torch_collate_kit.reading.raw import is_sequence

__all__ = [
    "Kind",
    "Numbers",
    "are_int32_ids",
    "as_tensor",
    "first_bad",
    "in_pairs",
    "joined",
    "number_column",
    "row_array",
    "taken",
    "tensor_to_numpy",
    "with_row",
]

_INT32_MAX = np.iinfo(np.int32).max
_SHORT_SPAN = 128  # entries on average; below it an index gather is the faster one (measured)

Kind = Literal["ids", "labels", "numbers", "whole numbers"]
_INT, _FLOAT = ("q", "iu"), ("d", "iufb")  # type code of lists, kinds of dtypes that are taken
_KINDS: dict[Kind, tuple[str, str, str]] = {
    "ids": (*_INT, "token ids index an embedding, convert them"),
    "labels": (*_INT, "labels are token ids (a mask goes into loss_mask), convert ids"),
    "numbers": (*_FLOAT, "give numbers"),
    "whole numbers": ("q", "iufb", "give numbers"),  # as integers, where they come in lists
}


class Rows:
    """A column of arrays that were not joined yet: they are, when rows are put in their order."""

    def __init__(self, arrays: list[np.ndarray], offsets: np.ndarray) -> None:
        self.arrays, self.offsets = arrays, offsets

    def __len__(self) -> int:
        return len(self.arrays)

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
        values = column.flat_values
        flat = values if isinstance(values, np.ndarray) else tensor_to_numpy(name, None, values)
        if flat.ndim != 1:
            raise DataError(f"column {name} has {flat.ndim}-D values; a column holds flat rows")
        rows, offsets = [flat], column.offsets - column.offsets[0]
    else:
        types = set(map(type, column))
        if types == {list}:
            return _from_lists(name, list(column), typecode)  # a pandas column has labels
        whole = _whole_rows(list(column), kinds) if types == {np.ndarray} else None
        if whole is not None:
            return whole
        rows = [row_array(name, i, row, typecode) for i, row in enumerate(column)]
        offsets = np.cumsum([0, *map(len, rows)])
    dtypes = {row.dtype for row in rows}
    if any(dtype.kind not in kinds for dtype in dtypes):
        i, dtype = next((i, r.dtype) for i, r in enumerate(rows) if r.dtype.kind not in kinds)
        if kinds == "iu":
            advice = f"not integers; {advice} with .astype(np.int64)"
        separator = ", " if typecode == "q" else "; "
        raise DataError(f"example {i}: {name} has dtype {dtype}{separator}{advice}")
    if kind == "whole numbers" and len(dtypes) > 1:
        rows = [_whole(name, i, row) for i, row in enumerate(rows)]
    # a uint64 among int64s would make them floats
    mixed = {"q": np.int64, "d": np.float64}[typecode] if len(dtypes) > 1 else None
    is_flat = len(rows) == 1
    return Ragged(rows[0] if is_flat else np.concatenate(rows, dtype=mixed), offsets)


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
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays)), out=offsets[1:])
    return Rows(arrays, offsets)


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


def row_array(name: str, index: int, row: Any, typecode: str = "q") -> np.ndarray:
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
    elif isinstance(row, np.ma.MaskedArray):
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


def as_tensor(array: np.ndarray) -> Tensor:
    """A view. Of an array that is not writable, as Arrow's are, torch would warn on every call."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    own = array.__array_interface__
    alias = SimpleNamespace(__array_interface__={**own, "data": (own["data"][0], False)}, of=array)
    return torch.from_numpy(np.asarray(alias))


def joined(column: Numbers) -> Ragged:
    """The column as one flat array, in the order of the examples."""
    if isinstance(column, Ragged):
        return column
    return Ragged(np.concatenate(column.arrays), column.offsets)


def with_row(column: Numbers, row: np.ndarray) -> Ragged:
    """The column with one more row, in the dtype of its numbers."""
    flat = joined(column)
    return Ragged.cat([flat, Ragged(row.astype(flat.values.dtype), [0, len(row)])])


def in_pairs(first: Numbers, second: Numbers) -> Ragged:
    """Row i of the one column and row i of the other as one row: int32 where both fit, or int64."""
    is_narrow = all(isinstance(of, Ragged) and are_int32_ids(of.values) for of in (first, second))
    parts: list[Any] = [None] * (2 * len(first))
    parts[::2], parts[1::2] = _rows_of(first), _rows_of(second)
    dtype = np.int32 if is_narrow else np.int64
    values = np.concatenate(parts, dtype=dtype, casting="unsafe")
    return Ragged.from_lengths(values, first.lengths + second.lengths)


def _rows_of(column: Numbers) -> list[np.ndarray]:
    if isinstance(column, Rows):
        return column.arrays
    values = column.values
    return [values[start:stop] for start, stop in pairwise(column.offsets.tolist())]


def taken(column: Numbers, pieces: Pieces, dtype: Any = None) -> np.ndarray:
    """The entries ``starts`` to ``starts + lengths`` of the examples, one piece after the other.

    Pieces are joined, or where they are short gathered by an index, which costs more per entry and
    nothing per piece. The result may be a view of the column. With ``dtype``, whose range the
    entries must be known to be in, it is a copy of that dtype, made in the same pass.
    """
    examples, starts, lengths, _ = pieces
    if not len(examples):
        values = column.values if isinstance(column, Ragged) else column.arrays[0]
        return values[:0].astype(dtype or values.dtype)
    if isinstance(column, Rows):
        chosen = [column.arrays[i] for i in examples.tolist()]
        if starts.any() or not np.array_equal(lengths, column.lengths[examples]):
            spans_of = zip(chosen, starts.tolist(), (starts + lengths).tolist(), strict=True)
            chosen = [array[start:stop] for array, start, stop in spans_of]
        return np.concatenate(chosen, dtype=dtype, casting="unsafe")
    values, first = column.values, column.offsets[:-1][examples] + starts
    total = int(lengths.sum())
    if (
        first[-1] + lengths[-1] - first[0] == total
        and (first[1:] == first[:-1] + lengths[:-1]).all()
    ):
        run = values[first[0] : first[0] + total]
        return run if dtype is None else run.astype(dtype)
    if total < _SHORT_SPAN * len(examples):
        return values[span_indices(first, lengths)].astype(dtype or values.dtype, copy=False)
    bounds = zip(first.tolist(), (first + lengths).tolist(), strict=True)
    return np.concatenate(
        [values[start:stop] for start, stop in bounds], dtype=dtype, casting="unsafe"
    )


def first_bad(is_bad: np.ndarray, pieces: Pieces) -> tuple[int, int]:
    """The first bad one of the entries that were taken: its example, and its place there."""
    entry = int(np.flatnonzero(is_bad)[0])
    ends = np.cumsum(pieces.lengths)
    piece = int(np.searchsorted(ends, entry, side="right"))
    before = entry - int(ends[piece] - pieces.lengths[piece])
    return int(pieces.examples[piece]), before + int(pieces.starts[piece])


def are_int32_ids(values: np.ndarray) -> bool:
    """Whether all of a column are ids that int32 holds."""
    if values.dtype == np.int64:  # one pass for both ends
        return not (values.view(np.uint64) > _INT32_MAX).any()
    return not values.size or (int(values.min()) >= 0 and int(values.max()) <= _INT32_MAX)
