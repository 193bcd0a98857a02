"""Examples that are cut between their segments: pieces of them as pieces of segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from torch_collate_kit.errors import DataError
from torch_collate_kit.packing.rows import Pieces, running_sum
from torch_collate_kit.ragged import span_indices
from torch_collate_kit.reading.entries import joined
from torch_collate_kit.reading.examples import ExampleColumns


def end_to_end(segments: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of segments as one array, and where each begins: int64 [K + 1]."""
    ids = [np.asarray(of) for of in segments]
    return np.concatenate(ids), running_sum(np.array([*map(len, ids)]))


def segments_of(columns: ExampleColumns, example: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of an example's segments, end to end, and where each begins: int64 [K + 1]."""
    assert columns.segment_offsets is not None
    first, stop = columns.segment_offsets[example : example + 2]
    ids = joined(columns.input_ids)
    offsets = ids.offsets[first : stop + 1]
    return ids.values[offsets[0] : offsets[-1]], offsets - offsets[0]


def in_runs(columns: ExampleColumns, pieces: Pieces) -> ExampleColumns:
    """Return the columns with the ``run_offsets`` of these pieces, if they part examples.

    Raises:
        DataError: a piece does not begin and end with a segment.
    """
    if columns.segment_offsets is None:
        return columns
    firsts, counts = _segments_in(columns, pieces)
    if (counts == np.diff(columns.segment_offsets)[pieces.examples]).all():
        return columns
    bounds = np.concatenate([columns.segment_offsets, firsts, firsts + counts])
    return replace(columns, run_offsets=np.unique(bounds))


def opened(columns: ExampleColumns, pieces: Pieces) -> tuple[Pieces, np.ndarray]:
    """Return the pieces of segments for pieces of examples, and how many each has: int64 [S]."""
    if columns.segment_offsets is None:  # a rank without examples
        return pieces, pieces.lengths
    firsts, counts = _segments_in(columns, pieces)
    segments, offsets = span_indices(firsts, counts), running_sum(counts)[pieces.row_offsets]
    return Pieces(segments, np.zeros_like(segments), columns.lengths[segments], offsets), counts


def _segments_in(columns: ExampleColumns, pieces: Pieces) -> tuple[np.ndarray, np.ndarray]:
    """Return the first segment of each piece, and how many it has: int64 [S]."""
    bounds, ends = columns.segment_offsets, running_sum(columns.lengths)
    assert bounds is not None
    firsts, stops = bounds[pieces.examples], bounds[pieces.examples + 1]
    begins = ends[firsts] + pieces.starts
    following = begins + pieces.lengths
    if ((pieces.starts > 0) | (following < ends[stops])).any():
        firsts, stops = np.searchsorted(ends, begins), np.searchsorted(ends, following)
        is_between = (ends[firsts] == begins) & (ends[stops] == following)
        if not is_between.all():
            piece = int(is_between.argmin())
            start = int(pieces.starts[piece])
            raise DataError(
                f"example {pieces.examples[piece]} has no segments from token {start} to "
                f"{start + pieces.lengths[piece]}, as planned; an example must stay as it was when "
                "it was planned"
            )
    return firsts, stops - firsts
