"""Columns other than ids and loss targets: our own fields, and those that a user declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.batch.fields import FieldSpec, PerExample, PerResponseToken, PerToken
from torch_collate_kit.batch.placement import Pieces
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.numbers import (
    Numbers,
    first_bad,
    joined,
    number_column,
    own_copy,
    taken,
    with_row,
)
from torch_collate_kit.reading.raw import one_value

__all__ = ["DeclaredFields", "FieldColumn", "checked_fields", "read_declared"]

# Type codes of arrays that torch takes; not of the other 64-bit integers, nor of a longer float.
_TORCH_CODES = "?bhilBHILefd"
# Those that torch computes with; of the others it has little more than the name.
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_DTYPES = (*_INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64)
DeclaredFields = Mapping[str, PerToken | PerResponseToken | PerExample]


@dataclass(frozen=True)
class FieldColumn:
    """A field as it was read: checked, one row of entries per example, in their order."""

    name: str
    spec: FieldSpec
    values: Numbers

    def with_row(self, num_tokens: int) -> FieldColumn:
        """With an example of so many tokens that has no response: pads per token, else nothing."""
        number = num_tokens if self.spec.count == "lengths" else 0
        pad = self.spec.pad if isinstance(self.spec, PerToken) else 0
        empty = np.zeros((number, *joined(self.values).values.shape[1:]))
        return replace(self, values=with_row(self.values, empty + pad))

    def place(self, pieces: Pieces, responses: Pieces) -> tuple[Tensor, Pieces]:
        """The entries that these pieces have, one after the other, a copy; and which they are.

        Numbers are in the dtype of the field, routes in the one they came in. ``responses`` are the
        response tokens of the pieces, as their example numbers its own.

        Raises:
            DataError: a number that the dtype does not hold.
        """
        entries = pieces
        if self.spec.count == "responses":
            entries = responses
        elif self.spec.count != "lengths":
            lengths = self.values.lengths[pieces.examples]
            entries = pieces._replace(starts=np.zeros_like(lengths), lengths=lengths)
        values = taken(self.values, entries)
        if values.dtype.char not in _TORCH_CODES or not values.dtype.isnative:
            values = values.astype(
                {"u": np.uint64, "i": np.int64}.get(values.dtype.kind, np.float64)
            )
        column = torch.from_numpy(own_copy(values, self.values))
        if not isinstance(self.spec, PerToken | PerResponseToken | PerExample):
            return column, entries
        cast = column.to(self.spec.dtype)
        is_lost = _is_lost(values, cast)
        if is_lost is not None:
            i, entry = first_bad(is_lost, entries)
            at = "" if isinstance(self.spec, PerExample) else f"[{entry}]"
            raise DataError(
                f"example {i}: {self.name}{at} is {values[is_lost][0]}, which {self.spec.dtype} "
                "does not hold; declare another dtype, or give other numbers"
            )
        return cast, entries


def _is_lost(values: np.ndarray, cast: Tensor) -> np.ndarray | None:
    """Where a whole number is another one now, or a finite one is no longer; None: nowhere."""
    if not cast.is_floating_point():
        is_lost = values != cast.numpy()
    elif cast.dtype == torch.float16 or (
        values.dtype.kind == "f" and values.dtype.itemsize > cast.dtype.itemsize
    ):
        is_lost = np.isfinite(values) & ~cast.isfinite().numpy()
    else:
        return None
    return is_lost if is_lost.any() else None


def checked_fields(fields: DeclaredFields | None, taken_names: tuple[str, ...]) -> DeclaredFields:
    """What a collator's ``fields`` says, as a dict.

    Raises:
        TypeError: no mapping of names to PerToken, PerResponseToken or PerExample with a dtype.
        ValueError: a name that is a key or a field already.

    >>> checked_fields({"domain": PerExample(torch.int64)}, ("input_ids",))
    {'domain': PerExample(dtype=torch.int64)}
    """
    if fields is None:
        return {}
    if not isinstance(fields, Mapping):
        raise TypeError(
            f"fields must map names to PerToken, PerResponseToken or PerExample, got {fields!r:.60}"
        )
    for name, spec in fields.items():
        if not isinstance(spec, PerToken | PerResponseToken | PerExample):
            raise TypeError(
                f"fields[{name!r}] must be a PerToken, PerResponseToken or PerExample, got "
                f"{spec!r:.60}; for instance PerToken(torch.float32)"
            )
        if not isinstance(spec.dtype, torch.dtype) or spec.dtype.is_complex:
            raise TypeError(
                f"fields[{name!r}] must have a torch dtype of real numbers, got {spec.dtype!r}"
            )
        if not isinstance(spec, PerExample) and spec.dtype not in _DTYPES:
            raise TypeError(
                f"fields[{name!r}] has {spec.dtype}, which torch does not place; "
                "give a signed integer, uint8, bool, or a float of 16 bits or more"
            )
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"fields names {name!r}, which is no name; use letters and _")
        if name in taken_names:
            raise ValueError(
                f"fields names {name!r}, which the collator reads or makes itself; rename yours"
            )
        pad = getattr(spec, "pad", 0)
        if torch.tensor(pad, dtype=torch.float64).to(spec.dtype).double().item() != pad:
            raise ValueError(f"fields[{name!r}] has pad={pad}, which {spec.dtype} does not hold")
    return dict(fields)


def read_declared(
    raw: Mapping[str, Any],
    fields: DeclaredFields,
    lengths: np.ndarray,
    responses: np.ndarray | None,
) -> list[FieldColumn]:
    """Check that every example has its entries; the numbers are looked at when they are placed.

    ``lengths`` and ``responses`` int64 [N]: tokens and response tokens of each example.

    Raises:
        DataError: a field is missing, or has another number of entries.
    """
    columns = []
    for name, spec in fields.items():
        if name not in raw:
            raise DataError(
                f"example 0 has no {name}, which fields declares; give every example one, or "
                "leave it out of fields"
            )
        if isinstance(spec, PerExample):
            columns.append(FieldColumn(name, spec, _per_example(name, raw[name])))
            continue
        expected, what = lengths, "token"
        if isinstance(spec, PerResponseToken):
            what = "response token"
            if responses is None:
                raise DataError(
                    f"fields declares {name} per response token, and the examples have no "
                    "num_actions, which says how many these are; give it, or declare PerToken"
                )
            expected = responses
        whole = not (spec.dtype.is_floating_point or spec.dtype == torch.bool)
        column = number_column(name, raw[name], "whole numbers" if whole else "numbers")
        wrong = np.flatnonzero(column.lengths != expected)
        if len(wrong):
            i = int(wrong[0])
            raise DataError(
                f"example {i}: {name} has {column.lengths[i]} entries, the example has "
                f"{expected[i]} {what}s; give one entry per {what}"
            )
        columns.append(FieldColumn(name, spec, column))
    return columns


def _per_example(name: str, column: Any) -> Ragged:
    if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype.kind not in "iufb":
        numbers = [one_value(value) for value in column]
        for i, number in enumerate(numbers):
            if not isinstance(number, int | float):
                raise DataError(
                    f"example {i}: {name} is {number!r:.40} ({type(number).__name__}); it is "
                    "declared PerExample, so give one number"
                )
        column = np.array(numbers)
        if column.dtype.hasobject:
            raise DataError(f"{name} has a number beyond 64 bits; give numbers that fit")
    return Ragged(column, np.arange(len(column) + 1))
