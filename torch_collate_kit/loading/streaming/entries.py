"""What the buffer of a stream has for each of its entries."""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_collate_kit.errors import DataError
from torch_collate_kit.loading.streaming.states import Place
from torch_collate_kit.packing import PackingOptions
from torch_collate_kit.packing.pieces import Load
from torch_collate_kit.packing.segments import Segments

ENTRY = np.dtype(
    [
        ("position", np.int64),  # of the example in the source
        ("start", np.int64),  # its first token in the example
        ("num_tokens", np.int64),
        ("is_piece", np.bool_),
        ("patches", np.int64),  # of its images,
        ("vision_cost", np.int64),  # and what these cost
        ("cells", np.int64),  # of its segments, if it is a list of them; else 0
        ("num_segments", np.int64),
        ("cost", np.int64),  # of the segments in the language model
        ("num_read", np.int64),  # the Place after this entry:
        ("next_start", np.int64),  # ...
        ("source", np.object_),
        ("taken", np.int64),
        ("example", np.object_),  # the whole of it; None where rows are read by position
        ("skipped", np.object_),  # a tuple of the wrong examples that were left out before it
        ("of", np.int64),  # the source of a mixture
    ]
)


def place_after(entry: Any) -> Place:
    """Return the place of a pass after this entry."""
    num_read, start = int(entry["num_read"]), int(entry["next_start"])
    return Place(num_read, start, entry["source"], int(entry["taken"]))


def of_segments(of: Segments | None, number: int = 0) -> tuple[int, int, int]:
    """Return the cells, number and cost of the segments of one piece; zeros without any."""
    if of is None:
        return 0, 0, 0
    return int(of.cells[number]), int(of.counts[number]), int(of.costs[number])


def load_of(entries: np.ndarray, packing: PackingOptions) -> Load:
    """Return what entries hold besides tokens.

    Raises:
        DataError: some examples are lists of segments, and others are not.
    """
    patches, costs, cells, counts, costs_of_segments = (
        np.ascontiguousarray(entries[name])
        for name in ("patches", "vision_cost", "cells", "num_segments", "cost")
    )
    load, is_list = Load(patches, costs), counts > 0
    if not is_list.any():
        return load
    if not is_list.all():
        flat, nested = (int(entries["position"][(is_list == of).argmax()]) for of in (False, True))
        raise DataError(
            f"example {nested} of the stream is a list of segments, and example {flat} is not; "
            "give every example a list, of one where it has one segment"
        )
    segments = Segments(cells, counts, costs_of_segments, shares=bool(packing.share_prefixes))
    return load._replace(segments=segments)
