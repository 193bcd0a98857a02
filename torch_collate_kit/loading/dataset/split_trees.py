"""Examples whose tree is larger than a row, cut between their segments."""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_collate_kit._checks import checked_int
from torch_collate_kit._reprs import KindAndSize
from torch_collate_kit.loading.dataset.tokenized import TokenizedDataset
from torch_collate_kit.packing.segments import sums_of
from torch_collate_kit.packing.trees import depths_of
from torch_collate_kit.ragged import Nested, Ragged


def split_trees(dataset: TokenizedDataset, *, max_tokens: int) -> TokenizedDataset:
    """Return a dataset in which every example whose tree has over ``max_tokens`` cells is several.

    An example is cut between its segments, in their order, into runs that fit in a row with
    ``share_prefixes``; each run is an example and has the prefix of its segments again. Columns are
    copied. ``max_tokens`` is that of the rows (``collate.packing.capacity``). Not for segments that
    belong together, such as the sides of a pair: a value of a whole example is refused, and other
    losses over several segments cannot be known.

    Raises:
        TypeError: the examples are no lists of segments.
        ValueError: a column has a value for each example (but ``weight`` of its tokens).

    >>> turns = [[1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 6, 7]]
    >>> dataset = TokenizedDataset([{"input_ids": turns}])
    >>> split_trees(dataset, max_tokens=5)[:]["input_ids"].tolist()
    [[[1, 2, 3], [1, 2, 4, 5]], [[1, 2, 4, 6, 7]]]
    """
    max_tokens = checked_int("max_tokens", max_tokens)
    shared = dataset.shared_lengths if isinstance(dataset, TokenizedDataset) else None
    if shared is None:
        raise TypeError(
            "split_trees needs a TokenizedDataset whose examples are lists of segments, got "
            f"{KindAndSize(dataset)!r}; others are cut by overflow='split'"
        )
    every, lengths = np.arange(len(dataset)), dataset.lengths
    assert isinstance(lengths, Ragged), "shared lengths of segments"
    firsts = [np.zeros(0, dtype=np.int64)]  # of each example, the first segment of each run
    own = lengths.values - shared.values
    cells = sums_of(own, shared.lengths, shared.offsets)
    for i, num_cells in enumerate(cells.tolist()):
        of_example = [0]
        if num_cells > max_tokens:
            of_example = _runs(dataset._column_at("input_ids", np.array([i])).rows, max_tokens)
        firsts.append(shared.offsets[i] + of_example)
    numbers = np.repeat(every, [len(of) for of in firsts[1:]])
    offsets = np.append(np.concatenate(firsts), shared.offsets[-1])
    columns = dataset.__getitems__(every)
    cut = {name: _cut(name, column, numbers, offsets) for name, column in columns.items()}
    return TokenizedDataset(
        cut, columns=[*cut], train_all=dataset._train_all, vision=dataset.vision
    )


def _runs(segments: Ragged, max_tokens: int) -> list[int]:
    """Return the first segment of each run, the longest that fits or one segment."""
    firsts, first, values = [], 0, np.asarray(segments.values)
    while first < len(segments):
        firsts.append(first)
        offsets = segments.offsets[first:] - segments.offsets[first]
        only = np.array([0, len(offsets) - 1])
        depths = depths_of(values[segments.offsets[first] :], offsets, only)
        cells = np.cumsum(np.diff(offsets) - depths)
        first += max(1, int(np.searchsorted(cells, max_tokens, side="right")))
    return firsts


def _cut(name: str, column: Any, numbers: np.ndarray, offsets: np.ndarray) -> Any:
    """Return a column of the runs: ``numbers`` are their examples, ``offsets`` their segments."""
    if isinstance(column, Nested):
        return Nested(column.rows, offsets)
    if name == "num_actions" and isinstance(column, Ragged):
        return Ragged(column.values, offsets).tolist()  # of each segment, also where it is one
    if name == "weight":
        return np.asarray(column)[numbers]
    if name == "num_cut_tokens":  # counted once
        return np.where(np.diff(numbers, prepend=-1) > 0, np.asarray(column)[numbers], 0)
    raise ValueError(
        f"{name} is of a whole example, whose segments belong together; leave the column out, or "
        "drop what is larger than a row (overflow='drop')"
    )
