"""Prefix trees: the segments of an example share the cells of what they have in common.

Sorted, two neighbours share the most that either shares with any other. So a segment in the order
given shares the most with the nearest of the earlier ones on either side of it in sorted order.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from torch_collate_kit.packing.options import PackingOptions
from torch_collate_kit.packing.rows import Ints, running_sum

LEAST_FACTOR = 1.15  # tokens for each cell, below which "auto" packs plainly
_logger = logging.getLogger("torch_collate_kit.packing")


class Trees(NamedTuple):
    """The trees of E examples with Q segments in all, in the order given.

    A segment keeps the tokens after the longest beginning that it shares with an earlier one of its
    example. Cells of an example are numbered from 0, segment by segment.
    """

    depths: Ints
    """int64 [Q], tokens that a segment shares: the position at which its own ones begin."""
    parents: Ints  # int64 [Q], the cell before its own ones; -1 where it shares nothing
    own: Ints  # int64 [Q], tokens of its own; 0 of a beginning of an earlier one
    firsts: Ints  # int64 [Q], the first of its own cells
    num_cells: Ints  # int64 [E], cells of each tree
    cells: np.ndarray  # int32 [T], the cell of every token of every segment


def trees_of(ids: np.ndarray, offsets: Ints, examples: Ints) -> Trees:
    """Return the trees of examples.

    Args:
        ids: integers [T], the tokens of all segments, end to end.
        offsets: int64 [Q + 1], where each segment begins.
        examples: int64 [E + 1], the first segment of each example.
    """
    depths, sharers = _shared(ids, offsets, examples)
    own = np.diff(offsets) - depths
    before = running_sum(own)
    per_example = before[examples]
    firsts = before[:-1] - np.repeat(per_example[:-1], np.diff(examples))
    cells = np.empty(int(offsets[-1]), dtype=np.int32)
    parents = np.full(len(own), -1, dtype=np.int64)
    spans = zip(
        offsets[:-1].tolist(), depths.tolist(), firsts.tolist(), own.tolist(), sharers.tolist(),
        strict=True,
    )  # fmt: skip
    begins = offsets.tolist()
    for i, (begin, depth, first, count, sharer) in enumerate(spans):
        if depth:  # the path of the earlier segment, up to where they part
            shared = begins[sharer]
            cells[begin : begin + depth] = cells[shared : shared + depth]
            parents[i] = cells[begin + depth - 1]
        cells[begin + depth : begin + depth + count] = np.arange(first, first + count)
    return Trees(depths, parents, own, firsts, np.diff(per_example), cells)


def depths_of(ids: np.ndarray, offsets: Ints, examples: Ints) -> Ints:
    """Return ``depths`` of the trees alone, int64 [Q]; arguments are those of ``trees_of``."""
    return _shared(ids, offsets, examples)[0]


def is_shared(packing: PackingOptions, lengths: Ints, depths: Ints) -> bool:
    """Return whether segments of these lengths, int64 [Q], share their prefixes.

    "auto" shares where that pays, and logs the number of tokens per cell.
    """
    if packing.share_prefixes != "auto":
        return bool(packing.share_prefixes)
    num_tokens = int(lengths.sum())
    factor = num_tokens / max(1, num_tokens - int(depths.sum()))
    pays = factor >= LEAST_FACTOR
    _logger.info(
        'share_prefixes="auto": %.2f tokens for each cell, %s the least factor %.2f; prefixes are '
        "%s",
        factor,
        "at least" if pays else "below",
        LEAST_FACTOR,
        "shared" if pays else "not shared",
    )
    return pays


def bare_lengths(packing: PackingOptions) -> ValueError:
    """Return the error for shared prefixes of examples whose tokens are unknown."""
    return ValueError(
        f"share_prefixes={packing.share_prefixes!r} depends on the tokens of the segments, and "
        "lengths do not tell how many they share; pass a sampler the TokenizedDataset (or a "
        "Mixture of such), or call the collator with the examples"
    )


def _narrowed(ids: np.ndarray) -> np.ndarray:
    """Return ids in 4 bytes or less; larger ones as numbers that are equal where they are."""
    if ids.dtype.itemsize <= 4:
        return np.ascontiguousarray(ids)
    if not ids.size or (ids.min() >= 0 and ids.max() <= np.iinfo(np.int32).max):
        return ids.astype(np.int32)
    return np.unique(ids, return_inverse=True)[1].astype(np.int32)


def _shared(ids: np.ndarray, offsets: Ints, examples: Ints) -> tuple[Ints, Ints]:
    """Return the most tokens that each segment shares with an earlier one, and this one."""
    ids = _narrowed(ids)
    data, width = ids.tobytes(), ids.dtype.itemsize
    begins, stops = (offsets * width)[:-1].tolist(), (offsets * width)[1:].tolist()
    depths = np.zeros(len(begins), dtype=np.int64)
    sharers = np.full(len(begins), -1, dtype=np.int64)
    bounds = examples.tolist()
    for first, last in pairwise(bounds):
        if last - first < 2:
            continue
        # any order in which equal beginnings are neighbours will do: that of bytes is fast
        keys = [data[begins[i] : stops[i]] for i in range(first, last)]
        order = sorted(range(last - first), key=keys.__getitem__)
        neighbours = pairwise(order)
        common = [_common(ids, offsets, first + a, first + b) for a, b in neighbours]
        for turn in (1, -1):  # the nearest earlier segment on the left, then on the right
            waiting: list[tuple[int, int]] = []  # numbers rise; least common since the one below
            gaps = [0, *common[::turn]]
            for number, gap in zip(order[::turn], gaps, strict=True):
                while waiting and waiting[-1][0] > number:
                    gap = min(gap, waiting.pop()[1])
                if waiting and gap > depths[first + number]:
                    depths[first + number], sharers[first + number] = gap, first + waiting[-1][0]
                waiting.append((number, gap))
    return depths, sharers


def _common(ids: np.ndarray, offsets: Ints, a: int, b: int) -> int:
    """Return the tokens that two segments begin with alike."""
    begin_a, begin_b = int(offsets[a]), int(offsets[b])
    most = min(int(offsets[a + 1]) - begin_a, int(offsets[b + 1]) - begin_b)
    differs = ids[begin_a : begin_a + most] != ids[begin_b : begin_b + most]
    found = int(differs.argmax()) if most else 0
    return found if most and differs[found] else most
