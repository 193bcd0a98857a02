"""Columns of examples, checked and copied in the order of the rows of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from torch_collate_kit.batch.placement import Pieces
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.numbers import Numbers, taken

__all__ = [
    "LEAST_WEIGHT",
    "Placed",
    "as_flags",
    "as_weights",
    "bad_weight",
    "first_bad",
    "is_bad_weight",
    "narrow_ids",
    "token_ids",
]

_INT32_MAX = np.iinfo(np.int32).max
# Divided by the loss tokens of a batch, up to 10**8, it is still a normal float32.
LEAST_WEIGHT = 1e-30


@dataclass(frozen=True)
class Placed:
    """What the pieces of a batch hold, in the order of its rows."""

    columns: dict[str, np.ndarray | Tensor]
    """By name: one entry per token, per response token, per routed token, or per example."""
    num_loss_tokens: int
    num_actions: np.ndarray
    """int64 [S], the response tokens of each piece."""
    routed: np.ndarray | None = None
    """int64 [S], the tokens with a route of each piece."""
    offsets: dict[str, np.ndarray] = field(default_factory=dict)
    """int64 [S + 1], of columns that have any number of entries per piece: where these begin."""


def first_bad(is_bad: np.ndarray, pieces: Pieces) -> tuple[int, int]:
    """The first bad entry of those that the pieces have per token: its example, and token there."""
    entry = int(np.flatnonzero(is_bad)[0])
    ends = np.cumsum(pieces.lengths)
    piece = int(np.searchsorted(ends, entry, side="right"))
    token = entry - int(ends[piece] - pieces.lengths[piece]) + int(pieces.starts[piece])
    return int(pieces.examples[piece]), token


def _are_int32_ids(values: np.ndarray) -> bool:
    """Whether all of a column are ids that int32 holds."""
    if values.dtype == np.int64:  # one pass for both ends
        return not (values.view(np.uint64) > _INT32_MAX).any()
    return not values.size or (int(values.min()) >= 0 and int(values.max()) <= _INT32_MAX)


def narrow_ids(values: np.ndarray) -> np.ndarray | None:
    """A copy in int32 where they fit, else in int64; None where one is negative or beyond int64."""
    if _are_int32_ids(values):
        return values.astype(np.int32)
    is_bad = int(values.min()) < 0 or int(values.max()) > np.iinfo(np.int64).max
    return None if is_bad else values.astype(np.int64)


def token_ids(name: str, ids: Numbers, pieces: Pieces) -> np.ndarray:
    """The ids of the pieces, int32 where they fit, else int64: a copy.

    Raises:
        DataError: a negative id.
    """
    if isinstance(ids, Ragged) and _are_int32_ids(ids.values):
        return taken(ids, pieces.examples, pieces.starts, pieces.lengths, np.int32)
    values = taken(ids, pieces.examples, pieces.starts, pieces.lengths)
    narrow = narrow_ids(values)
    if narrow is not None:
        return narrow
    is_bad = values.astype(np.int64) < 0
    i, token = first_bad(is_bad, pieces)
    raise DataError(
        f"example {i}: {name} is {values[is_bad][0]} at token {token}; token ids are 0 or more "
        "(-100 belongs into labels)"
    )


def as_flags(column: Numbers) -> Numbers:
    """A column that holds nothing but 0 and 1 as bools, which are put in order in less memory."""
    if isinstance(column, Ragged) and column.values.dtype != np.bool_:
        values = column.values
        trained = values != 0
        if np.count_nonzero(values == 1) == np.count_nonzero(trained):
            return Ragged(trained, column.offsets)
    return column


def as_weights(values: np.ndarray) -> np.ndarray | None:
    """Loss weights as bool where all are 0 or 1, else float32: a copy; None where one is wrong."""
    if values.dtype == np.bool_:
        return values.copy()
    trained = values != 0
    if np.count_nonzero(values == 1) == np.count_nonzero(trained):
        return trained
    return None if is_bad_weight(values).any() else values.astype(np.float32)


def is_bad_weight(values: np.ndarray) -> np.ndarray:
    """Where a weight is negative, not finite in float32, or lost in it."""
    with np.errstate(over="ignore"):
        kept = values.astype(np.float32)
    return ~((values == 0) | ((kept >= LEAST_WEIGHT) & (kept < np.inf)))


def bad_weight(index: int, name: str, value: float, entry: int, token: int) -> DataError:
    """What is wrong with a weight: entry ``entry`` of its column, which is of token ``token``."""
    if 0 < value < 1:
        return DataError(
            f"example {index}: {name}[{entry}] is {value}, which float32 loses; a weight must be 0 "
            f"or at least {LEAST_WEIGHT}: give 0 where nothing is trained"
        )
    return DataError(
        f"example {index}: {name} is {value} at token {token}; weights must be finite and 0 or more"
    )
