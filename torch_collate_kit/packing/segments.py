"""Examples of several segments, such as the two sides of a pair: what they take in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import checked_lengths
from torch_collate_kit._reprs import plural
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing.cost import ModelCost
from torch_collate_kit.packing.options import PackingOptions
from torch_collate_kit.packing.rows import Ints, row_sums, running_sum


class Segments:
    """What the segments of each example take together in one row: int64 [N] each.

    ``cells`` count each segment rounded up to the alignment, or with ``shares`` what is left of the
    tree of all; ``counts`` are their numbers, and ``costs`` those in the language model, which are
    computed when they are first needed.
    """

    def __init__(
        self,
        cells: Ints,
        counts: Ints,
        costs: Ints | tuple[Ints, ModelCost],
        *,
        shares: bool = False,
    ) -> None:
        self.cells, self.counts, self._costs, self.shares = cells, counts, costs, shares

    @classmethod
    def of(cls, values: Ints, offsets: Ints, align: int, cost: ModelCost) -> Segments:
        """Return those of examples i with the segment lengths ``values[offsets[i:i + 2]]``."""
        aligned = -(-values // align) * align if align > 1 else values
        return cls(sums_of(aligned, offsets), np.diff(offsets), (aligned, cost))

    @classmethod
    def of_trees(
        cls, values: Ints, offsets: Ints, depths: Ints, align: int, cost: ModelCost
    ) -> Segments:
        """Return those of examples that share prefixes; a tree is aligned as a whole.

        ``depths`` int64 [Q] are the tokens that each segment shares. A token attends to its path,
        so the own ones of a segment cost what they add to that.
        """
        cells = -(-sums_of(values - depths, offsets) // align) * align
        costs = cost.language(values) - cost.language(depths)
        return cls(cells, np.diff(offsets), sums_of(costs, offsets), shares=True)

    @property
    def costs(self) -> Ints:
        """The cost in the language model, of the aligned segments."""
        if isinstance(self._costs, tuple):
            aligned, cost = self._costs
            self._costs = sums_of(cost.language(aligned), running_sum(self.counts))
        return self._costs

    def take(self, examples: Ints) -> Segments:
        """Return those of these examples, in that order. A copy."""
        columns = (of[examples] for of in (self.cells, self.counts, self.costs))
        return Segments(*columns, shares=self.shares)

    @classmethod
    def cat(cls, parts: Sequence[Segments]) -> Segments:
        """Return those of all parts. A copy."""
        columns = zip(*((of.cells, of.counts, of.costs) for of in parts), strict=True)
        return cls(*map(np.concatenate, columns), shares=parts[0].shares)


def sums_of(values: Ints, offsets: Ints) -> Ints:
    """Sum the values of each example: int64 [N]; pairs in a sixth of the time."""
    if len(offsets) > 1 and len(values) == 2 * len(offsets) - 2 and (np.diff(offsets) == 2).all():
        return values[::2] + values[1::2]
    return row_sums(values, offsets)


def are_nested(lengths: Any) -> bool:
    """Return whether there is a row of lengths for each example: a Ragged, or lists in a list."""
    if hasattr(lengths, "offsets") and hasattr(lengths, "values"):
        return True
    is_list = isinstance(lengths, list | tuple) and len(lengths) > 0
    return is_list and isinstance(lengths[0], list | tuple | np.ndarray) and np.ndim(lengths[0]) > 0


def checked_segments(lengths: Any) -> tuple[Ints, Ints]:
    """Return the checked lengths of all segments, int64, and where each example's begin [N + 1]."""
    if hasattr(lengths, "offsets"):
        values, offsets = np.asarray(lengths.values), lengths.offsets
    else:
        for i, row in enumerate(lengths):
            if np.ndim(row) != 1:
                raise TypeError(
                    f"lengths[{i}] is {row!r:.40}, and others are lists with a length for each "
                    "segment; give every example a list, of one number where it has one segment"
                )
        rows = [np.asarray(row) for row in lengths if len(row)]
        values = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
        offsets = np.cumsum([0, *map(len, lengths)])
    counts = np.diff(offsets)
    if len(counts) and counts.min() < 1:
        raise DataError(
            f"example {int(counts.argmin())} has no segment, and must have at least one; remove it"
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


def place_of(segment: int, offsets: npt.NDArray[np.integer]) -> tuple[int, int]:
    """Return the example of a segment, counted over all, and its number there."""
    example = int(np.searchsorted(offsets, segment, side="right")) - 1
    return example, segment - int(offsets[example])


def bare_lengths(packing: PackingOptions) -> ValueError:
    """Return the error for prefixes that are to be shared where no token is known."""
    return ValueError(
        f"share_prefixes={packing.share_prefixes!r} depends on the tokens of the segments, and "
        "lengths do not tell how many they share; pass a sampler the TokenizedDataset (or a "
        "Mixture of such), or call the collator with the examples"
    )


def check_not_cut(packing: PackingOptions) -> None:
    """Refuse to cut examples whose segments stay together."""
    name, value = "overflow", packing.overflow
    if packing.strategy == "wrapped":
        name, value = "strategy", packing.strategy
    elif value in ("raise", "drop"):
        return
    way_out = "cut them when they are tokenized"
    if packing.share_prefixes:
        way_out = "cut large trees between their segments first (loading.split_trees)"
    raise ValueError(
        f"{name}={value!r} cuts examples, and these have several segments, which stay together: "
        f'{way_out}, and pass overflow="raise" or "drop"'
    )


def unfit_segments(
    i: int, others: int, lengths: Ints, limit: int, packing: PackingOptions, segments: Segments
) -> DataError:
    """Return the error for an example whose segments do not fit in one row."""
    cells, count = segments.cells[i], segments.counts[i]
    way_out = "raise max_tokens, cut it when tokenizing"
    what = (
        f"{plural(int(count), 'segment')} of {lengths[i]} tokens in all, {cells} cells with align="
        f"{packing.parallel.align}, more than the {limit} that fit in a row with max_tokens="
        f"{packing.max_tokens}"
    )
    if cells <= limit:
        what = f"{count} segments, more than max_sequences_per_row={packing.max_sequences_per_row}"
        way_out = "raise it, leave some out"
    what += f" ({others} more do not fit)" if others else ""
    return DataError(
        f"example {i} has {what}; its segments stay in one row: {way_out}, or pass overflow='drop'"
    )
