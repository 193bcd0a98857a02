"""Context parallelism: which cells of the rows each rank computes, in three layouts.

Sources: the zigzag of each segment is the partition of TransformerEngine's ``thd`` format, that of
each row torch's head-tail load balancer, and both are the "striped in two" order of H. Zhu's
ring-flash-attention; contiguous parts are those of S. A. Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_collate_kit._checks import checked_choice

LAYOUTS = ("zigzag", "contiguous", "head_tail")


class Slices(NamedTuple):
    """The cells of one rank: runs within one segment, as long as can be, ascending. int64 each."""

    segments: np.ndarray
    begins: np.ndarray
    """First cell of each run, counted over all rows."""
    ends: np.ndarray


def slices_of_rank(bounds: np.ndarray, num_rows: int, rank: int, size: int, layout: str) -> Slices:
    """Return the cells of rank ``rank`` of ``size``.

    ``bounds`` int64 ``[S + 1]`` are those of the segments, flat over rows of one width, from 0 on.
    "zigzag" cuts every segment, "head_tail" every row, into ``2 * size`` equal parts, of which rank
    ``r`` has the parts ``r`` and ``2 * size - 1 - r``; "contiguous" cuts every row into ``size``.

    Raises:
        ValueError: an unknown layout; segments or rows that do not divide.
    """
    checked_choice("layout", layout, LAYOUTS)
    whole = np.asarray(bounds, dtype=np.int64)
    if layout != "zigzag":
        whole = np.arange(num_rows + 1) * (int(whole[-1]) // max(num_rows, 1))
    lengths = np.diff(whole)
    parts = _num_parts(size, layout)
    _check_divides(lengths, parts, layout, size)
    part = per_run = lengths // parts
    taken = [rank] if parts == size else [rank, parts - 1 - rank]
    if parts > size and rank == size - 1:  # neighbours in the middle
        taken, per_run = [rank], 2 * part
    begins = (whole[:-1, None] + part[:, None] * np.array(taken)).ravel()
    ends = begins + np.repeat(per_run, len(taken))
    if layout != "zigzag":
        begins, ends = _cut_at(np.asarray(bounds, dtype=np.int64), begins, ends)
    kept = ends > begins
    begins, ends = begins[kept], ends[kept]
    return Slices(np.searchsorted(bounds, begins, side="right") - 1, begins, ends)


def _num_parts(size: int, layout: str) -> int:
    """Return how many parts a segment or row is cut into: none for one rank, which has all."""
    return size if layout == "contiguous" or size == 1 else 2 * size


def _check_divides(lengths: np.ndarray, parts: int, layout: str, size: int) -> None:
    wrong = np.flatnonzero(lengths % parts)
    if not len(wrong):
        return
    found = int(lengths[wrong[0]])
    what, way_out = f"segment {wrong[0]} has {found} cells", ""
    if layout != "zigzag":
        what, way_out = (
            f"rows have {found} cells",
            f", or padded rows with pad_to_multiple_of={parts}",
        )
    raise ValueError(
        f"{what}, which {layout} does not divide into {parts} equal parts for {size} context "
        f"ranks; collate with parallel=ParallelLayout(cp={size}){way_out}"
    )


def _cut_at(
    bounds: np.ndarray, begins: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the runs, which ascend and do not overlap, cut where segments end."""
    edges = np.unique(np.concatenate([bounds, begins, ends]))
    run = np.searchsorted(begins, edges[:-1], side="right") - 1
    inside = (run >= 0) & (edges[:-1] < ends[run])
    return edges[:-1][inside], edges[1:][inside]


def local_bounds(segments: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the boundaries of the segments' parts among a rank's own cells, int64 [P + 1]."""
    is_first = np.diff(segments, prepend=-1) != 0
    before = np.cumsum(sizes) - sizes
    return np.append(before[is_first], sizes.sum())
