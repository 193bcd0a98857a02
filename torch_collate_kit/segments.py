"""Conversions between lengths, cu_seqlens, position ids and segment ids.

A row of ``T`` tokens consists of ``S`` consecutive segments. All functions work on one-dimensional
NumPy arrays or torch tensors, and return the kind that they are given, on the same device.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "check_boundaries",
    "cu_seqlens_from_lengths",
    "lengths_from_cu_seqlens",
    "lengths_from_position_ids",
    "position_ids_from_lengths",
    "segment_ids_from_lengths",
]

Array = TypeVar("Array", np.ndarray, Tensor)


def cu_seqlens_from_lengths(lengths_S: Array) -> Array:
    """Cumulative segment boundaries, as varlen attention kernels expect them: int32 [S + 1].

    The first entry is 0, the last is the number of tokens. The result is a new array. Lengths on
    another device are synchronized once, to check that their sum fits into int32.

    Raises:
        ValueError: more tokens than int32 can count.

    >>> cu_seqlens_from_lengths(np.array([3, 2]))
    array([0, 3, 5], dtype=int32)
    """
    if isinstance(lengths_S, Tensor):
        check_boundaries(int(lengths_S.sum()))
        cu_seqlens = lengths_S.new_zeros(len(lengths_S) + 1, dtype=torch.int32)
        torch.cumsum(lengths_S, 0, dtype=torch.int32, out=cu_seqlens[1:])
        return cu_seqlens
    check_boundaries(int(np.sum(lengths_S, dtype=np.int64)))
    cu_seqlens = np.zeros(len(lengths_S) + 1, dtype=np.int32)
    np.cumsum(lengths_S, out=cu_seqlens[1:])
    return cu_seqlens


def check_boundaries(num_tokens: int) -> None:
    """Raise ValueError if the last boundary would overflow int32.

    >>> check_boundaries(2**31)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: 2147483648 tokens are more than int32 boundaries can count, 2147483647; pass them...
    """
    limit = 2**31 - 1
    if num_tokens > limit:
        raise ValueError(
            f"{num_tokens} tokens are more than int32 boundaries can count, {limit}; pass them to "
            "the model in parts, such as batch.chunk(num_chunks)"
        )


def lengths_from_cu_seqlens(cu_seqlens: Array) -> Array:
    """Segment lengths from their boundaries [S + 1]: int64 [S], a new array.

    >>> lengths_from_cu_seqlens(np.array([0, 3, 5], dtype=np.int32))
    array([3, 2])
    """
    if isinstance(cu_seqlens, Tensor):
        return torch.diff(cu_seqlens.long())
    return np.diff(cu_seqlens.astype(np.int64))


def position_ids_from_lengths(lengths_S: Array) -> Array:
    """Positions that restart at 0 in each segment: int64 [T], a new array.

    >>> position_ids_from_lengths(np.array([3, 2]))
    array([0, 1, 2, 0, 1])
    """
    if isinstance(lengths_S, Tensor):
        lengths_S = lengths_S.long()
        starts = torch.cumsum(lengths_S, 0) - lengths_S
        first = torch.repeat_interleave(starts, lengths_S)
        return torch.arange(len(first), device=first.device) - first
    lengths = np.asarray(lengths_S, dtype=np.int64)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.arange(len(starts)) - starts


def segment_ids_from_lengths(lengths_S: Array) -> Array:
    """The index of each token's segment: int64 [T], a new array.

    >>> segment_ids_from_lengths(np.array([3, 2]))
    array([0, 0, 0, 1, 1])
    """
    if isinstance(lengths_S, Tensor):
        segments = torch.arange(len(lengths_S), device=lengths_S.device)
        return torch.repeat_interleave(segments, lengths_S.long())
    return np.repeat(np.arange(len(lengths_S), dtype=np.int64), lengths_S)


def lengths_from_position_ids(position_ids_T: Array) -> Array:
    """Segment lengths of one row, from its positions [T]: int64 [S], a new array.

    A segment starts where a position is not the previous one plus 1. So a segment that continues
    the count of the previous one is not recognized, neither by this function nor by transformers.

    >>> lengths_from_position_ids(np.array([0, 1, 2, 0, 1]))
    array([3, 2])
    """
    if isinstance(position_ids_T, Tensor):
        breaks = torch.nonzero(torch.diff(position_ids_T) != 1).flatten() + 1
        ends = [breaks.new_zeros(1), breaks, breaks.new_full((1,), len(position_ids_T))]
        return torch.diff(torch.cat(ends)) if len(position_ids_T) else breaks
    breaks = np.flatnonzero(np.diff(position_ids_T) != 1) + 1
    edges = np.concatenate(([0], breaks, [len(position_ids_T)])).astype(np.int64)
    return np.diff(edges) if len(position_ids_T) else edges[:0]
