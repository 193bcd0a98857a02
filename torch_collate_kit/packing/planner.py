"""``pack``: cut or drop what does not fit, fill rows, assign rows to ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import checked_int, checked_lengths
from torch_collate_kit.packing.balance import Weights, level, split_evenly
from torch_collate_kit.packing.fitting import FittedPieces, cut_to_fit
from torch_collate_kit.packing.images import ImageLoad, Patches, image_load
from torch_collate_kit.packing.layout import ParallelLayout
from torch_collate_kit.packing.options import PackingOptions, packing_options
from torch_collate_kit.packing.plan import PackingPlan
from torch_collate_kit.packing.ranks import over_ranks
from torch_collate_kit.packing.strategies import (
    Rows,
    best_fit_decreasing,
    first_fit_decreasing,
    sequential,
)
from torch_collate_kit.packing.two_budgets import Fill, Limits, fill_two_budgets

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from torch_collate_kit.packing.options import PackingKeywords

__all__ = ["fill_rows", "pack", "plan_of", "rows_alone"]

_Ints = npt.NDArray[np.int64]
_InOrder: TypeAlias = tuple[_Ints, int, int | None, tuple[_Ints, int] | None]
_FILL: dict[str, Fill] = {
    "best_fit_decreasing": best_fit_decreasing,
    "first_fit_decreasing": first_fit_decreasing,
    "balanced": best_fit_decreasing,  # gives the number of rows, which are then levelled
}
# Levelling takes apart at most this many rows per rank: a few hundred rows have enough pieces for
# the few rows that rounding adds, and redistributing a million pieces one by one would be slow.
_LEVELLED_ROWS_PER_RANK = 32


def pack(
    lengths: npt.ArrayLike,
    max_tokens: int | None = None,
    *,
    patches: Patches | None = None,
    packing: PackingOptions | None = None,
    align: int = 1,
    **options: Unpack[PackingKeywords],
) -> PackingPlan:
    """Plan rows of at most ``max_tokens`` tokens that hold every example exactly once.

    Args:
        lengths: integers [N], tokens per example, each at least 1. Not modified.
        max_tokens: capacity of a row, where each piece counts with its length rounded up to
            ``align``.
        patches: vision patches: ints [N], 0 for an example without an image, or for each example
            the ints of its images (a list of lists, or a Ragged). Not modified.
        max_patches: the most patches of a row.
        packing: all options in one object; then nothing else is passed but ``patches``.
        strategy: "best_fit_decreasing" (Johnson 1973, by length histogram as in Krell et al. 2021)
            and "first_fit_decreasing" use at most 11/9 of the optimal number of rows + 6/9, and
            nearly the optimum on real data. "balanced" evens out the tokens over as many rows as
            best fit uses (LPT, Graham 1969). "sequential" keeps the order of the examples, within
            rows and across them.
        parallel: the parallel layout; its ``align`` and ``dp`` are the next two.
        align: each piece occupies a multiple of this many cells.
        rows_multiple_of: number of data-parallel ranks that rows are planned for, by default
            ``dp``. The number of rows is rounded up to a multiple of it. A row added by rounding
            takes pieces from many other rows, so that all are evenly filled; with too few pieces,
            empty dummy rows are added.
        balance: what to balance over the ranks: "attention" (what pieces and images cost by
            ``cost``) or "tokens" (and patches). The i-th rows of all ranks are similar, too. With
            None, row i goes to rank ``i % rows_multiple_of``.
            "sequential" keeps the order of groups of ``rows_multiple_of`` rows; with
            ``balance=None`` it also keeps the order within a group.
        cost: a :class:`ModelCost`, by default ``n * (24576 + n)`` for n tokens.
        overflow: what to do with an example longer than a row: "raise" an error, "truncate" it to
            its first tokens, "drop" it, or "split" it into consecutive pieces. An example with
            images is never split, and truncated only by a collator, which knows where they are.
        max_sequences_per_row: the largest number of pieces per row; None for no limit.
        dummy_image_tokens: with several ranks and ``patches``, rows without an image keep so many
            tokens free: they get a dummy image where ``PackingPlan.needs_dummy_image``.

    Returns:
        A new plan. With one rank, rows are in the order in which the strategy opened them. The same
        arguments always give the same plan.

    Raises:
        DataError: a length below 1, or an example that does not fit in a row with
            ``overflow="raise"``; names the example.
        TypeError: a wrong type, such as float lengths; options given twice.
        ValueError: lengths that are not 1-D, an unknown option, a number below its minimum.

    >>> plan = pack([5, 3, 9, 2, 14], 10, overflow="drop", rows_multiple_of=2)
    >>> plan.bins, plan.dropped.tolist(), plan.tokens_per_rank.tolist()
    ([[0, 1, 3], [2]], [4], [10, 9])
    """
    if align != 1:
        if packing is not None or options.get("parallel") is not None:
            raise TypeError(
                "align is that of the parallel layout; pass either it or "
                f"{'packing' if packing else 'parallel'}="
            )
        options["parallel"] = ParallelLayout(tp=checked_int("align", align))
    return plan_of(lengths, packing_options(packing, max_tokens, options), patches)


def plan_of(
    lengths: npt.ArrayLike, packing: PackingOptions, patches: Patches | ImageLoad | None = None
) -> PackingPlan:
    """As ``pack``, of options that are checked."""
    checked = checked_lengths(lengths)
    images = None if patches is None else image_load(patches, len(checked), packing.cost)
    pieces = cut_to_fit(checked, packing, images)
    sizes = _sizes(pieces.lengths, pieces.images, packing)
    limits = _limits(sizes, packing, has_patches=images is not None)
    rows = _for_ranks(_filled(sizes, packing, limits), sizes, pieces.images, packing, limits)
    return _plan(pieces, rows, packing)


def fill_rows(
    lengths: _Ints, packing: PackingOptions, images: ImageLoad | None = None
) -> PackingPlan:
    """Rows as the strategy opens them: not evened out, and for no ranks yet.

    ``lengths`` int64 [N]. "balanced" opens the rows of best fit. Without ``images`` rows reserve
    cells for a dummy image, too: others of the run may have images.
    """
    images = ImageLoad.none(len(lengths)) if images is None else images
    pieces = cut_to_fit(lengths, packing, images)
    sizes = _sizes(pieces.lengths, pieces.images, packing)
    limits = _limits(sizes, packing, has_patches=True)
    return _plan(pieces, _filled(sizes, packing, limits), packing, num_ranks=1)


def rows_alone(
    filled: PackingPlan, rows: _Ints, dropped: _Ints, packing: PackingOptions
) -> tuple[_Ints, PackingPlan]:
    """Rows that ``fill_rows`` has filled, as a batch of their own for all ranks of ``packing``.

    Returns its examples, int64 [N] ascending, and a plan in which they are numbered 0 to N - 1;
    ``dropped`` are examples that it counts as dropped. Without images it is the plan that packing
    these examples alone gives (sequential: where the rows are neighbours), because a piece goes
    where it went before: whether a row is fuller than another does not depend on a third. With
    images the same rows are kept.

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
        ImageLoad(filled.patches[in_order], filled.vision_costs[in_order]),
        dropped=np.searchsorted(examples, dropped),
        cut=np.searchsorted(examples, cut),
    )
    sizes = _sizes(lengths, pieces.images, packing)
    limits = _limits(sizes, packing, has_patches=True)
    alone = Rows(numbers[taken.order], taken.offsets)
    rows_of_ranks = _for_ranks(alone, sizes, pieces.images, packing, limits)
    return examples, _plan(pieces, rows_of_ranks, packing)


def _plan(
    pieces: FittedPieces, rows: Rows, packing: PackingOptions, *, num_ranks: int | None = None
) -> PackingPlan:
    images = pieces.images.take(rows.order)
    return PackingPlan(
        example_indices=pieces.example_indices[rows.order],
        starts=pieces.starts[rows.order],
        lengths=pieces.lengths[rows.order],
        row_offsets=rows.offsets,
        max_tokens=packing.max_tokens,
        align=packing.parallel.align,
        num_ranks=packing.num_ranks if num_ranks is None else num_ranks,
        dropped=pieces.dropped,
        cut=pieces.cut,
        num_cut_tokens=pieces.num_cut_tokens,
        num_dropped_tokens=pieces.num_dropped_tokens,
        patches=images.patches,
        vision_costs=images.costs,
        max_patches=packing.max_patches,
        dummy_image_tokens=packing.dummy_image_tokens,
        cost=packing.cost,
    )


def _sizes(lengths: _Ints, images: ImageLoad, packing: PackingOptions) -> Weights:
    """Cells and patches of each piece."""
    align = packing.parallel.align
    return Weights(-(-lengths // align) * align if align > 1 else lengths, images.patches)


def _limits(sizes: Weights, packing: PackingOptions, *, has_patches: bool) -> Limits:
    """What a row may hold, at most all there is: it makes the same rows, and no sum overflows."""
    tokens, patches = int(sizes.tokens.sum()), int(sizes.patches.sum())
    most_patches = patches if packing.max_patches is None else packing.max_patches
    text = packing.max_tokens - (packing.reserved if has_patches else 0)
    limit = min(packing.max_tokens, tokens)
    return Limits(
        limit, min(most_patches, patches), packing.max_sequences_per_row, limit - min(text, tokens)
    )


def _filled(sizes: Weights, packing: PackingOptions, limits: Limits) -> Rows:
    """Pieces into rows, as the strategy opens these; one empty row of no pieces."""
    tokens, patches = sizes
    if not len(tokens):
        return Rows(tokens, np.zeros(2, dtype=np.int64))
    if packing.strategy == "sequential":
        return sequential(*_in_order(sizes, limits))
    fill = _FILL[packing.strategy]
    if limits.patches >= int(patches.sum()) and not (limits.reserved and limits.patches):
        return fill(tokens, limits.tokens - limits.reserved, limits.pieces, None)
    return fill_two_budgets(fill, tokens, patches, limits)


def _in_order(sizes: Weights, limits: Limits) -> _InOrder:
    """What cutting a sequence into rows takes; all rows keep the reserved cells free.

    Only a piece with an image may use them, and is then alone in its row.
    """
    capacity = limits.tokens - limits.reserved
    patches = (sizes.patches, limits.patches) if limits.patches else None
    return np.minimum(sizes.tokens, capacity), capacity, limits.pieces, patches


def _for_ranks(
    rows: Rows, sizes: Weights, images: ImageLoad, packing: PackingOptions, limits: Limits
) -> Rows:
    """Rows that are filled, as many as a multiple of the ranks, evened out and given to them."""
    num_ranks, strategy = packing.num_ranks, packing.strategy
    if not len(sizes.tokens):
        return Rows(sizes.tokens, np.zeros(num_ranks + 1, dtype=np.int64))
    if strategy != "balanced" and num_ranks == 1:
        return rows
    costs = sizes
    if packing.balance == "attention" and num_ranks > 1:
        has_cost = images.costs.any()  # a model without a vision part has none
        costs = Weights(
            packing.cost.language(sizes.tokens), images.costs if has_cost else images.patches
        )
    filled = len(rows.offsets) - 1
    num_rows = -(-filled // num_ranks) * num_ranks
    if strategy == "sequential":
        tokens, capacity, max_pieces, patches = _in_order(sizes, limits)
        rows = split_evenly(tokens, num_rows, capacity, max_pieces, patches)
    else:
        # By tokens, not by cost: a row with less tokens than another is padded, and costs as much.
        weights = sizes
        if limits.patches and strategy != "balanced":
            weights = Weights(sizes.tokens, costs.patches)
        rows = level(
            rows,
            sizes,
            num_rows,
            limits=limits,
            weights=weights,
            most=filled if strategy == "balanced" else _LEVELLED_ROWS_PER_RANK * num_ranks,
        )
    if num_ranks == 1:
        return rows
    given = over_ranks(
        None if packing.balance is None else rows.totals(costs.tokens),
        num_rows,
        num_ranks,
        keep_order=strategy == "sequential",
        image_costs=rows.totals(costs.patches) if limits.patches else None,
    )
    return rows.take(given)
