"""Trees larger than a row, cut between their segments into runs that fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from torch_collate_kit.packing.options import PackingOptions
from torch_collate_kit.packing.rows import Ints, Rows, running_sum
from torch_collate_kit.packing.segments import Segments
from torch_collate_kit.packing.trees import depths_of

SegmentIds: TypeAlias = Callable[[int], tuple[np.ndarray, Ints]]
"""Returns the token ids of an example's segments, end to end, and where each begins: [K + 1]."""


class Runs(NamedTuple):
    """Runs of the segments of N examples, each of which is placed as a whole. P runs in all.

    An example has one, or where it does not fit in a row as many as it takes, in the order of its
    segments: each as long as it may be.
    """

    lengths: Ints
    """int64 [P], tokens."""
    segments: Segments
    """What the segments of each run take, [P]."""
    offsets: Ints
    """int64 [N + 1], the first run of each example."""

    @classmethod
    def of(
        cls,
        values: Ints,
        offsets: Ints,
        packing: PackingOptions,
        whole: Segments,
        depths: Ints | None,
        ids_of: SegmentIds,
    ) -> Runs | None:
        """Return the runs of examples, whose arguments are those of ``Segments.of``; None: all fit.

        A run of one segment may be larger than a row.
        """
        most, limit = packing.max_sequences_per_row, packing.capacity - packing.reserved
        is_large = whole.cells > limit
        if most is not None:
            is_large |= whole.counts > most
        if not is_large.any():
            return None
        starts = np.zeros(len(values), dtype=bool)
        starts[offsets[:-1]] = True
        if depths is not None:
            depths = depths.copy()
        for i in np.flatnonzero(is_large).tolist():
            of = slice(int(offsets[i]), int(offsets[i + 1]))
            if depths is None:
                align = packing.parallel.align
                firsts = _firsts(-(-values[of] // align) * align, limit, most)
            else:
                firsts, depths[of] = _cut_tree(*ids_of(i), limit, most)
            starts[of.start + np.array(firsts)] = True
        bounds = np.append(np.flatnonzero(starts), len(values))
        lengths, segments = Segments.of(values, bounds, packing, depths)
        return cls(lengths, segments, running_sum(starts)[offsets])

    @property
    def starts(self) -> Ints:
        """int64 [P], the first token of each run in its example."""
        before = running_sum(self.lengths)[:-1]
        return before - np.repeat(before[self.offsets[:-1]], np.diff(self.offsets))

    def take(self, examples: Ints) -> Runs:
        """Return those of these examples, in that order. A copy."""
        runs, offsets = Rows(np.arange(len(self.lengths)), self.offsets).take(examples)
        return Runs(self.lengths[runs], self.segments.take(runs), offsets)


def _cut_tree(
    ids: np.ndarray, offsets: Ints, limit: int, most: int | None
) -> tuple[list[int], Ints]:
    """Return the first segment of each run, and what segments share in their runs, int64 [K]."""
    number, first, ahead = len(offsets) - 1, 0, 8
    firsts, depths = [], np.zeros(number, dtype=np.int64)
    while first < number:
        while True:  # a run is found among twice as many segments as the last one had
            stop = min(first + ahead, number)
            part = offsets[first : stop + 1]
            near = ids[part[0] : part[-1]]
            shared = depths_of(near, part - part[0], np.array([0, stop - first]))
            cells = np.cumsum(np.diff(part) - shared)
            count = max(1, int(np.searchsorted(cells, limit, side="right")))
            if most is not None:
                count = min(count, most)
            if first + count < stop or stop == number:
                break
            ahead *= 2
        firsts.append(first)
        depths[first : first + count] = shared[:count]
        first, ahead = first + count, 2 * count + 2
    return firsts, depths


def _firsts(cells: Ints, limit: int, most: int | None) -> list[int]:
    """Return the first segment of each run where nothing is shared."""
    firsts, first, before = [], 0, running_sum(cells)
    while first < len(cells):
        firsts.append(first)
        stop = int(np.searchsorted(before, before[first] + limit, side="right")) - 1
        stop = max(first + 1, stop)
        first = stop if most is None else min(stop, first + most)
    return firsts
