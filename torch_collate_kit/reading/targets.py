"""The loss target of examples: labels and weights checked, and how many tokens they train."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.batch.placement import Pieces
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged, unchecked
from torch_collate_kit.reading.numbers import Numbers, first_bad, own_copy, taken

__all__ = [
    "as_flags",
    "count_trained",
    "is_bad_weight",
    "placed_labels",
    "placed_weights",
    "weight_error",
]

# Divided by the loss tokens of a batch, up to 10**8, it is still a normal float32.
_LEAST_WEIGHT = 1e-30


def placed_labels(column: Numbers, pieces: Pieces) -> np.ndarray:
    """The labels of these pieces, int32 where they fit, else int64: a copy.

    Raises:
        DataError: a label that is negative, but not -100.
    """
    labels = taken(column, pieces)
    # beyond int64 they would become negative numbers
    signed = labels.view(np.int64) if labels.dtype == np.uint64 else labels
    is_bad = (signed < 0) & (signed != IGNORE_INDEX)
    if is_bad.any():
        i, token = first_bad(is_bad, pieces)
        raise DataError(
            f"example {i}: labels is {labels[is_bad][0]} at token {token}; a label is a token "
            f"id, or {IGNORE_INDEX} where nothing is trained"
        )
    fits = not labels.size or labels.max() <= np.iinfo(np.int32).max
    return labels.astype(np.int32 if fits else np.int64)


def placed_weights(
    name: str, column: Numbers, pieces: Pieces, num_before: np.ndarray | None
) -> np.ndarray:
    """The weights of these pieces, bool where they are 0 and 1, else float32: a copy.

    ``num_before`` int64 [N]: tokens of each example before its first weight; None for 0.

    Raises:
        DataError: a weight that is negative, not finite in float32, or lost in it.
    """
    weights = taken(as_flags(column) if isinstance(column, Ragged) else column, pieces)
    if weights.dtype == np.bool_:
        return own_copy(weights, column)
    flags = _flags(weights)
    if flags is not None:
        return flags
    is_bad = is_bad_weight(weights)
    if is_bad.any():
        i, entry = first_bad(is_bad, pieces)
        token = entry if num_before is None else entry + int(num_before[i])
        weight = float(weights[is_bad][0])
        raise weight_error(f"example {i}: {name}", weight, entry, f"token {token}")
    return weights.astype(np.float32)


def as_flags(column: Ragged) -> Ragged:
    """A column that holds nothing but 0 and 1 as bools, which are put in order in less memory."""
    if column.values.dtype == np.bool_:
        return column
    flags = _flags(column.values)
    return column if flags is None else unchecked(flags, column.offsets)


def _flags(values: np.ndarray) -> np.ndarray | None:
    """Values that are all 0 and 1 as bools."""
    trained: np.ndarray = values != 0
    return trained if np.count_nonzero(values == 1) == np.count_nonzero(trained) else None


def is_bad_weight(values: np.ndarray) -> np.ndarray:
    """Where a weight is negative, not finite in float32, or lost in it."""
    with np.errstate(over="ignore"):
        kept = values.astype(np.float32)
    return ~((values == 0) | ((kept >= _LEAST_WEIGHT) & (kept < np.inf)))


def weight_error(column: str, value: float, entry: int, place: str) -> DataError:
    """What is wrong with a weight: entry ``entry`` of its column, at this token."""
    if 0 < value < 1:
        return DataError(
            f"{column}[{entry}] is {value}, which float32 loses; a weight must be 0 or at "
            f"least {_LEAST_WEIGHT}: give 0 where nothing is trained"
        )
    return DataError(f"{column} is {value} at {place}; weights must be finite and 0 or more")


def count_trained(trained: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Trained tokens of each piece, and tokens from its first trained one to its end: int64 [S].

    ``trained`` bool [T]: the tokens of the pieces one after the other. ``lengths`` int64 [S]. The
    second is of pieces whose first token is not trained, so that no run of trained tokens begins in
    the piece before. There are few runs, so counting by runs costs next to nothing.

    >>> trained = np.array([False, True, True, False, False, True, False])
    >>> counts, until_end = count_trained(trained, np.array([3, 4]))
    >>> counts.tolist(), until_end.tolist()
    ([2, 1], [2, 2])
    """
    edges = np.flatnonzero(trained[1:] != trained[:-1]) + 1
    if trained[:1].any():
        edges = np.append(0, edges)
    if trained[-1:].any():
        edges = np.append(edges, len(trained))
    begins, ends = edges[::2], edges[1::2]
    bounds = np.append(0, np.cumsum(lengths))
    if not len(begins):
        return np.zeros_like(lengths), np.zeros_like(lengths)
    num_before = np.searchsorted(begins, bounds)  # runs that begin before each bound
    # of the last run before a bound, the part after the bound belongs to the next piece
    last = num_before - 1
    until = np.cumsum(ends - begins)[last] - np.maximum(ends[last] - bounds, 0)
    until[last < 0] = 0
    first = np.append(begins, len(trained))[num_before[:-1]]
    return until[1:] - until[:-1], np.maximum(bounds[1:] - first, 0)
