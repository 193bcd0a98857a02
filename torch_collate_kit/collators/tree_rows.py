"""Rows whose segments share prefixes: the cell of every token of their trees."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from torch_collate_kit.batch.fields import PerToken
from torch_collate_kit.packing import PackingOptions, RankPlan
from torch_collate_kit.packing.pieces import Load
from torch_collate_kit.packing.planner import sizes_of
from torch_collate_kit.packing.rows import row_sums, running_sum
from torch_collate_kit.packing.segments import Segments
from torch_collate_kit.packing.trees import is_shared
from torch_collate_kit.ragged import Ragged, take_spans, unchecked
from torch_collate_kit.reading.entries import joined
from torch_collate_kit.reading.examples import ExampleColumns, PlacedColumns
from torch_collate_kit.reading.runs import in_runs, opened, segments_of


def planned_sizes(
    columns: ExampleColumns, packing: PackingOptions, images: Load | None
) -> tuple[np.ndarray, Load | None]:
    """Return the tokens of each example, int64 [N], and what else it holds, for a plan."""
    if columns.segment_offsets is None:
        return columns.lengths, images
    depths = None
    if packing.share_prefixes and is_shared(packing, columns.lengths, columns.trees.depths):
        depths = columns.trees.depths
    ids_of = partial(segments_of, columns)
    return sizes_of(columns.example_lengths, packing, images, depths=depths, ids_of=ids_of)


def as_planned(columns: ExampleColumns, part: RankPlan, packing: PackingOptions) -> ExampleColumns:
    """Check that the examples are those that were planned; return them with the runs of its pieces.

    Raises:
        DataError: they have other tokens, segments or prefixes.
    """
    if (offsets := columns.segment_offsets) is None:
        part.check_lengths(columns.lengths)
        return columns
    part.check_lengths(row_sums(columns.lengths, offsets), are_lists=True)
    columns = in_runs(columns, part.pieces)
    segments, counts = opened(columns, part.pieces)
    depths, planned = None, part.plan.segments
    if planned is not None and planned.shares:
        depths = columns.trees.depths[segments.examples]
    found = Segments.of(segments.lengths, running_sum(counts), packing, depths)[1]
    part.check_segments(found.cells, counts)
    return columns


def first_cells(cells: np.ndarray, row_offsets: np.ndarray) -> np.ndarray:
    """Return the first cell in its row of each tree, int64 [P]; ``cells`` are those of each."""
    before = running_sum(cells)
    return before[:-1] - np.repeat(before[row_offsets[:-1]], np.diff(row_offsets))


def place_in_trees(placed: PlacedColumns, columns: ExampleColumns, first: np.ndarray) -> Ragged:
    """Add the cell of every token, and the cells of its own of every segment.

    ``first`` int64 [S] is the first cell in its row of the tree of each segment. Returns the tokens
    that each segment shares, those of each row.
    """
    trees, pieces = columns.trees, placed.pieces
    starts = joined(columns.input_ids).offsets[:-1][pieces.examples]
    cells = take_spans(trees.cells, starts, pieces.lengths)
    cells = cells + np.repeat(first.astype(np.int32), pieces.lengths)
    offsets = running_sum(pieces.lengths)[pieces.row_offsets]
    placed.columns["tree_cells"] = unchecked(torch.from_numpy(cells), offsets)
    placed.specs["tree_cells"] = PerToken(torch.int32)
    placed.counts["own"] = trees.own[pieces.examples]
    placed.counts["firsts"] = first + trees.firsts[pieces.examples]
    return unchecked(trees.depths[pieces.examples], pieces.row_offsets.copy())
