"""``pack``: cut or drop over-long examples, fill rows, assign rows to ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import checked_int, checked_lengths
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing import balance as _balance
from torch_collate_kit.packing import strategies
from torch_collate_kit.packing.layout import ParallelLayout
from torch_collate_kit.packing.options import PackingOptions, packing_options
from torch_collate_kit.packing.plan import PackingPlan
from torch_collate_kit.packing.strategies import Rows

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from torch_collate_kit.packing.options import PackingKeywords

__all__ = ["cut_to_fit", "fill_rows", "num_pieces", "pack", "plan_of", "rows_alone"]

_Ints = npt.NDArray[np.int64]
_Fill = Callable[[_Ints, int, int | None], Rows]
_FILL: dict[str, _Fill] = {
    "best_fit_decreasing": strategies.best_fit_decreasing,
    "first_fit_decreasing": strategies.first_fit_decreasing,
    "balanced": strategies.best_fit_decreasing,  # gives the number of rows, which are then levelled
    "sequential": strategies.sequential,
}
# Levelling takes apart at most this many rows per rank: a few hundred rows have enough pieces for
# the few rows that rounding adds, and redistributing a million pieces one by one would be slow.
_LEVELLED_ROWS_PER_RANK = 32


def pack(
    lengths: npt.ArrayLike,
    max_tokens: int | None = None,
    *,
    packing: PackingOptions | None = None,
    align: int = 1,
    rows_multiple_of: int = 1,
    **options: Unpack[PackingKeywords],
) -> PackingPlan:
    """Plan rows of at most ``max_tokens`` tokens that hold every example exactly once.

    Args:
        lengths: integers [N], tokens per example, each at least 1. Not modified.
        max_tokens: capacity of a row, where each piece counts with its length rounded up to
            ``align``.
        packing: all options in one object; then nothing else is passed.
        strategy: "best_fit_decreasing" (Johnson 1973, by length histogram as in Krell et al. 2021)
            and "first_fit_decreasing" use at most 11/9 of the optimal number of rows + 6/9, and
            nearly the optimum on real data. "balanced" evens out the tokens over as many rows as
            best fit uses (LPT, Graham 1969). "sequential" keeps the order of the examples, within
            rows and across them.
        parallel: the parallel layout; its ``align`` and ``dp`` are the next two.
        align: each piece occupies a multiple of this many cells.
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
        TypeError: a wrong type, such as float lengths; options given twice.
        ValueError: lengths that are not 1-D, an unknown option, a number below its minimum.

    >>> plan = pack([5, 3, 9, 2, 14], 10, overflow="drop", rows_multiple_of=2)
    >>> plan.bins, plan.dropped.tolist(), plan.tokens_per_rank.tolist()
    ([[0, 1, 3], [2]], [4], [10, 9])
    """
    if (align, rows_multiple_of) != (1, 1):
        if packing is not None or options.get("parallel") is not None:
            raise TypeError(
                "align and rows_multiple_of are those of the parallel layout; pass either them or "
                f"{'packing' if packing else 'parallel'}="
            )
        align = checked_int("align", align)
        ranks = checked_int("rows_multiple_of", rows_multiple_of, hint="1 means one rank")
        options["parallel"] = ParallelLayout(dp=ranks, tp=align)
    return plan_of(lengths, packing_options(packing, max_tokens, options))


def plan_of(lengths: npt.ArrayLike, packing: PackingOptions) -> PackingPlan:
    """As ``pack``, of options that are checked."""
    pieces = cut_to_fit(checked_lengths(lengths), packing)
    sizes = _aligned(pieces.lengths, packing)
    return _plan(pieces, _for_ranks(_filled(sizes, packing), sizes, packing), packing)


def fill_rows(lengths: _Ints, packing: PackingOptions) -> PackingPlan:
    """Rows as the strategy opens them: not evened out, and for no ranks yet.

    ``lengths`` int64 [N]. "balanced" opens the rows of best fit.
    """
    pieces = cut_to_fit(lengths, packing)
    return _plan(pieces, _filled(_aligned(pieces.lengths, packing), packing), packing, num_ranks=1)


def rows_alone(
    filled: PackingPlan, rows: _Ints, dropped: _Ints, packing: PackingOptions
) -> tuple[_Ints, PackingPlan]:
    """Rows that ``fill_rows`` has filled, as a batch of their own for all ranks of ``packing``.

    Returns its examples, int64 [N] ascending, and a plan in which they are numbered 0 to N - 1;
    ``dropped`` are examples that it counts as dropped. It is the plan that packing these examples
    alone gives (sequential: where the rows are neighbours), because a piece goes where it went
    before: whether a row is fuller than another does not depend on a third.

    >>> packing = PackingOptions(6)
    >>> filled = fill_rows(np.array([4, 2, 6, 3]), packing)
    >>> filled.bins
    [[2], [0, 1], [3]]
    >>> examples, plan = rows_alone(filled, np.array([1, 2]), filled.dropped, packing)
    >>> examples.tolist(), plan.bins
    ([0, 1, 3], [[0, 1], [2]])
    """
    taken = Rows(np.arange(len(filled.lengths)), filled.row_offsets).take(np.sort(rows))
    examples = np.unique(np.append(filled.example_indices[taken.order], dropped))
    in_order = taken.order[np.argsort(filled.example_indices[taken.order], kind="stable")]
    numbers = np.empty(len(filled.lengths), dtype=np.int64)
    numbers[in_order] = np.arange(len(in_order))
    lengths = filled.lengths[in_order]
    cut = np.intersect1d(filled.cut, examples)
    pieces = FittedPieces(
        np.searchsorted(examples, filled.example_indices[in_order]),
        filled.starts[in_order],
        lengths,
        dropped=np.searchsorted(examples, dropped),
        cut=np.searchsorted(examples, cut),
    )
    sizes = _aligned(lengths, packing)
    alone = Rows(numbers[taken.order], taken.offsets)
    return examples, _plan(pieces, _for_ranks(alone, sizes, packing), packing)


def _plan(
    pieces: FittedPieces, rows: Rows, packing: PackingOptions, *, num_ranks: int | None = None
) -> PackingPlan:
    return PackingPlan(
        example_indices=pieces.example_indices[rows.order],
        starts=pieces.starts[rows.order],
        lengths=pieces.lengths[rows.order],
        row_offsets=rows.offsets,
        max_tokens=packing.max_tokens,
        align=packing.parallel.align,
        num_ranks=packing.parallel.dp if num_ranks is None else num_ranks,
        dropped=pieces.dropped,
        cut=pieces.cut,
        num_cut_tokens=pieces.num_cut_tokens,
        num_dropped_tokens=pieces.num_dropped_tokens,
    )


def _aligned(lengths: _Ints, packing: PackingOptions) -> _Ints:
    align = packing.parallel.align
    return -(-lengths // align) * align if align > 1 else lengths


def _filled(sizes: _Ints, packing: PackingOptions) -> Rows:
    """Pieces into rows, as the strategy opens these; one empty row of no pieces."""
    if not len(sizes):
        return Rows(sizes, np.zeros(2, dtype=np.int64))
    return _FILL[packing.strategy](sizes, _bounded(sizes, packing), packing.max_sequences_per_row)


def _bounded(sizes: _Ints, packing: PackingOptions) -> int:
    """The capacity, at most all there is: it makes the same rows, and no sum overflows."""
    return min(packing.max_tokens, int(sizes.sum()))


def _for_ranks(rows: Rows, sizes: _Ints, packing: PackingOptions) -> Rows:
    """Rows that are filled, as many as a multiple of the ranks, evened out and given to them."""
    num_ranks, strategy = packing.parallel.dp, packing.strategy
    if not len(sizes):
        return Rows(sizes, np.zeros(num_ranks + 1, dtype=np.int64))
    if strategy != "balanced" and num_ranks == 1:
        return rows
    capacity, max_pieces = _bounded(sizes, packing), packing.max_sequences_per_row
    attention = packing.balance == "attention" and num_ranks > 1
    costs = _balance.attention_cost(sizes) if attention else sizes
    filled = len(rows.offsets) - 1
    num_rows = -(-filled // num_ranks) * num_ranks
    if strategy == "sequential":
        rows = _balance.split_evenly(sizes, num_rows, capacity, max_pieces)
    else:
        rows = _balance.level(
            rows,
            sizes,
            num_rows,
            capacity=capacity,
            max_pieces=max_pieces,
            weights=sizes if strategy == "balanced" else costs,
            most=filled if strategy == "balanced" else _LEVELLED_ROWS_PER_RANK * num_ranks,
        )
    if num_ranks == 1:
        return rows
    row_costs = None if packing.balance is None else rows.totals(costs)
    keep_order = strategy == "sequential"
    return rows.take(_balance.over_ranks(row_costs, num_rows, num_ranks, keep_order=keep_order))


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

    Nothing else cuts or drops over-long examples, or says that they are too long.

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
