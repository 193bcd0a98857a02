"""The table of fields: what a field has one entry of, its dtype, what pads hold; values per row.

``dense.py`` makes the dense forms, and the fields without a column of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.ragged import Ragged

IGNORE_INDEX = -100  # a label that is not trained, as in torch and transformers
Field = Tensor | Ragged


@dataclass(frozen=True)
class PerToken:
    """A field with one entry per token: dense ``[R, W]``, ``pad`` in cells without a token.

    ``shape`` is that of an entry: ``(k,)`` for a vector per token, such as a teacher's ``k`` most
    likely ids; dense ``[R, W, k]``. An example then has ``[tokens, k]`` numbers.

    >>> from torch_collate_kit import PaddedCollator
    >>> collate = PaddedCollator(0, fields={"top_ids": PerToken(torch.int32, pad=-1, shape=(2,))})
    >>> examples = [{"input_ids": [5, 6], "labels": [5, 6], "top_ids": [[6, 8], [4, 9]]}]
    >>> examples += [{"input_ids": [7], "labels": [7], "top_ids": [[3, 5]]}]
    >>> collate(examples)["top_ids"].tolist()
    [[[6, 8], [4, 9]], [[-1, -1], [3, 5]]]
    """

    dtype: torch.dtype
    pad: float = 0
    shape: tuple[int, ...] = ()
    count: ClassVar[str | None] = "lengths"


@dataclass(frozen=True)
class PerResponseToken:
    """A field with one entry per response token: dense ``[R, A]``, right-aligned, else ``pad``.

    ``shape`` is that of an entry, as of :class:`PerToken`: dense ``[R, A, k]`` with ``(k,)``.

    >>> PerResponseToken(torch.float32).pad
    0
    """

    dtype: torch.dtype
    pad: float = 0
    shape: tuple[int, ...] = ()
    count: ClassVar[str | None] = "responses"


@dataclass(frozen=True)
class PerExample:
    """A field with one entry per example: ragged, the examples of a row in their order there.

    ``shape`` is that of an entry: ``(k,)`` for ``k`` numbers per example, such as the reference
    log-probs of the two answers of a pair; values are then ``[P, k]``.

    ``PerExample(str)`` is for names and ids, which become row metadata: ``batch.row_metadata`` has
    a string per row, or of packed rows a tuple of strings per row.

    >>> from torch_collate_kit import PackedCollator
    >>> fields = {"ref_logps": PerExample(torch.float32, shape=(2,))}
    >>> pair = {"input_ids": [[5, 6], [5, 7]], "loss_mask": [[0, 1]] * 2, "ref_logps": [-1.5, -2]}
    >>> PackedCollator(0, max_tokens=8, fields=fields)([pair, pair])["ref_logps"].values.tolist()
    [[-1.5, -2.0], [-1.5, -2.0]]
    """

    dtype: torch.dtype | type[str]
    shape: tuple[int, ...] = ()
    count: ClassVar[str | None] = None


@dataclass(frozen=True)
class PerRoutedToken:
    """Expert routes ``[layers, top_k]`` of the first tokens: dense ``[R, W, layers, top_k]``.

    Cells without a route hold the experts ``0, ..., top_k - 1``, distinct because a router that
    scatters routes into a table loses an expert that is named twice. So do holes, which are -1 in
    all layers in the column.
    """

    dtype: torch.dtype
    count: ClassVar[str | None] = "routed"


@dataclass(frozen=True)
class PerImage:
    """A field that a vision processor returned for the images of a row: ragged.

    ``patch_shape`` is channels, frames and pixels of a flat patch. A column whose patches have one
    frame holds each of still images once; the field repeats it.
    """

    dtype: torch.dtype
    patch_shape: tuple[int, int, int] | None = None
    count: ClassVar[str | None] = None


@dataclass(frozen=True)
class PerTarget:
    """A field of a context shard with one entry per predicted token: dense ``[R, W]``.

    An entry is in the cell that predicts its token, or with the count "inputs" reads it.
    """

    dtype: torch.dtype
    pad: float = 0
    shape: tuple[int, ...] = ()
    count: str | None = "targets"


FieldSpec = PerToken | PerResponseToken | PerExample | PerRoutedToken | PerImage | PerTarget


class PackedValues(tuple[Any, ...]):
    """One value per sub-sequence of a packed row.

    >>> PackedValues(["a", "b"])
    ('a', 'b')
    """

    __slots__ = ()


def is_per_row(value: Any) -> bool:
    """Return whether a metadata value has one entry per row."""
    if isinstance(value, np.ndarray | Tensor):
        return value.ndim > 0  # a scalar has no rows
    return isinstance(value, list | Ragged)


def equal_values(a: Any, b: Any) -> bool:
    """Return whether kind, dtype and values are the same."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())
    if isinstance(a, Ragged) and isinstance(b, Ragged):
        return torch.as_tensor(a.values).dtype == torch.as_tensor(b.values).dtype and a == b
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal_values(value, b[key]) for key, value in a.items())
    return type(a) is type(b) and bool(a == b)


def take_rows(value: Any, rows: np.ndarray) -> Any:
    """Return the named rows, in that order: a copy."""
    if isinstance(value, Ragged):
        return value.take(rows)
    if isinstance(value, Tensor):
        return value[torch.from_numpy(rows.copy()).to(value.device, non_blocking=True)]
    return value[rows] if isinstance(value, np.ndarray) else [value[i] for i in rows.tolist()]


def cat_rows(values: Sequence[Any]) -> Any:
    """Return the rows of all values, one after the other: a copy."""
    first = values[0]
    if isinstance(first, Ragged):
        return Ragged.cat(values)
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    return [entry for value in values for entry in value]
