"""Columns other than ids and loss targets: our own fields, and those that a user declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.batch.fields import (
    FieldSpec,
    PerExample,
    PerResponseToken,
    PerRoutedToken,
    PerToken,
)
from torch_collate_kit.batch.placement import Pieces
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.arrays import route_column
from torch_collate_kit.reading.numbers import (
    Kind,
    Numbers,
    as_tensor,
    first_bad,
    joined,
    number_column,
    taken,
    with_row,
)
from torch_collate_kit.reading.scalars import scalar_column

__all__ = [
    "DeclaredFields",
    "FieldColumn",
    "Specs",
    "checked_fields",
    "read_fields",
]

# Type codes of arrays that torch takes; not of the other 64-bit integers, nor of a longer float.
_TORCH_CODES = "?bhilBHILefd"
# Those that torch computes with; of the others it has little more than the name.
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_DTYPES = (*_INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64)
DeclaredFields = Mapping[str, PerToken | PerResponseToken | PerExample]
Specs = Mapping[str, PerToken | PerResponseToken | PerRoutedToken | PerExample]
_BATCH_NAMES = {"logprobs": "rollout_logprobs"}  # of our own fields that have another name there


@dataclass(frozen=True)
class FieldColumn:
    """A field as it was read: checked, one row of entries per example, in their order."""

    name: str
    spec: FieldSpec
    values: Numbers
    key: str | None = None
    """Of a field of our own: its key in the examples. Its numbers must be finite."""

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
        column = as_tensor(np.ascontiguousarray(values))
        is_routes = isinstance(self.spec, PerRoutedToken)
        cast = column.to(column.dtype if is_routes else self.spec.dtype)
        if cast is column and values.base is not None:
            cast = column.clone()  # it was a view of what was given
        if is_routes:
            return cast, entries
        is_bad = _is_lost(values, cast) if self.key is None else _is_infinite(cast)
        if is_bad is not None:
            raise self._bad_number(values[is_bad][0], *first_bad(is_bad, entries))
        return cast, entries

    def _bad_number(self, number: Any, example: int, entry: int) -> DataError:
        if self.key is not None:
            is_logprob = self.key == "logprobs"
            hint = "of a token that the policy did not sample give 0.0, or " if is_logprob else ""
            return DataError(
                f"example {example}: {self.key} is {number} at response token {entry}; it must be "
                f"finite in float32: {hint}filter such rollouts out"
            )
        at = "" if isinstance(self.spec, PerExample) else f"[{entry}]"
        return DataError(
            f"example {example}: {self.name}{at} is {number}, which {self.spec.dtype} does not "
            "hold; declare another dtype, or give other numbers"
        )


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


def _is_infinite(cast: Tensor) -> np.ndarray | None:
    """Where a number is not finite; None: nowhere, for which the sum is enough to look at."""
    if cast.sum().isfinite():
        return None
    is_bad = ~cast.isfinite().numpy()
    return is_bad if is_bad.any() else None


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


def read_fields(
    raw: Mapping[str, Any],
    own: Specs,
    declared: Specs,
    lengths: np.ndarray,
    num_actions: np.ndarray | None,
    *,
    rollouts: bool,
) -> dict[str, FieldColumn]:
    """The columns of our own fields and of those that a user declares, by their key in examples.

    Their numbers are looked at when they are placed. ``lengths`` and ``num_actions`` int64 [N]:
    tokens and response tokens of each example.

    Raises:
        DataError: a field is missing, or has another number of entries.
    """
    columns = {}
    for key, spec in {**own, **declared}.items():
        if key not in raw:
            raise DataError(
                f"example 0 has no {key}, which fields declares; give every example one, or "
                "leave it out of fields"
            )
        values: Numbers
        if isinstance(spec, PerExample):
            values = _numbers(key, raw[key])
        elif isinstance(spec, PerRoutedToken):
            values = route_column(raw[key], lengths)
        else:
            expected = num_actions if isinstance(spec, PerResponseToken) else lengths
            values = _rows(key, raw[key], spec, expected, rollouts=rollouts)
        is_own = key in own
        name = _BATCH_NAMES.get(key, key) if is_own else key
        columns[key] = FieldColumn(name, spec, values, key if is_own else None)
    return columns


def _numbers(key: str, column: Any) -> Ragged:
    wanted = "it is declared PerExample, so give one number"
    numbers = scalar_column(key, column, "iufb", wanted)
    if numbers.dtype.hasobject:
        raise DataError(f"{key} has a number beyond 64 bits; give numbers that fit")
    return Ragged(numbers, np.arange(len(numbers) + 1))


def _rows(
    key: str,
    column: Any,
    spec: PerToken | PerResponseToken,
    expected: np.ndarray | None,
    *,
    rollouts: bool,
) -> Numbers:
    """A column with so many entries per example."""
    if expected is None:
        raise DataError(
            f"fields declares {key} per response token, and the examples have no num_actions, "
            "which says how many these are; give it, or declare PerToken"
        )
    kind: Kind = "labels" if key == "labels" else "whole numbers"
    if spec.dtype.is_floating_point or spec.dtype == torch.bool:
        kind = "numbers"
    numbers = number_column(key, column, kind)
    wrong = np.flatnonzero(numbers.lengths != expected)
    if len(wrong):
        i = int(wrong[0])
        raise _uneven(key, spec, i, numbers.lengths[i], expected[i], rollouts)
    return numbers


def _uneven(
    name: str, spec: PerToken | PerResponseToken, index: int, got: int, of: int, rollouts: bool
) -> DataError:
    """An example has ``got`` entries of a field, and ``of`` tokens that need one each."""
    if isinstance(spec, PerToken):
        found = f"{'the rollout' if rollouts else 'input_ids'} has {of} tokens"
        wanted = "one entry per token"
        if name == "loss_mask":
            wanted += " (or pass num_actions too, if it is the mask of the last tokens)"
    elif rollouts:
        found = f"response_ids has {of} tokens"
        numbers = {"rewards": "one number for the last token, or ", "advantages": "one number, or "}
        wanted = f"{numbers.get(name, '')}one entry per response token"
    else:
        found, wanted = f"num_actions={of}", "one entry for each of the last num_actions tokens"
    return DataError(f"example {index}: {name} has {got} entries, {found}; give {wanted}")
