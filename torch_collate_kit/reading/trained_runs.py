"""Runs of trained tokens: there are few of them, so counting by runs costs next to nothing."""

from __future__ import annotations

import numpy as np

__all__ = ["TrainedRuns"]


class TrainedRuns:
    """The trained tokens of pieces that lie one after the other. Legend: T tokens, S pieces.

    Args:
        trained: bool [T], or numbers, of which 0 is not trained.
        lengths: int64 [S], tokens per piece.

    >>> runs = TrainedRuns(np.array([False, True, True, False, True]), np.array([2, 3]))
    >>> runs.counts.tolist(), runs.first.tolist()
    ([1, 2], [1, 4])
    """

    def __init__(self, trained: np.ndarray, lengths: np.ndarray) -> None:
        if trained.dtype != np.bool_:
            trained = trained != 0
        edges = np.flatnonzero(trained[1:] != trained[:-1])
        edges += 1
        if trained[:1].any():
            edges = np.append(0, edges)
        if trained[-1:].any():
            edges = np.append(edges, len(trained))
        self._begins, self._ends = edges[::2], edges[1::2]
        self._bounds = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=self._bounds[1:])
        self._before = np.searchsorted(self._begins, self._bounds)  # runs that begin before each
        self._num_tokens = len(trained)

    @property
    def counts(self) -> np.ndarray:
        """int64 [S], trained tokens per piece."""
        if not len(self._begins):
            return np.zeros(len(self._bounds) - 1, dtype=np.int64)
        trained = self._ends - self._begins
        np.cumsum(trained, out=trained)
        # of the last run before a bound, the part after the bound belongs to the next piece
        last = self._before - 1
        until = trained[last] - np.maximum(self._ends[last] - self._bounds, 0)
        until[last < 0] = 0
        return until[1:] - until[:-1]

    @property
    def first(self) -> np.ndarray:
        """int64 [S], where the first run begins that does not begin before the piece, or T."""
        before, found = self._before[:-1], np.full(len(self._bounds) - 1, self._num_tokens)
        num_found = int(np.searchsorted(before, len(self._begins)))  # it never decreases
        found[:num_found] = self._begins[before[:num_found]]
        return found
