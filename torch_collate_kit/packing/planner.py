"""``pack``: cut or drop what does not fit, fill rows, assign rows to ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import plural
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing.atoms import Atoms, Patches, checked_sizes
from torch_collate_kit.packing.balance import assign_ranks, dealt, level_rows
from torch_collate_kit.packing.options import (
    MOST_CELLS,
    Overflow,
    PackingOptions,
    ParallelLayout,
    Strategy,
    common_options,
)
from torch_collate_kit.packing.plan import PackingPlan
from torch_collate_kit.packing.rows import Ints, Limits, Rows
from torch_collate_kit.packing.strategies import (
    Fill,
    best_fit_decreasing,
    fill_two_budgets,
    first_fit_decreasing,
    sequential,
)
from torch_collate_kit.packing.trees import bare_lengths

_FINER = 200  # rows that are too few first grow by this part of them

Cuts: TypeAlias = tuple[Ints, Ints, Ints]
"""Tokens, patches and vision cost that truncation leaves of an example: of its longest beginning
that fits and does not end within an image, int64 [E] each. Only a collator has them."""


def fitted(atoms: Atoms, packing: PackingOptions, cuts: Cuts | None = None) -> PackingPlan:
    """Return the examples, or pieces of them, that are placed: one atom per row.

    Without ``cuts`` no example with an image is cut.
    """
    if atoms.are_lists:
        check_not_cut(packing)
    limits_E, overflow = _longest(atoms, packing), packing.overflow
    is_unfit_E = (atoms.cells if atoms.are_lists else atoms.tokens) > limits_E
    if packing.max_sequences_per_row is not None:
        is_unfit_E |= atoms.segments > packing.max_sequences_per_row
    if packing.max_patches is not None:
        is_unfit_E |= atoms.patches > packing.max_patches
    too_long, placed, others = np.flatnonzero(is_unfit_E), atoms, dict[str, Any]()
    if len(too_long) and overflow == "drop":
        placed = atoms.take(np.flatnonzero(~is_unfit_E))
        others = {"left_out": atoms.take(too_long)}
    elif len(too_long):
        limits_E = np.broadcast_to(limits_E, atoms.tokens.shape)
        with_images = too_long[atoms.patches[too_long] > 0]
        if overflow == "raise" or (len(with_images) and (overflow == "split" or cuts is None)):
            unfit = too_long if overflow == "raise" else with_images
            raise _unfit_error(unfit, atoms, limits_E, packing)
        if overflow == "split":
            placed = _split(atoms, packing, limits_E)
        else:
            placed = _truncated(atoms, packing, limits_E, with_images, cuts)
        num_lost = int(atoms.tokens.sum() - placed.tokens.sum())
        others = {"cut": too_long, "num_cut_tokens": num_lost}
    return PackingPlan(placed, np.arange(len(placed.tokens) + 1), packing, **others)


def wrapped(atoms: Atoms, packing: PackingOptions) -> PackingPlan:
    """Return the rows of documents joined end to end, cut at exactly ``max_tokens``.

    The last row may be shorter; empty rows follow up to a multiple of the ranks.
    """
    if atoms.are_lists:
        check_not_cut(packing)
    if atoms.patches.any():
        i = int(atoms.patches.argmax())
        raise DataError(
            f'example {i} has images, which strategy="wrapped" would cut; use another strategy'
        )
    lengths_E, capacity, ends_E = atoms.tokens, packing.capacity, np.cumsum(atoms.tokens)
    total = int(ends_E[-1]) if len(ends_E) else 0
    num_rows = max(1, -(-total // capacity))
    num_rows = -(-num_rows // packing.row_multiple) * packing.row_multiple
    cuts_C = np.arange(0, total, capacity)
    examples_C, begins_E = np.searchsorted(ends_E, cuts_C, side="right"), ends_E - lengths_E
    is_inside_C = cuts_C > begins_E[examples_C]
    counts_E = np.bincount(examples_C[is_inside_C], minlength=len(lengths_E)) + 1
    examples_S = np.repeat(np.arange(len(lengths_E)), counts_E)
    is_first_S = np.zeros(len(examples_S), dtype=bool)
    is_first_S[np.cumsum(counts_E) - counts_E] = True
    bounds_S = np.empty(len(examples_S) + 1, dtype=np.int64)
    bounds_S[:-1][is_first_S], bounds_S[:-1][~is_first_S] = begins_E, cuts_C[is_inside_C]
    bounds_S[-1] = total
    ends_R = np.append(cuts_C, np.full(num_rows + 1 - len(cuts_C), total))
    offsets_R = np.searchsorted(bounds_S[:-1], ends_R)
    pieces = atoms.take(examples_S).shortened(np.diff(bounds_S), packing)
    pieces = replace(pieces, starts=pieces.starts + bounds_S[:-1] - begins_E[examples_S])
    return PackingPlan(pieces, offsets_R, packing, cut=np.flatnonzero(counts_E > 1))


def num_pieces(atoms: Atoms, packing: PackingOptions) -> Ints:
    """Count the pieces of each example that is placed: int64 [E]."""
    if packing.overflow != "split" or atoms.are_lists:
        return np.ones_like(atoms.tokens)
    return -(-atoms.tokens // _longest(atoms, packing))


def _longest(atoms: Atoms, packing: PackingOptions) -> Ints | np.int64:
    """Return the longest piece that each example may have: int64 [E], or one for all."""
    capacity = packing.capacity if packing.strategy != "wrapped" else 2**63 - 1  # cut anywhere
    if not atoms.reserved or not atoms.patches.any():
        return np.int64(capacity - atoms.reserved)
    return np.where(atoms.patches > 0, capacity, capacity - atoms.reserved)


def _split(atoms: Atoms, packing: PackingOptions, limits_E: Ints) -> Atoms:
    counts_E = num_pieces(atoms, packing)
    examples_S = np.repeat(np.arange(len(counts_E)), counts_E)
    pieces, limits_S = atoms.take(examples_S), limits_E[examples_S]
    numbers_S = np.arange(len(examples_S)) - (np.cumsum(counts_E) - counts_E)[examples_S]
    before_S = numbers_S * limits_S
    tokens_S = np.minimum(pieces.tokens - before_S, limits_S)
    return replace(pieces.shortened(tokens_S, packing), starts=pieces.starts + before_S)


def _truncated(
    atoms: Atoms, packing: PackingOptions, limits_E: Ints, with_images: Ints, cuts: Cuts | None
) -> Atoms:
    """Cut texts at the limits, and examples ``with_images`` at ``cuts``."""
    tokens_E = np.minimum(atoms.tokens, limits_E)
    if cuts is not None and len(with_images):
        kept, patches, costs = (values[with_images] for values in cuts)
        if (kept < 1).any():
            i = int(with_images[kept.argmin()])
            raise DataError(
                f"example {i} begins with an image that does not fit in a row with max_tokens="
                f"{packing.max_tokens}, max_patches={packing.max_patches}, and an image is never "
                "cut; make the image smaller, or pass overflow='drop'"
            )
        changed: dict[str, Any] = {
            "patches": atoms.patches.copy(),
            "vision_costs": atoms.vision_costs.copy(),
        }
        tokens_E[with_images] = kept
        changed["patches"][with_images], changed["vision_costs"][with_images] = patches, costs
        atoms = replace(atoms, **changed)
        longest_E, most = _longest(atoms, packing), packing.max_patches
        cut_anywhere_E = np.minimum(tokens_E, longest_E)
        tokens_E = np.where(atoms.patches > 0, tokens_E, cut_anywhere_E)
        assert (tokens_E <= longest_E).all(), "what is left of an example is longer than a row"
        assert most is None or (atoms.patches <= most).all(), "what is left has too many patches"
    return atoms.shortened(tokens_E, packing)


def check_not_cut(packing: PackingOptions) -> None:
    """Refuse to cut examples whose segments stay together."""
    name, value = "overflow", str(packing.overflow)
    if packing.strategy == "wrapped":
        name, value = "strategy", "wrapped"
    elif value in ("raise", "drop"):
        return
    raise ValueError(
        f"{name}={value!r} cuts examples, and these have several segments, which stay together: "
        'cut them when they are tokenized, and pass overflow="raise" or "drop"'
    )


def _unfit_error(unfit: Ints, atoms: Atoms, limits_E: Ints, packing: PackingOptions) -> DataError:
    """Return the error that names the first example that does not fit, and counts the others."""
    i, overflow = int(unfit[0]), packing.overflow
    limit, has_image, tokens = int(limits_E[i]), bool(atoms.patches[i] > 0), int(atoms.tokens[i])
    if atoms.are_lists:
        return _unfit_segments(i, len(unfit) - 1, atoms, limit, packing)
    if tokens > limit:
        what = (
            f"{tokens} tokens, more than the {limit} that fit in a row with max_tokens="
            f"{packing.max_tokens} and align={packing.parallel.align}"
        )
        if limit < packing.capacity:
            what += (
                f", of which {packing.reserved} are kept free for a dummy image "
                f"(dummy_image_tokens={packing.dummy_image_tokens})"
            )
        others, way_out = "too long as well", "raise max_tokens, shorten it"
        if packing.max_tokens > MOST_CELLS:
            way_out = "int32 counts the cells of a row: shorten it"
    else:
        what = (
            f"{int(atoms.patches[i])} patches of images, more than the max_patches="
            f"{packing.max_patches} of a row"
        )
        others, way_out = "too large as well", "raise max_patches, make its images smaller"
    if len(unfit) > 1:
        what += f" ({others}: {len(unfit) - 1} more)"
    if overflow == "split":
        what += "; an example with images is never split"
        choices = "'truncate' or 'drop'"
    elif overflow == "truncate":
        what += "; an image is never cut, and lengths alone do not say where images are"
        choices = "'drop'"
    else:
        choices = "'drop'" if has_image else "'truncate', 'drop' or 'split'"
    return DataError(f"example {i} has {what}; {way_out}, or pass overflow={choices}")


def _unfit_segments(
    i: int, others: int, atoms: Atoms, limit: int, packing: PackingOptions
) -> DataError:
    """Return the error for an example whose segments do not fit in one row."""
    cells, count = atoms.cells[i], atoms.segments[i]
    way_out = "raise max_tokens, cut it when tokenizing"
    what = (
        f"{plural(int(count), 'segment')} of {atoms.tokens[i]} tokens in all, {cells} cells with "
        f"align={packing.parallel.align}, more than the {limit} that fit in a row with max_tokens="
        f"{packing.max_tokens}"
    )
    if cells <= limit:
        what = f"{count} segments, more than max_sequences_per_row={packing.max_sequences_per_row}"
        way_out = "raise it, leave some out"
    what += f" ({others} more do not fit)" if others else ""
    return DataError(
        f"example {i} has {what}; its segments stay in one row: {way_out}, or pass overflow='drop'"
    )


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
        lengths: integers [E], tokens per example, each at least 1; of examples with several
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
        patches: vision patches: ints [E], 0 for an example without an image, or for each example
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
        max_tokens=max_tokens,
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
    """Return rows of some pieces of a plan, whose ``examples``, ascending, are numbered from 0."""

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
    if packing.strategy == "balanced" and limits.pieces is not None:
        return _within_slots(atoms, limits, limits.pieces)
    is_first_fit = packing.strategy == "first_fit_decreasing"
    return _fill(first_fit_decreasing if is_first_fit else best_fit_decreasing, atoms, limits)


def has_two_budgets(atoms: Atoms, limits: Limits) -> bool:
    """Check whether patches, too, may decide which pieces fit in a row."""
    is_limited = limits.reserved or limits.patches < int(atoms.patches.sum())
    return limits.patches > 0 and bool(is_limited)


def _fill(fill: Fill, atoms: Atoms, limits: Limits) -> Rows:
    if has_two_budgets(atoms, limits):
        return fill_two_budgets(fill, atoms.sizes, limits)
    return fill(atoms.cells, limits.text, limits.pieces, None)


def _within_slots(atoms: Atoms, limits: Limits, slots: int) -> Rows:
    """Return about as few rows of at most ``slots`` pieces as best fit would need without a limit.

    Best fit under the limit opens more: its last rows are full of the shortest pieces, and nearly
    empty. So pieces are dealt out evenly, to more rows only where one is overfilled.
    """
    rows = _fill(best_fit_decreasing, atoms, limits._replace(pieces=None))
    if int(rows.counts().max()) <= slots:
        return rows
    number = max(len(rows.offsets) - 1, -(-len(atoms.cells) // slots))
    enough, more = _fill(best_fit_decreasing, atoms, limits), -(-number // _FINER)
    while number < len(enough.offsets) - 1:
        if (even := dealt(atoms.sizes, number, limits)) is not None:
            return even
        number, more = number + more, 2 * more
    return enough
