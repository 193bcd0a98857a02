"""What fits in a row: examples are refused, cut or dropped where they are larger."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from torch_collate_kit._reprs import plural
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing.atoms import Atoms
from torch_collate_kit.packing.options import MOST_CELLS, PackingOptions
from torch_collate_kit.packing.plan import PackingPlan
from torch_collate_kit.packing.rows import Ints

Cuts: TypeAlias = tuple[Ints, Ints, Ints]
"""Tokens, patches and vision cost that truncation leaves of an example: of its longest beginning
that fits and does not end within an image, int64 [N] each. Only a collator knows them."""


def fitted(atoms: Atoms, packing: PackingOptions, cuts: Cuts | None = None) -> PackingPlan:
    """Return what is placed of the examples, one atom in each row.

    Without ``cuts`` no example with an image is cut.
    """
    if atoms.are_lists:
        check_not_cut(packing)
    limits, overflow = _longest(atoms, packing), packing.overflow
    does_not_fit = (atoms.cells if atoms.are_lists else atoms.tokens) > limits
    if packing.max_sequences_per_row is not None:
        does_not_fit |= atoms.segments > packing.max_sequences_per_row
    if packing.max_patches is not None:
        does_not_fit |= atoms.patches > packing.max_patches
    too_long, placed, others = np.flatnonzero(does_not_fit), atoms, dict[str, Any]()
    if len(too_long) and overflow == "drop":
        placed = atoms.take(np.flatnonzero(~does_not_fit))
        others = {"left_out": atoms.take(too_long)}
    elif len(too_long):
        limits = np.broadcast_to(limits, atoms.tokens.shape)
        with_images = too_long[atoms.patches[too_long] > 0]
        if overflow == "raise" or (len(with_images) and (overflow == "split" or cuts is None)):
            unfit = too_long if overflow == "raise" else with_images
            raise _unfit_error(unfit, atoms, limits, packing)
        if overflow == "split":
            placed = _split(atoms, packing, limits)
        else:
            placed = _truncated(atoms, packing, limits, with_images, cuts)
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
    lengths, capacity, ends = atoms.tokens, packing.capacity, np.cumsum(atoms.tokens)
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
    pieces = atoms.take(examples).shortened(np.diff(bounds), packing)
    pieces = replace(pieces, starts=pieces.starts + bounds[:-1] - begins[examples])
    return PackingPlan(pieces, rows, packing, cut=np.flatnonzero(counts > 1))


def num_pieces(atoms: Atoms, packing: PackingOptions) -> Ints:
    """Count the pieces of each example that is placed: int64 [N]."""
    if packing.overflow != "split" or atoms.are_lists:
        return np.ones_like(atoms.tokens)
    return -(-atoms.tokens // _longest(atoms, packing))


def _longest(atoms: Atoms, packing: PackingOptions) -> Ints | np.int64:
    """Return the longest piece that each example may have: int64 [N], or one for all."""
    capacity = packing.capacity if packing.strategy != "wrapped" else 2**63 - 1  # cut anywhere
    if not atoms.reserved or not atoms.patches.any():
        return np.int64(capacity - atoms.reserved)
    return np.where(atoms.patches > 0, capacity, capacity - atoms.reserved)


def _split(atoms: Atoms, packing: PackingOptions, limits: Ints) -> Atoms:
    counts = num_pieces(atoms, packing)
    numbers = np.repeat(np.arange(len(counts)), counts)
    pieces, limits = atoms.take(numbers), limits[numbers]
    before = (np.arange(len(numbers)) - (np.cumsum(counts) - counts)[numbers]) * limits
    tokens = np.minimum(pieces.tokens - before, limits)
    return replace(pieces.shortened(tokens, packing), starts=pieces.starts + before)


def _truncated(
    atoms: Atoms, packing: PackingOptions, limits: Ints, with_images: Ints, cuts: Cuts | None
) -> Atoms:
    """Cut texts at the limits, and the examples ``with_images`` as ``cuts`` says."""
    tokens = np.minimum(atoms.tokens, limits)
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
        tokens[with_images] = kept
        changed["patches"][with_images], changed["vision_costs"][with_images] = patches, costs
        atoms = replace(atoms, **changed)
        longest, most = _longest(atoms, packing), packing.max_patches
        tokens = np.where(atoms.patches > 0, tokens, np.minimum(tokens, longest))  # cut anywhere
        assert (tokens <= longest).all(), "what is left of an example is longer than a row"
        assert most is None or (atoms.patches <= most).all(), "what is left has too many patches"
    return atoms.shortened(tokens, packing)


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


def _unfit_error(unfit: Ints, atoms: Atoms, limits: Ints, packing: PackingOptions) -> DataError:
    """Return the error that names the first example that does not fit, and counts the others."""
    i, overflow = int(unfit[0]), packing.overflow
    limit, has_image, tokens = int(limits[i]), bool(atoms.patches[i] > 0), int(atoms.tokens[i])
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
