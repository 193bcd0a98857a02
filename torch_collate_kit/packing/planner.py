"""``pack``: check arguments, handle over-long examples, fill rows, assign rows to ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import (
    checked_choice,
    checked_int,
    checked_lengths,
    checked_optional_int,
)
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing import balance as _balance
from torch_collate_kit.packing import strategies
from torch_collate_kit.packing.plan import PackingPlan
from torch_collate_kit.packing.strategies import Rows

__all__ = ["pack"]

_Ints = npt.NDArray[np.int64]
_Fill = Callable[[_Ints, int, int | None], Rows]
_FILL: dict[str, _Fill] = {
    "best_fit_decreasing": strategies.best_fit_decreasing,
    "first_fit_decreasing": strategies.first_fit_decreasing,
    "balanced": strategies.best_fit_decreasing,  # gives the number of rows, which are then levelled
    "sequential": strategies.sequential,
}
_OVERFLOWS = ("raise", "truncate", "drop", "split")
_BALANCES = ("attention", "tokens", None)
# Levelling takes apart at most this many rows per rank: a few hundred rows have enough pieces for
# the few rows that rounding adds, and redistributing a million pieces one by one would be slow.
_LEVELLED_ROWS_PER_RANK = 32


def pack(
    lengths: npt.ArrayLike,
    max_tokens: int,
    *,
    strategy: str = "best_fit_decreasing",
    align: int = 1,
    rows_multiple_of: int = 1,
    balance: str | None = "attention",
    overflow: str = "raise",
    max_sequences_per_row: int | None = None,
) -> PackingPlan:
    """Plan rows of at most ``max_tokens`` tokens that hold every example exactly once.

    Args:
        lengths: integers [N], tokens per example, each at least 1. Not modified.
        max_tokens: capacity of a row, where each piece counts with its length rounded up to
            ``align``.
        strategy: "best_fit_decreasing" (Johnson 1973, by length histogram as in Krell et al. 2021)
            and "first_fit_decreasing" use at most 11/9 of the optimal number of rows + 6/9, and
            nearly the optimum on real data. "balanced" evens out the tokens over as many rows as
            best fit uses (LPT, Graham 1969). "sequential" keeps the order of the examples, within
            rows and across them.
        align: each piece occupies a multiple of this many cells; ``ParallelLayout.align``.
        rows_multiple_of: number of data-parallel ranks. The number of rows is rounded up to a
            multiple of it. A row added by rounding takes pieces from many other rows, so that all
            are evenly filled; with too few pieces, empty dummy rows are added.
        balance: what to balance over the ranks: "attention" (a piece of n tokens costs
            ``n * (24576 + n)``, see ``PackingPlan.cost_per_rank``) or "tokens". The i-th rows of
            all ranks are similar, too. With None, row i goes to rank ``i % rows_multiple_of``.
            "sequential" keeps the order of groups of ``rows_multiple_of`` rows; with
            ``balance=None`` it also keeps the order within a group.
        overflow: what to do with an example longer than a row: "raise" an error, "truncate" it to
            its first tokens, "drop" it, or "split" it into consecutive pieces.
        max_sequences_per_row: the largest number of pieces per row; None for no limit.

    Returns:
        A new plan. With one rank, rows are in the order in which the strategy opened them. The same
        arguments always give the same plan.

    Raises:
        DataError: a length below 1, or too long with ``overflow="raise"``; names the example.
        TypeError: a wrong type, such as float lengths.
        ValueError: lengths that are not 1-D, an unknown option, a number below its minimum.

    >>> plan = pack([5, 3, 9, 2, 14], 10, overflow="drop", rows_multiple_of=2)
    >>> plan.bins, plan.dropped.tolist(), plan.tokens_per_rank.tolist()
    ([[0, 1, 3], [2]], [4], [10, 9])
    """
    checked_choice("strategy", strategy, tuple(_FILL))
    checked_choice("balance", balance, _BALANCES)
    checked_choice("overflow", overflow, _OVERFLOWS)
    max_tokens, align = _checked_capacity(max_tokens, align)
    num_ranks = checked_int("rows_multiple_of", rows_multiple_of, hint="1 means one rank")
    max_sequences_per_row = checked_optional_int(
        "max_sequences_per_row", max_sequences_per_row, hint="None means no limit"
    )
    pieces = _cut_to_fit(checked_lengths(lengths), max_tokens, align, overflow)
    sizes = -(-pieces.lengths // align) * align if align > 1 else pieces.lengths
    attention = balance == "attention" and num_ranks > 1
    costs = _balance.attention_cost(sizes) if attention else sizes
    fill = _FILL[strategy]
    rows = _fill_rows(sizes, costs, max_tokens, max_sequences_per_row, strategy, num_ranks, fill)
    if num_ranks > 1:
        row_costs = None if balance is None else rows.totals(costs)
        num_rows, keep_order = len(rows.offsets) - 1, strategy == "sequential"
        rows = rows.take(_balance.over_ranks(row_costs, num_rows, num_ranks, keep_order=keep_order))
    return PackingPlan(
        example_indices=pieces.example_indices[rows.order],
        starts=pieces.starts[rows.order],
        lengths=pieces.lengths[rows.order],
        row_offsets=rows.offsets,
        max_tokens=max_tokens,
        align=align,
        num_ranks=num_ranks,
        dropped=pieces.dropped,
        cut=pieces.cut,
        num_cut_tokens=pieces.num_cut_tokens,
        num_dropped_tokens=pieces.num_dropped_tokens,
    )


def _checked_capacity(max_tokens: int, align: int) -> tuple[int, int]:
    max_tokens, align = checked_int("max_tokens", max_tokens), checked_int("align", align)
    if max_tokens < align:
        raise ValueError(
            f"max_tokens must be at least align={align}, got {max_tokens}: not one aligned token "
            "fits in a row; raise max_tokens or lower align"
        )
    return max_tokens, align


def _fill_rows(
    sizes: _Ints,
    costs: _Ints,
    capacity: int,
    max_pieces: int | None,
    strategy: str,
    num_ranks: int,
    fill: _Fill,
) -> Rows:
    """Assign pieces to rows; the number of rows is a multiple of ``num_ranks``."""
    if not len(sizes):
        return Rows(sizes, np.zeros(num_ranks + 1, dtype=np.int64))
    capacity = min(capacity, int(sizes.sum()))  # gives the same rows, and no sum overflows
    rows = fill(sizes, capacity, max_pieces)
    filled = len(rows.offsets) - 1
    num_rows = -(-filled // num_ranks) * num_ranks
    if strategy != "balanced" and num_ranks == 1:
        return rows
    if strategy == "sequential":
        return _balance.split_evenly(sizes, num_rows, capacity, max_pieces)
    return _balance.level(
        rows,
        sizes,
        num_rows,
        capacity=capacity,
        max_pieces=max_pieces,
        weights=sizes if strategy == "balanced" else costs,
        most=filled if strategy == "balanced" else _LEVELLED_ROWS_PER_RANK * num_ranks,
    )


class _Pieces(NamedTuple):
    example_indices: _Ints
    starts: _Ints
    lengths: _Ints
    dropped: _Ints
    cut: _Ints
    num_cut_tokens: int = 0
    num_dropped_tokens: int = 0


def _cut_to_fit(lengths: _Ints, max_tokens: int, align: int, overflow: str) -> _Pieces:
    """The pieces to place, in example order, none longer than a row."""
    limit = max_tokens // align * align
    indices = np.arange(len(lengths))
    starts, none = np.zeros_like(lengths), np.zeros(0, dtype=np.int64)
    too_long = np.flatnonzero(lengths > limit)
    if not len(too_long):
        return _Pieces(indices, starts, lengths, none, none)
    if overflow == "drop":
        lost = int(lengths[too_long].sum())
        kept = np.delete(indices, too_long)
        return _Pieces(kept, starts[kept], lengths[kept], too_long, none, num_dropped_tokens=lost)
    if overflow == "truncate":
        lost = int(lengths[too_long].sum()) - limit * len(too_long)
        shortened = np.minimum(lengths, limit)
        return _Pieces(indices, starts, shortened, none, too_long, num_cut_tokens=lost)
    if overflow == "split":
        num_pieces = -(-lengths // limit)
        indices = np.repeat(indices, num_pieces)
        first_piece = np.cumsum(num_pieces) - num_pieces
        starts = (np.arange(len(indices)) - first_piece[indices]) * limit
        return _Pieces(
            indices, starts, np.minimum(lengths[indices] - starts, limit), none, too_long
        )
    first = int(too_long[0])
    others = f" (too long as well: {len(too_long) - 1} more)" if len(too_long) > 1 else ""
    raise DataError(
        f"example {first} has {int(lengths[first])} tokens, more than the {limit} that fit in a "
        f"row with max_tokens={max_tokens} and align={align}{others}; raise max_tokens, shorten "
        "it, or pass overflow='truncate', 'drop' or 'split'"
    )
