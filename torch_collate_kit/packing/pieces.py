"""The pieces to place: examples and their images, refused, cut or dropped where over-long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.ma import MaskedArray

from torch_collate_kit.errors import DataError
from torch_collate_kit.packing.cost import ModelCost
from torch_collate_kit.packing.options import MOST_CELLS, PackingOptions
from torch_collate_kit.packing.plan import PackingPlan
from torch_collate_kit.packing.rows import Ints, Rows, row_sums
from torch_collate_kit.packing.runs import Runs
from torch_collate_kit.packing.segments import (
    Segments,
    check_not_cut,
    long_path,
    unfit_segments,
)

_MOST_PATCHES = 2**28 - 1  # of an image; the cost of more would not fit int64

Patches: TypeAlias = Any
"""Ints [N], or for each example the ints of its images: a list of lists, or a Ragged."""

_HINT = (
    "pass one int per example, 0 without an image, or for each example the patches of its images, "
    "such as grid.prod(axis=1)"
)


class Load(NamedTuple):
    """What examples hold: patches of images and their vision cost, int64 [N], and segments.

    ``cuts`` are the tokens, patches and cost that truncation leaves of an example: of its longest
    beginning that fits and does not end within an image, int64 [N] each. Only a collator knows
    them; without them no example with an image is cut. ``segments`` are given where every example
    is a list of them, and ``runs`` where some of these are to be cut between their segments.
    """

    patches: Ints
    costs: Ints
    cuts: tuple[Ints, Ints, Ints] | None = None
    segments: Segments | None = None
    runs: Runs | None = None

    @classmethod
    def none(cls, num_examples: int) -> Load:
        """Return zeros, for examples without images."""
        zeros = np.zeros(num_examples, dtype=np.int64)
        return cls(zeros, zeros)

    def take(self, examples: Ints) -> Load:
        """Return those of these examples, in that order, without ``cuts``. A copy."""
        segments = None if self.segments is None else self.segments.take(examples)
        runs = None if self.runs is None else self.runs.take(examples)
        taken = Load.none(len(examples))
        if self.patches.any():
            taken = Load(self.patches[examples], self.costs[examples])
        return taken._replace(segments=segments, runs=runs)

    def with_cuts(self, lengths: Ints, patches: Patches, cost: ModelCost) -> Load:
        """Add the tokens, int64 [N], and the patches that truncation leaves."""
        left = image_load(patches, len(self.patches), cost)
        return self._replace(cuts=(lengths, left.patches, left.costs))


def image_load(patches: Patches | Load, num_examples: int, cost: ModelCost) -> Load:
    """Return checked ``patches`` of the examples with their cost; a Load as it is."""
    if isinstance(patches, Load):
        return patches
    values, offsets = _patches_of_images(patches)
    number = len(values if offsets is None else offsets[1:])
    if number != num_examples:
        raise ValueError(
            f"patches has {number} entries, but there are {num_examples} examples; {_HINT}"
        )
    values = _checked_patches(values, offsets)
    costs = cost.vision(values)
    if offsets is None:
        return Load(values, costs)
    return Load(row_sums(values, offsets), row_sums(costs, offsets))


def _patches_of_images(patches: Any) -> tuple[npt.NDArray[Any], Ints | None]:
    """Return the patches of all images, and each example's offset; None: one per example."""
    kinds = set(map(type, patches)) if isinstance(patches, Sequence) else {type(patches)}
    if MaskedArray in kinds:
        raise TypeError("patches are a masked array, whose mask would be lost; pass .compressed()")
    if hasattr(patches, "offsets"):  # a Ragged
        values, offsets = np.asarray(patches.values), patches.offsets
    elif isinstance(patches, Sequence) and not _are_ints(kinds):
        for i, entry in enumerate(patches):
            if np.ndim(entry) != 1:
                raise TypeError(
                    f"patches of example {i} are {entry!r:.40}, neither an int nor a list of the "
                    f"patches of its images, as those of other examples; {_HINT}"
                )
        arrays = [np.asarray(entry) for entry in patches if len(entry)]
        values = np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)
        offsets = np.cumsum([0, *map(len, patches)])
    else:
        values, offsets = np.asarray(patches), None
    if values.ndim != 1:
        raise ValueError(f"patches must be 1-D, got shape {values.shape}; {_HINT}")
    return values, offsets


def _are_ints(kinds: set[type]) -> bool:
    return bool not in kinds and all(issubclass(kind, int | np.integer) for kind in kinds)


def _checked_patches(values: npt.NDArray[Any], offsets: Ints | None) -> Ints:
    if not len(values):
        return np.zeros(0, dtype=np.int64)
    if values.dtype.kind not in "iu":
        raise TypeError(f"patches must be integers, got dtype {values.dtype}; {_HINT}")
    least = 0 if offsets is None else 1  # an image has patches
    wrong = (values < least) | (values > _MOST_PATCHES)
    if wrong.any():
        image = int(wrong.argmax())
        example, what = image, "has"
        if offsets is not None:
            example = int(np.searchsorted(offsets, image, side="right")) - 1
            what = "has an image of"
        raise DataError(
            f"example {example} {what} {values[image]} patches, but they must be {least} to "
            f"{_MOST_PATCHES}; {_HINT}"
        )
    return values.astype(np.int64, copy=False)


def cut_to_fit(lengths: Ints, packing: PackingOptions, load: Load | None = None) -> PackingPlan:
    """Return the pieces of examples of these lengths, int64 [N], and load: one in each row."""
    most, overflow, given = _longest(packing, load), packing.overflow, load
    if load is None:
        load = Load.none(len(lengths))
    if load.segments is None:
        does_not_fit = lengths > most
    else:
        check_not_cut(packing)
        does_not_fit = load.segments.cells > most
        if packing.max_sequences_per_row is not None:
            does_not_fit |= load.segments.counts > packing.max_sequences_per_row
    if packing.max_patches is not None:
        does_not_fit = does_not_fit | (load.patches > packing.max_patches)
    whole = _whole_examples(lengths, packing, load)
    too_long = np.flatnonzero(does_not_fit)
    if not len(too_long):
        return whole
    limits = np.broadcast_to(most, lengths.shape)
    if overflow == "drop":
        kept = np.delete(whole.example_indices, too_long)
        lost = int(lengths[too_long].sum())
        return replace(_one_in_each_row(whole, kept), dropped=too_long, num_dropped_tokens=lost)
    with_images = too_long[load.patches[too_long] > 0]
    if overflow == "raise" or (len(with_images) and (overflow == "split" or load.cuts is None)):
        unfit = too_long if overflow == "raise" else with_images
        raise _unfit_error(unfit, lengths, limits, packing, load)
    if overflow == "truncate":
        shortened = np.minimum(lengths, limits)
        if len(with_images):
            shortened, load = _cut_before_images(shortened, with_images, packing, load)
        lost = int((lengths - shortened).sum())
        whole = _whole_examples(shortened, packing, load)
        return replace(whole, cut=too_long, num_cut_tokens=lost)
    if load.segments is not None:
        return _runs_in_rows(whole, too_long, packing, load)
    counts = num_pieces(lengths, packing, given)
    split = _one_in_each_row(whole, np.repeat(whole.example_indices, counts))
    limit = limits[split.example_indices]
    first_piece = np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.arange(len(limit)) - first_piece) * limit
    return replace(
        split, starts=starts, lengths=np.minimum(split.lengths - starts, limit), cut=too_long
    )


def _runs_in_rows(
    whole: PackingPlan, too_long: Ints, packing: PackingOptions, load: Load
) -> PackingPlan:
    """Return the runs of examples that are cut between their segments."""
    runs, limit = load.runs, packing.capacity - packing.reserved
    assert runs is not None, "trees are cut where their tokens are known"
    counts = np.diff(runs.offsets)
    examples = np.repeat(whole.example_indices, counts)
    unfit = np.flatnonzero(runs.segments.cells > limit)
    if len(unfit):
        run, i = int(unfit[0]), int(examples[unfit[0]])
        before = runs.segments.counts[runs.offsets[i] : run]
        raise long_path(i, int(before.sum()), int(runs.lengths[run]), len(unfit) - 1, packing)
    split = whole.in_rows(Rows(examples, np.arange(len(examples) + 1)))
    return replace(
        split, starts=runs.starts, lengths=runs.lengths, cut=too_long, runs=runs.segments
    )


def wrapped_pieces(lengths: Ints, packing: PackingOptions, load: Load | None = None) -> PackingPlan:
    """Return the pieces of documents joined end to end, in rows cut at exactly ``max_tokens``.

    The last row may be shorter; empty rows follow up to a multiple of the ranks.
    """
    if load is not None and load.segments is not None:
        check_not_cut(packing)
    if load is not None and load.patches.any():
        i = int(load.patches.argmax())
        raise DataError(
            f'example {i} has images, which strategy="wrapped" would cut; use another strategy'
        )
    capacity, ends = packing.capacity, np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    num_rows = max(1, -(-total // capacity))
    num_rows = -(-num_rows // packing.row_multiple) * packing.row_multiple
    cuts = np.arange(0, total, capacity)
    of_cuts, begins = np.searchsorted(ends, cuts, side="right"), ends - lengths
    is_inside = cuts > begins[of_cuts]
    counts = np.bincount(of_cuts[is_inside], minlength=len(lengths)) + 1
    examples = np.repeat(np.arange(len(lengths)), counts)
    is_first = np.zeros(len(examples), dtype=bool)
    is_first[np.cumsum(counts) - counts] = True
    bounds = np.empty(len(examples) + 1, dtype=np.int64)
    bounds[:-1][is_first], bounds[:-1][~is_first], bounds[-1] = begins, cuts[is_inside], total
    rows = np.searchsorted(bounds[:-1], np.append(cuts, np.full(num_rows + 1 - len(cuts), total)))
    whole = _whole_examples(lengths, packing, Load.none(len(lengths)))
    pieces = whole.in_rows(Rows(examples, rows))
    return replace(
        pieces,
        starts=bounds[:-1] - begins[examples],
        lengths=np.diff(bounds),
        cut=np.flatnonzero(counts > 1),
    )


def _whole_examples(lengths: Ints, packing: PackingOptions, load: Load) -> PackingPlan:
    """Return a plan with every example in a row of its own."""
    none, numbers = np.zeros(0, dtype=np.int64), np.arange(len(lengths) + 1)
    return PackingPlan(
        example_indices=numbers[:-1],
        starts=np.zeros_like(lengths),
        lengths=lengths,
        row_offsets=numbers,
        max_tokens=packing.max_tokens,
        align=packing.parallel.align,
        row_align=packing.parallel.row_align,
        rows_multiple_of=1,
        dropped=none,
        cut=none,
        num_cut_tokens=0,
        num_dropped_tokens=0,
        patches=load.patches,
        vision_costs=load.costs,
        max_patches=packing.max_patches,
        dummy_image_tokens=packing.dummy_image_tokens,
        cost=packing.cost,
        segments=load.segments,
    )


def _one_in_each_row(plan: PackingPlan, pieces: Ints) -> PackingPlan:
    return plan.in_rows(Rows(pieces, np.arange(len(pieces) + 1)))


def num_pieces(lengths: Ints, packing: PackingOptions, load: Load | None = None) -> Ints:
    """Count the pieces of each example that is placed: int64 [N]."""
    if load is not None and load.runs is not None:
        return np.diff(load.runs.offsets)
    is_whole = load is not None and load.segments is not None
    if packing.overflow != "split" or is_whole:
        return np.ones_like(lengths)
    return -(-lengths // _longest(packing, load))


def _longest(packing: PackingOptions, load: Load | None) -> Ints | np.int64:
    """Return the longest piece that each example may have: int64 [N], or one for all."""
    capacity = packing.capacity if packing.strategy != "wrapped" else 2**63 - 1  # cut anywhere
    if load is None:
        return np.int64(capacity)
    if not load.patches.any():
        return np.int64(capacity - packing.reserved)
    return np.where(load.patches > 0, capacity, capacity - packing.reserved)


def _cut_before_images(
    lengths: Ints, examples: Ints, packing: PackingOptions, load: Load
) -> tuple[Ints, Load]:
    """Cut these ``examples`` as ``load.cuts`` says; return the lengths and the load of all."""
    assert load.cuts is not None
    lengths, patches, costs = lengths.copy(), load.patches.copy(), load.costs.copy()
    kept, patches[examples], costs[examples] = (values[examples] for values in load.cuts)
    if (kept < 1).any():
        i = int(examples[kept.argmin()])
        raise DataError(
            f"example {i} begins with an image that does not fit in a row with max_tokens="
            f"{packing.max_tokens}, max_patches={packing.max_patches}, and an image is never cut; "
            "make the image smaller, or pass overflow='drop'"
        )
    left = Load(patches, costs)
    lengths[examples] = kept
    limits = _longest(packing, left)
    lengths = np.where(patches > 0, lengths, np.minimum(lengths, limits))  # text is cut anywhere
    most = packing.max_patches
    assert (lengths <= limits).all(), "what is left of an example is longer than a row"
    assert most is None or (patches <= most).all(), "what is left has too many patches for a row"
    return lengths, left


def _unfit_error(
    unfit: Ints, lengths: Ints, limits: Ints, packing: PackingOptions, load: Load
) -> DataError:
    """Return the error that names the first example that does not fit, and counts the others."""
    i, overflow = int(unfit[0]), packing.overflow
    limit, has_image = int(limits[i]), bool(load.patches[i] > 0)
    segments = load.segments
    if segments is not None:
        return unfit_segments(i, len(unfit) - 1, lengths, limit, packing, segments)
    if lengths[i] > limit:
        what = (
            f"{int(lengths[i])} tokens, more than the {limit} that fit in a row with max_tokens="
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
            f"{int(load.patches[i])} patches of images, more than the max_patches="
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
