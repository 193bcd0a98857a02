"""Over-long examples are refused, cut or dropped here, and nowhere else."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_collate_kit.errors import DataError
from torch_collate_kit.packing.images import ImageLoad
from torch_collate_kit.packing.options import PackingOptions
from torch_collate_kit.packing.rows import Ints

__all__ = ["FittedPieces", "cut_to_fit", "num_pieces"]


class FittedPieces(NamedTuple):
    """Examples, or parts of them, each at most a row long, in example order."""

    example_indices: Ints
    starts: Ints
    lengths: Ints
    images: ImageLoad
    """Of each piece."""
    dropped: Ints
    cut: Ints
    num_cut_tokens: int = 0
    num_dropped_tokens: int = 0

    def take(self, pieces: Ints) -> FittedPieces:
        """These pieces, in that order. A copy."""
        return self._replace(
            example_indices=self.example_indices[pieces],
            starts=self.starts[pieces],
            lengths=self.lengths[pieces],
            images=self.images.take(pieces),
        )


def cut_to_fit(
    lengths: Ints, packing: PackingOptions, images: ImageLoad | None = None
) -> FittedPieces:
    """The pieces to place of examples of these lengths, int64 [N], and images.

    An example without an image may be as long as a row less what is reserved for a dummy image. An
    example with an image is cut only where ``images.cuts`` says, and never split.

    Raises:
        DataError: an example that does not fit in a row, with ``overflow="raise"``, or with images.

    >>> cut_to_fit(np.array([3, 5]), PackingOptions(3, overflow="split")).starts.tolist()
    [0, 0, 3]
    """
    most, overflow = _longest(packing, images), packing.overflow
    does_not_fit = lengths > most
    if images is None:
        images = ImageLoad.none(len(lengths))
    elif packing.max_patches is not None:
        does_not_fit = does_not_fit | (images.patches > packing.max_patches)
    none = np.zeros(0, dtype=np.int64)
    whole = FittedPieces(
        np.arange(len(lengths)), np.zeros_like(lengths), lengths, images, dropped=none, cut=none
    )
    too_long = np.flatnonzero(does_not_fit)
    if not len(too_long):
        return whole
    limits = np.broadcast_to(most, lengths.shape)
    if overflow == "drop":
        kept = whole.take(np.delete(whole.example_indices, too_long))
        lost = int(lengths[too_long].sum())
        return kept._replace(dropped=too_long, num_dropped_tokens=lost)
    with_images = too_long[images.patches[too_long] > 0]
    if overflow == "raise" or (len(with_images) and (overflow == "split" or images.cuts is None)):
        unfit = too_long if overflow == "raise" else with_images
        raise _error(unfit, lengths, limits, packing, images)
    if overflow == "truncate":
        shortened = np.minimum(lengths, limits)
        if len(with_images):
            shortened, images = _cut_before_images(shortened, with_images, packing, images)
        lost = int((lengths - shortened).sum())
        return whole._replace(lengths=shortened, images=images, cut=too_long, num_cut_tokens=lost)
    counts = num_pieces(lengths, packing, images)
    split = whole.take(np.repeat(whole.example_indices, counts))
    limit = limits[split.example_indices]
    first_piece = np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.arange(len(limit)) - first_piece) * limit
    return split._replace(
        starts=starts, lengths=np.minimum(split.lengths - starts, limit), cut=too_long
    )


def num_pieces(lengths: Ints, packing: PackingOptions, images: ImageLoad | None = None) -> Ints:
    """How many pieces of examples are placed, of those that are: int64 [N].

    >>> num_pieces(np.array([3, 5]), PackingOptions(3, overflow="split")).tolist()
    [1, 2]
    """
    if packing.overflow != "split":
        return np.ones_like(lengths)
    return -(-lengths // _longest(packing, images))


def _longest(packing: PackingOptions, images: ImageLoad | None) -> Ints | np.int64:
    """The longest piece of each example: int64 [N], or without images one for all."""
    capacity = min(packing.capacity, 2**63 - 1)
    if images is None:
        return np.int64(capacity)
    return np.where(images.patches > 0, capacity, capacity - packing.reserved)


def _cut_before_images(
    lengths: Ints, examples: Ints, packing: PackingOptions, images: ImageLoad
) -> tuple[Ints, ImageLoad]:
    """The lengths of all, and their images, with these ``examples`` cut as ``images.cuts`` says."""
    assert images.cuts is not None
    lengths, patches, costs = lengths.copy(), images.patches.copy(), images.costs.copy()
    kept, patches[examples], costs[examples] = (values[examples] for values in images.cuts)
    if (kept < 1).any():
        i = int(examples[kept.argmin()])
        raise DataError(
            f"example {i} begins with an image that does not fit in a row with max_tokens="
            f"{packing.max_tokens}, max_patches={packing.max_patches}, and an image is never cut; "
            "make the image smaller, or pass overflow='drop'"
        )
    left = ImageLoad(patches, costs)
    lengths[examples] = kept
    limits = _longest(packing, left)
    lengths = np.where(patches > 0, lengths, np.minimum(lengths, limits))  # text is cut anywhere
    most = packing.max_patches
    assert (lengths <= limits).all(), "what is left of an example is longer than a row"
    assert most is None or (patches <= most).all(), "what is left has too many patches for a row"
    return lengths, left


def _error(
    unfit: Ints, lengths: Ints, limits: Ints, packing: PackingOptions, images: ImageLoad
) -> DataError:
    """What is wrong with the first of the examples that do not fit, and how many others do not."""
    i, overflow = int(unfit[0]), packing.overflow
    limit, has_image = int(limits[i]), bool(images.patches[i] > 0)
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
    else:
        what = (
            f"{int(images.patches[i])} patches of images, more than the max_patches="
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
