"""``pack``: cut or drop what does not fit, fill rows, assign rows to ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from torch_collate_kit.packing.atoms import Atoms, Patches, checked_sizes
from torch_collate_kit.packing.balance import assign_ranks, level_rows
from torch_collate_kit.packing.fitting import Cuts, fitted, wrapped
from torch_collate_kit.packing.options import (
    Overflow,
    PackingOptions,
    ParallelLayout,
    Strategy,
    common_options,
)
from torch_collate_kit.packing.plan import PackingPlan
from torch_collate_kit.packing.rows import Ints, Limits, Rows
from torch_collate_kit.packing.strategies import (
    best_fit_decreasing,
    first_fit_decreasing,
    sequential,
)
from torch_collate_kit.packing.trees import bare_lengths
from torch_collate_kit.packing.two_budgets import fill_two_budgets


def pack(
    lengths: npt.ArrayLike,
    max_tokens: int | None = None,
    *,
    strategy: Strategy | None = None,
    overflow: Overflow | None = None,
    parallel: ParallelLayout | None = None,
    max_patches: int | None = None,
    patches: Patches | None = None,
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
    checked, offsets = checked_sizes(lengths)
    if packing.share_prefixes and offsets is not None:
        raise bare_lengths(packing)
    return plan_rows(Atoms.of(checked, offsets, packing, patches), packing)


def plan_rows(atoms: Atoms, packing: PackingOptions, cuts: Cuts | None = None) -> PackingPlan:
    """Plan rows as ``pack`` does; ``cuts`` are what truncation leaves of examples with images."""
    dp, multiple = packing.parallel.dp, packing.row_multiple
    if multiple % dp:
        raise ValueError(
            f"rows_multiple_of={multiple} must be a multiple of dp={dp} where rows are planned by "
            "examples: every rank has as many rows; leave it out, or plan with batch_rows="
        )
    if packing.strategy == "wrapped":
        joined = wrapped(atoms, packing)
        rows = assign_ranks(joined.rows, joined.atoms, packing, num_ranks=multiple)
        return joined.in_rows(rows, multiple)
    pieces = fitted(atoms, packing, cuts)
    limits = limits_of(pieces.atoms, packing)
    return _for_ranks(pieces, filled_rows(pieces.atoms, limits, packing), limits, packing)


def _for_ranks(
    pieces: PackingPlan, rows: Rows, limits: Limits, packing: PackingOptions
) -> PackingPlan:
    """Return the plan of filled rows, evened out over the ranks of ``packing``."""
    ranks = packing.row_multiple
    if ranks > 1 or packing.strategy == "balanced":
        num_rows = -(-(len(rows.offsets) - 1) // ranks) * ranks
        rows = level_rows(rows, pieces.atoms, limits, packing, num_rows=num_rows, num_ranks=ranks)
        rows = assign_ranks(rows, pieces.atoms, packing, num_ranks=ranks)
    return pieces.in_rows(rows, ranks)


def part_of(plan: PackingPlan, rows: Rows, examples: Ints) -> PackingPlan:
    """Return rows of some of a plan's pieces, the ``examples``, ascending, numbered anew from 0."""

    def renumbered(numbers: Ints) -> Ints:
        if not len(numbers):  # isin takes 70 us
            return numbers
        return np.searchsorted(examples, numbers[np.isin(numbers, examples)])

    part = plan.in_rows(rows, plan.rows_multiple_of)
    atoms, left_out = part.atoms, plan.left_out
    if len(left_out.examples):
        left_out = left_out.take(np.flatnonzero(np.isin(left_out.examples, examples)))
    return replace(
        part,
        atoms=replace(atoms, examples=np.searchsorted(examples, atoms.examples)),
        left_out=replace(left_out, examples=renumbered(left_out.examples)),
        cut=renumbered(plan.cut),
    )


def limits_of(atoms: Atoms, packing: PackingOptions) -> Limits:
    """Return the limits of a row.

    A row may hold at most all there is: it makes the same rows, and no sum overflows.
    """
    most_pieces = packing.max_sequences_per_row
    if most_pieces is not None:  # as if all had as many segments
        most_pieces //= max(1, int(atoms.segments.max(initial=1)))
    num_cells, num_patches = int(atoms.cells.sum()), int(atoms.patches.sum())
    room = min(packing.max_tokens, packing.capacity + packing.parallel.align - 1)  # as capacity
    tokens = min(room, num_cells)
    text = min(room - atoms.reserved, num_cells)
    most_patches = min(packing.max_patches or num_patches, num_patches)
    return Limits(tokens, most_patches, most_pieces, tokens - text)


def filled_rows(atoms: Atoms, limits: Limits, packing: PackingOptions) -> Rows:
    """Return the rows as the strategy opens them; one empty row without pieces."""
    if not len(atoms.cells):
        return Rows(atoms.cells, np.zeros(2, dtype=np.int64))
    if packing.strategy == "sequential":
        return sequential(atoms.sizes, limits)
    is_first_fit = packing.strategy == "first_fit_decreasing"
    fill = first_fit_decreasing if is_first_fit else best_fit_decreasing
    if limits.patches and (limits.reserved or limits.patches < int(atoms.patches.sum())):
        return fill_two_budgets(fill, atoms.sizes, limits)
    return fill(atoms.cells, limits.text, limits.pieces)
