"""Atoms: what packing places as a whole, an example with all its segments or a piece of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.ma import MaskedArray

from torch_collate_kit._checks import checked_lengths
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing.options import ModelCost, PackingOptions
from torch_collate_kit.packing.rows import Ints, Sizes, row_sums

_MOST_PATCHES = 2**28 - 1  # of an image; the cost of more would not fit int64
_ZEROS, _ONES = (np.broadcast_to(np.int64(number), 1 << 48) for number in (0, 1))  # no memory

Patches: TypeAlias = Any
"""Ints [E], or for each example the ints of its images: a list of lists, or a Ragged."""

_HINT = (
    "pass one int per example, 0 without an image, or for each example the patches of its images, "
    "such as grid.prod(axis=1)"
)


@dataclass(frozen=True, eq=False, repr=False)
class Atoms:
    """Examples, or pieces of them, each of which is placed as a whole: columns int64 [S].

    Read-only: two columns may be one array, and a column of one number takes no memory.
    """

    examples: Ints  # example of each atom, numbered from 0
    starts: Ints  # its first token there; non-zero only after a split
    tokens: Ints  # its tokens, padding not counted
    cells: Ints  # cells it occupies: each segment, or the tree of all, rounded up to the alignment
    costs: Ints  # its cost in the language model
    segments: Ints  # its segments; 1 unless examples are lists of them
    patches: Ints  # patches of its images
    vision_costs: Ints  # cost of its images in the vision tower
    are_lists: bool = False  # whether examples are lists of segments, which are never cut
    share: bool = False  # whether the segments of an example share prefixes
    reserved: int = 0
    """Cells that a row without an image keeps free: 0 where no example of the run has one."""

    @classmethod
    def of(
        cls,
        lengths: Ints,
        offsets: Ints | None,
        packing: PackingOptions,
        patches: Patches | None = None,
        *,
        depths: Ints | None = None,
    ) -> Atoms:
        """Return an atom for each example.

        Args:
            lengths: int64 [E], checked; of examples that are lists those of all segments [Q].
            offsets: int64 [E + 1], the first segment of each example; None: they are not lists.
            packing: its alignment, cost and reserved cells count.
            patches: patches of the images; None where no example of the run has one.
            depths: int64 [Q], the tokens that each segment shares, if prefixes are shared.
        """
        align, cost = packing.parallel.align, packing.cost
        number = len(lengths) if offsets is None else len(offsets) - 1
        segments_E = _ONES[:number]
        tokens_E, cells_E = lengths, aligned(lengths, align)
        if offsets is None:
            costs_E = cost.language(cells_E)
        elif depths is None:
            segments_E, tokens_E = offsets[1:] - offsets[:-1], _sums(lengths, offsets)
            costs_E = _sums(cost.language(cells_E), offsets)
            cells_E = tokens_E if align == 1 else _sums(cells_E, offsets)
        else:  # a token attends to its path, so own ones cost what they add to that
            segments_E, tokens_E = offsets[1:] - offsets[:-1], _sums(lengths, offsets)
            costs_E = _sums(cost.language(lengths) - cost.language(depths), offsets)
            cells_E = aligned(_sums(lengths - depths, offsets), align)
        images = _ZEROS[:number], _ZEROS[:number]
        if patches is not None:
            images = image_sizes(patches, number, cost)
        return cls(
            np.arange(number),
            _ZEROS[:number],
            tokens_E,
            cells_E,
            costs_E,
            segments_E,
            *images,
            are_lists=offsets is not None,
            share=depths is not None,
            reserved=0 if patches is None and offsets is None else packing.reserved,
        )

    def take(self, order: Ints) -> Atoms:
        """Return these atoms, in that order. A copy."""
        columns, copies = vars(self).copy(), dict[int, Ints]()
        for name in _COLUMNS:
            column = columns[name]
            if id(column) not in copies:
                copies[id(column)] = _taken(column, order)
            columns[name] = copies[id(column)]
        taken = object.__new__(Atoms)  # dataclasses.replace takes as long as the arrays
        vars(taken).update(columns)
        return taken

    def alone(self, numbers: Ints) -> Atoms:
        """Return some of these atoms as examples of their own, numbered from 0."""
        return replace(self.take(numbers), examples=np.arange(len(numbers)))

    @classmethod
    def joined(cls, parts: Sequence[Atoms], examples: Sequence[Ints]) -> Atoms:
        """Return the atoms of all parts, whose examples are numbers of these ``examples``."""
        joined: dict[str, Any] = {
            name: np.concatenate([vars(part)[name] for part in parts]) for name in _COLUMNS
        }
        numbers = [given[part.examples] for part, given in zip(parts, examples, strict=True)]
        return replace(parts[0], **joined | {"examples": np.concatenate(numbers)})

    def shortened(self, tokens: Ints, packing: PackingOptions) -> Atoms:
        """Return the first ``tokens`` of each atom; these are not lists."""
        cells = aligned(tokens, packing.parallel.align)
        return replace(self, tokens=tokens, cells=cells, costs=packing.cost.language(cells))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, in which a column of one number is that number."""
        columns = {k: v for k, v in vars(self).items() if k in _COLUMNS and len(v)}
        once = {k: int(v[0]) for k, v in columns.items() if v.strides == (0,)}
        return vars(self) | once

    def __setstate__(self, state: dict[str, Any]) -> None:
        number = len(state["tokens"])
        columns = {
            k: np.broadcast_to(np.int64(state[k]), number)
            for k in _COLUMNS
            if np.ndim(state[k]) == 0
        }
        vars(self).update(state | columns)

    @property
    def sizes(self) -> Sizes:
        """Cells and patches of each atom."""
        return self.cells, self.patches


_COLUMNS = tuple(field.name for field in fields(Atoms) if field.type == "Ints")
NO_INTS = np.zeros(0, dtype=np.int64)
NO_ATOMS = Atoms(*(NO_INTS,) * 8)


def aligned(lengths: Ints, align: int) -> Ints:
    """Round lengths up to a multiple of ``align``."""
    return lengths if align == 1 else -(-lengths // align) * align


def _taken(column: Ints, order: Ints) -> Ints:
    if column.strides != (0,):
        return column[order]
    if len(order) <= len(column):
        return column[: len(order)]
    return np.broadcast_to(column[:1], len(order))


def _sums(values: Ints, offsets: Ints) -> Ints:
    """Sum the values of each example, from its offset on: int64 [E]; pairs the fastest."""
    if len(values) == 2 * len(offsets) - 2 and (offsets[1:] - offsets[:-1] == 2).all():
        return values[::2] + values[1::2]
    return row_sums(values, offsets)


def are_nested(lengths: Any) -> bool:
    """Return whether there is a row of lengths for each example: a Ragged, or lists in a list."""
    if isinstance(getattr(lengths, "offsets", None), np.ndarray):
        return True
    is_list = isinstance(lengths, list | tuple) and len(lengths) > 0
    return is_list and isinstance(lengths[0], list | tuple | np.ndarray) and np.ndim(lengths[0]) > 0


def checked_sizes(lengths: Any) -> tuple[Ints, Ints | None]:
    """Return checked lengths, int64, and the offsets of examples; None if they are not nested."""
    if not are_nested(lengths):
        return checked_lengths(lengths), None
    if hasattr(lengths, "offsets"):
        values, offsets = np.asarray(lengths.values), lengths.offsets
    else:
        values, offsets = _joined(
            lengths,
            "lengths[{}] is {}, and others are lists with a length for each segment; give every "
            "example a list, of one number where it has one segment",
        )
    if (is_empty := offsets[1:] <= offsets[:-1]).any():
        raise DataError(
            f"example {int(is_empty.argmax())} has no segment, and must have at least one; remove "
            "it"
        )
    try:
        return checked_lengths(values), offsets
    except DataError:
        wrong = np.flatnonzero(values < 1)
        if not len(wrong):
            raise
        example, segment = place_of(int(wrong[0]), offsets)
        raise DataError(
            f"example {example}, segment {segment} has length {values[wrong[0]]}, but a length "
            "must be at least 1; remove empty examples before packing"
        ) from None


def _joined(rows: Sequence[Any], message: str) -> tuple[npt.NDArray[Any], Ints]:
    """Return the numbers of all lists, and their offsets; TypeError for what is not a list."""
    for i, row in enumerate(rows):
        if np.ndim(row) != 1:
            raise TypeError(message.format(i, f"{row!r:.40}"))
    arrays = [np.asarray(row) for row in rows if len(row)]
    return np.concatenate(arrays) if arrays else NO_INTS, np.cumsum([0, *map(len, rows)])


def place_of(segment: int, offsets: npt.NDArray[np.integer]) -> tuple[int, int]:
    """Return the example of a segment, counted over all, and its number there."""
    example = int(np.searchsorted(offsets, segment, side="right")) - 1
    return example, segment - int(offsets[example])


def image_sizes(patches: Patches, num_examples: int, cost: ModelCost) -> Sizes:
    """Return the patches of the images of each example, checked, and their cost: int64 [E]."""
    values, offsets = _patches_of_images(patches)
    number = len(values if offsets is None else offsets[1:])
    if number != num_examples:
        raise ValueError(
            f"patches has {number} entries, but there are {num_examples} examples; {_HINT}"
        )
    values = _checked_patches(values, offsets)
    costs = cost.vision(values)
    if offsets is None:
        return values, costs
    return row_sums(values, offsets), row_sums(costs, offsets)


def _patches_of_images(patches: Any) -> tuple[npt.NDArray[Any], Ints | None]:
    """Return the patches of all images, and the offsets of examples; None: one per example."""
    kinds = set(map(type, patches)) if isinstance(patches, Sequence) else {type(patches)}
    if MaskedArray in kinds:
        raise TypeError("patches are a masked array, whose mask would be lost; pass .compressed()")
    if hasattr(patches, "offsets"):  # a Ragged
        values, offsets = np.asarray(patches.values), patches.offsets
    elif isinstance(patches, Sequence) and not _are_ints(kinds):
        values, offsets = _joined(
            patches,
            "patches of example {} are {}, neither an int nor a list of the patches of its images, "
            f"as those of other examples; {_HINT}",
        )
    else:
        values, offsets = np.asarray(patches), None
    if values.ndim != 1:
        raise ValueError(f"patches must be 1-D, got shape {values.shape}; {_HINT}")
    return values, offsets


def _are_ints(kinds: set[type]) -> bool:
    return bool not in kinds and all(issubclass(kind, int | np.integer) for kind in kinds)


def _checked_patches(values: npt.NDArray[Any], offsets: Ints | None) -> Ints:
    if not len(values):
        return NO_INTS
    if values.dtype.kind not in "iu":
        raise TypeError(f"patches must be integers, got dtype {values.dtype}; {_HINT}")
    least = 0 if offsets is None else 1  # an image has patches
    wrong = (values < least) | (values > _MOST_PATCHES)
    if wrong.any():
        image = int(wrong.argmax())
        example, what = image, "has"
        if offsets is not None:
            example, what = place_of(image, offsets)[0], "has an image of"
        raise DataError(
            f"example {example} {what} {values[image]} patches, but they must be {least} to "
            f"{_MOST_PATCHES}; {_HINT}"
        )
    return values.astype(np.int64, copy=False)
