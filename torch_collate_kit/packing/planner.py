"""``pack``: cut or drop what does not fit, fill rows, assign rows to ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import checked_lengths
from torch_collate_kit.packing.balance import assign_ranks, costs_to_balance, for_ranks
from torch_collate_kit.packing.options import (
    Overflow,
    PackingOptions,
    ParallelLayout,
    Strategy,
    common_options,
)
from torch_collate_kit.packing.pieces import (
    Load,
    Patches,
    cut_to_fit,
    image_load,
    wrapped_pieces,
)
from torch_collate_kit.packing.plan import PackingPlan
from torch_collate_kit.packing.rows import Ints, Limits, Rows, Sizes
from torch_collate_kit.packing.runs import Runs, SegmentIds
from torch_collate_kit.packing.segments import (
    Segments,
    are_nested,
    bare_lengths,
    checked_segments,
)
from torch_collate_kit.packing.strategies import (
    best_fit_decreasing,
    first_fit_decreasing,
    sequential,
)
from torch_collate_kit.packing.two_budgets import fill_two_budgets


def pack(
    lengths: npt.ArrayLike,
    max_tokens: int | None = None,
    *,
    strategy: Strategy | None = None,
    overflow: Overflow | None = None,
    parallel: ParallelLayout | None = None,
    max_patches: int | None = None,
    patches: Patches | Load | None = None,
    packing: PackingOptions | None = None,
) -> PackingPlan:
    """Plan rows of at most ``max_tokens`` tokens that hold every example exactly once.

    Args:
        lengths: integers [N], tokens per example, each at least 1; of examples with several
            segments a list of their tokens for each (a Ragged, or a list of lists). Not modified.
        max_tokens: capacity of a row; a piece counts with its length rounded up to the
            ``align`` of ``parallel``.
        strategy: "best_fit_decreasing" (default; Johnson 1973, by length histogram as in Krell et
            al. 2021) and "first_fit_decreasing" use at most 11/9 of the optimal number of rows +
            6/9, and nearly the optimum on real data. "balanced" evens out the tokens over as many
            rows as best fit uses (LPT, Graham 1969). "sequential" keeps the order of the examples,
            within rows and across them. "wrapped" joins documents end to end and cuts them at
            exactly ``max_tokens``, so only the last row has padding.
        overflow: what to do with an example longer than a row: "raise" an error (default),
            "truncate" it to its first tokens, "drop" it, or "split" it into consecutive pieces. An
            example with images is never split, and truncated only by a collator, which knows where
            they are.
        parallel: a :class:`ParallelLayout`, by default of one rank. The number of rows is rounded
            up to a multiple of its ``dp``. A row added by rounding takes pieces from many other
            rows, so that all are evenly filled; with too few pieces, empty dummy rows are added.
        max_patches: the most patches of a row; None for no limit.
        patches: vision patches: ints [N], 0 for an example without an image, or for each example
            the ints of its images (a list of lists, or a Ragged). Not modified.
        packing: a :class:`PackingOptions` with these options and the rarer ones (``balance``,
            ``cost``, ``rows_multiple_of``, ...), in place of all of the above but ``patches``.

    Returns:
        A new plan. With one rank, rows are in the order in which the strategy opened them. The same
        arguments always give the same plan.

    Raises:
        DataError: a length below 1, or an example that does not fit in a row with
            ``overflow="raise"``; names the example.
        TypeError: a wrong type, such as float lengths; ``packing`` beside other options.
        ValueError: lengths that are not 1-D, an unknown option, a number below its minimum.

    >>> plan = pack([5, 3, 9, 2, 14], 10, overflow="drop", parallel=ParallelLayout(dp=2))
    >>> plan.bins, plan.dropped.tolist(), plan.tokens_per_rank.tolist()
    ([[0, 1, 3], [2]], [4], [10, 9])
    """
    packing = common_options(
        packing,
        max_tokens,
        strategy=strategy,
        overflow=overflow,
        parallel=parallel,
        max_patches=max_patches,
    )
    if packing.share_prefixes and are_nested(lengths):
        raise bare_lengths(packing)
    checked, load = sizes_of(lengths, packing, patches)
    return plan_rows(checked, packing, load)


def sizes_of(
    lengths: Any,
    packing: PackingOptions,
    patches: Patches | Load | None = None,
    *,
    depths: Ints | None = None,
    ids_of: SegmentIds | None = None,
) -> tuple[Ints, Load | None]:
    """Return the checked tokens of each example, int64 [N], and what else it holds, if anything.

    ``depths``, int64 for each segment, are the tokens that it shares, if prefixes are shared.
    ``ids_of`` reads the segments of trees that are to be cut.
    """
    if not are_nested(lengths):
        checked = checked_lengths(lengths)
        return checked, None if patches is None else image_load(patches, len(checked), packing.cost)
    values, offsets = checked_segments(lengths)
    checked, segments = Segments.of(values, offsets, packing, depths)
    load, runs = Load.none(len(checked)), None
    if patches is not None:
        load = image_load(patches, len(checked), packing.cost)
    if ids_of is not None and packing.share_prefixes and packing.overflow == "split":
        runs = Runs.of(values, offsets, packing, segments, depths, ids_of)
    return checked, load._replace(segments=segments, runs=runs)


def plan_rows(lengths: Ints, packing: PackingOptions, load: Load | None = None) -> PackingPlan:
    """Plan rows as ``pack`` does, of checked ``lengths`` int64 [N]."""
    dp, multiple = packing.parallel.dp, packing.row_multiple
    if multiple % dp:
        raise ValueError(
            f"rows_multiple_of={multiple} must be a multiple of dp={dp} where rows are planned by "
            "examples: every rank has as many rows; leave it out, or plan with batch_rows="
        )
    if packing.strategy == "wrapped":
        pieces = wrapped_pieces(lengths, packing, load)
        sizes, limits = measured(pieces, packing, has_images=False)
        costs = costs_to_balance(sizes, limits, pieces, packing)
        alone = Rows(np.arange(len(pieces.lengths)), pieces.row_offsets)
        rows = assign_ranks(alone, costs, limits, packing, num_ranks=multiple)
        return pieces.in_rows(rows, multiple)
    pieces = cut_to_fit(lengths, packing, load)
    sizes, limits = measured(pieces, packing, has_images=load is not None)
    rows = filled_rows(sizes, limits, packing.strategy)
    return _for_ranks(pieces, rows, sizes, limits, packing)


def _for_ranks(
    pieces: PackingPlan, rows: Rows, sizes: Sizes, limits: Limits, packing: PackingOptions
) -> PackingPlan:
    """Return the plan of filled rows, evened out over the ranks of ``packing``."""
    if packing.row_multiple > 1 or packing.strategy == "balanced":
        costs = costs_to_balance(sizes, limits, pieces, packing)
        rows = for_ranks(rows, sizes, limits, costs, packing)
    return pieces.in_rows(rows, packing.row_multiple)


def part_of(plan: PackingPlan, rows: Rows, examples: Ints) -> PackingPlan:
    """Return rows of some of a plan's pieces, the ``examples``, ascending, numbered anew from 0."""

    def renumbered(numbers: Ints) -> Ints:
        if not len(numbers):  # isin takes 70 us
            return numbers
        return np.searchsorted(examples, numbers[np.isin(numbers, examples)])

    part = plan.in_rows(rows, plan.rows_multiple_of)
    return replace(
        part,
        example_indices=np.searchsorted(examples, part.example_indices),
        dropped=renumbered(plan.dropped),
        cut=renumbered(plan.cut),
        segments=None if plan.segments is None else plan.segments.take(examples),
    )


def measured(
    pieces: PackingPlan, packing: PackingOptions, *, has_images: bool
) -> tuple[Sizes, Limits]:
    """Return the cells and patches of each piece, and the limits of a row.

    With ``has_images`` a row may need a dummy image. A row may hold at most all there is: it makes
    the same rows, and no sum overflows.
    """
    patches, most_pieces = pieces.patches, packing.max_sequences_per_row
    shares = pieces.segments is not None and pieces.segments.shares
    has_gaps = packing.parallel.align > 1
    cells = pieces.aligned_lengths if shares or has_gaps else pieces.lengths
    if pieces.segments is not None and most_pieces is not None:
        most_of_one = int(pieces.num_segments.max(initial=1))
        most_pieces //= max(1, most_of_one)  # as if all had as many segments
    num_cells, num_patches = int(cells.sum()), int(patches.sum())
    room = min(packing.max_tokens, packing.capacity + packing.parallel.align - 1)  # as capacity
    tokens = min(room, num_cells)
    text = min(room - (packing.reserved if has_images else 0), num_cells)
    most_patches = min(packing.max_patches or num_patches, num_patches)
    return (cells, patches), Limits(tokens, most_patches, most_pieces, tokens - text)


def filled_rows(sizes: Sizes, limits: Limits, strategy: Strategy | None) -> Rows:
    """Return the rows as the strategy opens them; one empty row without pieces."""
    tokens, patches = sizes
    if not len(tokens):
        return Rows(tokens, np.zeros(2, dtype=np.int64))
    if strategy == "sequential":
        return sequential(sizes, limits)
    is_first_fit = strategy == "first_fit_decreasing"
    fill = first_fit_decreasing if is_first_fit else best_fit_decreasing
    if limits.patches and (limits.reserved or limits.patches < int(patches.sum())):
        return fill_two_budgets(fill, sizes, limits)
    return fill(tokens, limits.text, limits.pieces)
