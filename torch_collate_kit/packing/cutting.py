"""Over-long examples: the only place that cuts them, drops them, or says that they are too long."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torch_collate_kit.errors import DataError
from torch_collate_kit.packing.options import PackingOptions

__all__ = ["FittedPieces", "cut_to_fit", "num_pieces"]

_Ints = npt.NDArray[np.int64]


class FittedPieces(NamedTuple):
    """Examples, or parts of them, each at most a row long, in example order."""

    example_indices: _Ints
    starts: _Ints
    lengths: _Ints
    dropped: _Ints
    cut: _Ints
    num_cut_tokens: int = 0
    num_dropped_tokens: int = 0


def cut_to_fit(lengths: _Ints, packing: PackingOptions) -> FittedPieces:
    """The pieces to place of examples of these lengths, int64 [N].

    Raises:
        DataError: an example longer than a row, with ``overflow="raise"``.

    >>> cut_to_fit(np.array([3, 5]), PackingOptions(3, overflow="split")).starts.tolist()
    [0, 0, 3]
    """
    limit, overflow = packing.capacity, packing.overflow
    indices = np.arange(len(lengths))
    starts, none = np.zeros_like(lengths), np.zeros(0, dtype=np.int64)
    too_long = np.flatnonzero(lengths > limit)
    if not len(too_long):
        return FittedPieces(indices, starts, lengths, none, none)
    if overflow == "drop":
        lost = int(lengths[too_long].sum())
        kept = np.delete(indices, too_long)
        return FittedPieces(
            kept, starts[kept], lengths[kept], too_long, none, num_dropped_tokens=lost
        )
    if overflow == "truncate":
        lost = int(lengths[too_long].sum()) - limit * len(too_long)
        shortened = np.minimum(lengths, limit)
        return FittedPieces(indices, starts, shortened, none, too_long, num_cut_tokens=lost)
    if overflow == "split":
        counts = num_pieces(lengths, packing)
        indices = np.repeat(indices, counts)
        first_piece = np.cumsum(counts) - counts
        starts = (np.arange(len(indices)) - first_piece[indices]) * limit
        return FittedPieces(
            indices, starts, np.minimum(lengths[indices] - starts, limit), none, too_long
        )
    first = int(too_long[0])
    others = f" (too long as well: {len(too_long) - 1} more)" if len(too_long) > 1 else ""
    raise DataError(
        f"example {first} has {int(lengths[first])} tokens, more than the {limit} that fit in a "
        f"row with max_tokens={packing.max_tokens} and align={packing.parallel.align}{others}; "
        "raise max_tokens, shorten it, or pass overflow='truncate', 'drop' or 'split'"
    )


def num_pieces(lengths: _Ints, packing: PackingOptions) -> _Ints:
    """How many pieces of examples are placed, of those that are: int64 [N].

    >>> num_pieces(np.array([3, 5]), PackingOptions(3, overflow="split")).tolist()
    [1, 2]
    """
    if packing.overflow != "split":
        return np.ones_like(lengths)
    return -(-lengths // packing.capacity)
