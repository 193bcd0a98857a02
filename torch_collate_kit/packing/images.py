"""The images of examples, as a planner sees them: patches, and what these cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from torch_collate_kit.errors import DataError
from torch_collate_kit.packing.cost import ModelCost
from torch_collate_kit.packing.rows import Ints, row_sums

__all__ = ["ImageLoad", "Patches", "image_load"]

_MOST_PATCHES = 2**28 - 1  # of an image; the cost of more would not fit int64

Patches: TypeAlias = Any
"""Ints [N], or for each example the ints of its images: a list of lists, or a Ragged."""

_HINT = (
    "pass one int per example, 0 without an image, or for each example the patches of its images, "
    "such as grid.prod(axis=1)"
)


class ImageLoad(NamedTuple):
    """Patches and vision cost of each example: int64 [N].

    ``cuts`` says what is left of an example that is truncated: tokens, patches and cost of its
    longest beginning that fits and does not end within an image, int64 [N] each. It is made by
    who knows the tokens; without it no example with an image is cut.
    """

    patches: Ints
    costs: Ints
    cuts: tuple[Ints, Ints, Ints] | None = None

    @classmethod
    def none(cls, num_examples: int) -> ImageLoad:
        """Of examples without images."""
        zeros = np.zeros(num_examples, dtype=np.int64)
        return cls(zeros, zeros)

    def take(self, examples: Ints) -> ImageLoad:
        """Of these examples, in that order, without ``cuts``. A copy."""
        if not self.patches.any():
            return ImageLoad.none(len(examples))  # zeros that take no memory
        return ImageLoad(self.patches[examples], self.costs[examples])

    def with_cuts(self, lengths: Ints, patches: Patches, cost: ModelCost) -> ImageLoad:
        """With the tokens, int64 [N], and the patches that truncation may leave."""
        left = image_load(patches, len(self.patches), cost)
        return self._replace(cuts=(lengths, left.patches, left.costs))


def image_load(patches: Patches | ImageLoad, num_examples: int, cost: ModelCost) -> ImageLoad:
    """``patches`` of the examples, checked, with their cost. An ImageLoad is returned as it is.

    An int per example counts as one image. Not modified; may be a view of it.

    Raises:
        DataError: a number below 0 (below 1 of one image), or too large for int64.
        TypeError, ValueError: no ints, or not one entry per example.

    >>> cost = ModelCost(vision_linear=10, vision_quadratic=1)
    >>> image_load([[4, 4], [], [6]], 3, cost)
    ImageLoad(patches=array([8, 0, 6]), costs=array([112,   0,  96]), cuts=None)
    """
    if isinstance(patches, ImageLoad):
        return patches
    values, offsets = _joined(patches)
    number = len(values if offsets is None else offsets[1:])
    if number != num_examples:
        raise ValueError(
            f"patches has {number} entries, but there are {num_examples} examples; {_HINT}"
        )
    values = _checked(values, offsets)
    costs = cost.vision(values)
    if offsets is None:
        return ImageLoad(values, costs)
    return ImageLoad(row_sums(values, offsets), row_sums(costs, offsets))


def _joined(patches: Any) -> tuple[npt.NDArray[Any], Ints | None]:
    """The patches of all images, and where those of each example begin; None: one of each."""
    kinds = set(map(type, patches)) if isinstance(patches, Sequence) else {type(patches)}
    if np.ma.MaskedArray in kinds:
        raise TypeError("patches are a masked array, whose mask would be lost; pass .compressed()")
    if hasattr(patches, "offsets"):  # a Ragged
        values, offsets = np.asarray(patches.flat_values), patches.offsets - patches.offsets[0]
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


def _checked(values: npt.NDArray[Any], offsets: Ints | None) -> Ints:
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
