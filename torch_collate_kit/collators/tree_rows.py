"""Rows whose segments share prefixes: the cell of every token of their trees."""

from __future__ import annotations

import numpy as np
import torch

from torch_collate_kit.batch.fields import PerToken
from torch_collate_kit.packing import PackingOptions, RankPlan
from torch_collate_kit.packing.atoms import Atoms, Patches
from torch_collate_kit.packing.rows import row_sums, running_sum
from torch_collate_kit.packing.trees import is_shared
from torch_collate_kit.ragged import Ragged, take_spans, unchecked
from torch_collate_kit.reading.entries import joined
from torch_collate_kit.reading.examples import ExampleColumns, PlacedColumns


def atoms_of(columns: ExampleColumns, packing: PackingOptions, patches: Patches | None) -> Atoms:
    """Return what is planned of each example."""
    depths, are_lists = None, columns.segment_offsets is not None
    if are_lists and packing.share_prefixes:
        found = columns.trees.depths
        depths = found if is_shared(packing, columns.lengths, found) else None
    return Atoms.of(columns.lengths, columns.segment_offsets, packing, patches, depths=depths)


def check_planned(columns: ExampleColumns, part: RankPlan, packing: PackingOptions) -> None:
    """Check that the examples are those that were planned.

    Raises:
        DataError: they have other tokens, segments or prefixes.
    """
    if (offsets := columns.segment_offsets) is None:
        return part.check_lengths(columns.lengths)
    part.check_lengths(row_sums(columns.lengths, offsets), are_lists=True)
    depths = columns.trees.depths if part.plan.atoms.share else None
    found = Atoms.of(columns.lengths, offsets, packing, depths=depths).take(part.pieces.examples)
    part.check_segments(found.cells, found.segments)


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
