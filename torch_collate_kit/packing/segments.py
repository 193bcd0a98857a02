"""Examples of several segments, such as the two sides of a pair: what they take in a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from torch_collate_kit._checks import checked_lengths
from torch_collate_kit._reprs import plural
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing.cost import ModelCost
from torch_collate_kit.packing.options import PackingOptions
from torch_collate_kit.packing.rows import Ints, row_sums

_AT_ONCE = 1 << 14  # examples whose costs stay in the cache: for millions a third of the time


class Segments:
    """What the segments of each example take together in one row: int64 [N] each.

    ``cells`` count each segment rounded up to the alignment, or with ``shares`` what is left of the
    tree of all; ``counts`` are their numbers, and ``costs`` those in the language model, which are
    computed when they are first needed. ``lengths`` are the tokens of every segment, of all
    examples that were given.
    """

    lengths: Ints | None = None

    def __init__(
        self,
        cells: Ints,
        counts: Ints,
        costs: Ints | tuple[Ints, Ints, ModelCost],
        *,
        shares: bool = False,
    ) -> None:
        self.cells, self.counts, self._costs, self.shares = cells, counts, costs, shares

    @classmethod
    def of(
        cls, values: Ints, offsets: Ints, packing: PackingOptions, depths: Ints | None = None
    ) -> tuple[Ints, Segments]:
        """Return the tokens of examples, int64 [N], and what their segments take.

        Those of example i have the lengths ``values[offsets[i]:offsets[i + 1]]``. ``depths`` int64
        [Q] are the tokens that each segment shares, if prefixes are shared: then a tree is aligned
        as a whole. A token attends to its path, so own ones cost what they add to that.
        """
        align, cost, counts = packing.parallel.align, packing.cost, offsets[1:] - offsets[:-1]
        tokens = cells = sums_of(values, counts, offsets)
        if depths is not None:
            cells = -(-sums_of(values - depths, counts, offsets) // align) * align
            costs = cost.language(values) - cost.language(depths)
            segments = cls(cells, counts, sums_of(costs, counts, offsets), shares=True)
        else:
            aligned = values
            if align > 1:
                aligned = -(-values // align) * align
                cells = sums_of(aligned, counts, offsets)
            segments = cls(cells, counts, (aligned, offsets, cost))
        segments.lengths = values
        return tokens, segments

    @property
    def costs(self) -> Ints:
        """The cost in the language model, of the aligned segments."""
        if isinstance(self._costs, tuple):
            aligned, offsets, cost = self._costs
            self._costs = np.empty_like(self.cells)
            for first in range(0, len(self.cells), _AT_ONCE):
                part = slice(first, first + _AT_ONCE)
                own = offsets[first : first + _AT_ONCE + 1]
                of_segments = cost.language(aligned[own[0] : own[-1]])
                self._costs[part] = sums_of(of_segments, self.counts[part], own - own[0])
        return self._costs

    def take(self, examples: Ints) -> Segments:
        """Return those of these examples, in that order. A copy."""
        columns = (of[examples] for of in (self.cells, self.counts, self.costs))
        return Segments(*columns, shares=self.shares)


def sums_of(values: Ints, counts: Ints, offsets: Ints) -> Ints:
    """Sum the values of each example, so many from its offset on: int64 [N]; pairs the fastest."""
    if len(values) == 2 * len(counts) and (counts == 2).all():
        return values[::2] + values[1::2]
    return row_sums(values, offsets)


def are_nested(lengths: Any) -> bool:
    """Return whether there is a row of lengths for each example: a Ragged, or lists in a list."""
    if isinstance(getattr(lengths, "offsets", None), np.ndarray):
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
    name, value = "overflow", str(packing.overflow)
    if packing.strategy == "wrapped":
        name, value = "strategy", "wrapped"
    elif value in ("raise", "drop") or (value == "split" and packing.share_prefixes):
        return
    way_out = 'pass overflow="raise" or "drop"'
    if value == "split":
        way_out += ", or beside it share_prefixes=True, with which it cuts between segments"
    raise ValueError(
        f"{name}={value!r} cuts examples, and these have several segments, which stay together: "
        f"cut them when they are tokenized, and {way_out}"
    )


def long_path(
    example: int, segment: int, length: int, others: int, packing: PackingOptions
) -> DataError:
    """Return the error for a segment that is longer than a row by itself."""
    what = f" ({plural(others, 'other segment')} too)" if others else ""
    return DataError(
        f"example {example}, segment {segment} has {length} tokens, more than the "
        f"{packing.capacity - packing.reserved} that fit in a row with max_tokens="
        f"{packing.max_tokens} and align={packing.parallel.align}{what}; overflow='split' cuts "
        "between segments and never within one: raise max_tokens, or limit segments when "
        "tokenizing (max_length)"
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
    choices = "overflow='drop'" + (" or 'split'" if packing.share_prefixes else "")
    return DataError(
        f"example {i} has {what}; its segments stay in one row: {way_out}, or pass {choices}"
    )
