"""The loss target of examples: labels and weights checked, and how many tokens they train."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.batch.placement import Pieces
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.numbers import Numbers, first_bad, taken

__all__ = ["count_trained", "placed_labels", "placed_weights"]

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


def placed_weights(name: str, column: Numbers, pieces: Pieces, unit: str) -> np.ndarray:
    """The weights of these pieces, bool where they are 0 and 1, else float32: a copy.

    ``unit``: what has a weight, a "token" or a "response token".

    Raises:
        DataError: a weight that is negative, not finite in float32, or lost in it.
    """
    if isinstance(column, Ragged):  # bools are put in order in less memory
        column = Ragged(_as_flags(column.values), column.offsets)
    weights = _as_flags(taken(column, pieces))
    if weights.dtype == np.bool_:
        return weights if weights.base is None else weights.copy()
    with np.errstate(over="ignore"):
        kept = weights.astype(np.float32)
    is_bad = ~((weights == 0) | ((kept >= _LEAST_WEIGHT) & (kept < np.inf)))
    if is_bad.any():
        i, entry = first_bad(is_bad, pieces)
        weight = float(weights[is_bad][0])
        if 0 < weight < 1:
            raise DataError(
                f"example {i}: {name}[{entry}] is {weight}, which float32 loses; a weight must be "
                f"0 or at least {_LEAST_WEIGHT}: give 0 where nothing is trained"
            )
        raise DataError(
            f"example {i}: {name} is {weight} at {unit} {entry}; weights must be finite and 0 or "
            "more"
        )
    return kept


def _as_flags(values: np.ndarray) -> np.ndarray:
    """Values that are all 0 and 1 as bools; others as they are."""
    if values.dtype == np.bool_:
        return values
    trained: np.ndarray = values != 0
    return trained if np.count_nonzero(values == 1) == np.count_nonzero(trained) else values


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
