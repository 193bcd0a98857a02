"""From pieces on a grid to a Batch: the one path behind every layout.

A collator decides with integers where each piece lies (``Grid``); then whole columns are moved
there, with NumPy or by compiled loops, to the same bytes.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from torch_collate_kit.batch import Batch
from torch_collate_kit.collators._columns import Columns
from torch_collate_kit.collators._grid import Grid
from torch_collate_kit.collators._lanes import Lanes
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.segments import cu_seqlens_from_lengths

__all__ = ["NOTHING_LOST", "Mover", "fill_batch", "token_mover"]

NOTHING_LOST: dict[str, Any] = {  # metadata of a layout that has a row for every example
    "num_dummy_rows": 0,
    "num_dropped": 0,
    "num_cut": 0,
    "dropped": (),
    "cut": (),
}


class Mover(Protocol):
    """Moves what the examples hold onto a grid."""

    num_loss_tokens: int
    num_actions: np.ndarray
    """int64 [S], response tokens of each piece."""

    def specs(self, response_length: int) -> dict[str, Any]:
        """What ``Batch.allocate`` is to make for the fields that ``fill`` fills."""

    def fill(self, batch: Batch, pad_token_id: int, divisor: int) -> None:
        """Fill them; ``loss_mask`` is divided.

        Raises:
            DataError: a negative token id.
        """


def fill_batch(
    grid: Grid,
    mover: Mover,
    *,
    num_examples: int,
    pad_token_id: int,
    response_length: int | None,
    normalize_loss: bool,
    metadata: dict[str, Any],
    num_loss_tokens_elsewhere: int = 0,
) -> Batch:
    """The Batch of a grid. ``response_length=None``: the cells from the first trained one on.

    ``num_loss_tokens_elsewhere``: of rows that other ranks collate. ``metadata`` goes last.
    """
    if response_length is None:
        response_length = _cells_to_row_end(grid, mover.num_actions)
    num_loss_tokens = mover.num_loss_tokens + num_loss_tokens_elsewhere
    divisor = max(1, num_loss_tokens) if normalize_loss else 1
    specs = mover.specs(response_length)
    specs["sub_seq_lengths"] = (grid.row_offsets, torch.int64)
    if grid.segment_lengths is not None:
        boundaries = grid.segment_lengths.lengths + 1
        specs["cu_seq_lens"] = (np.append(0, np.cumsum(boundaries)), torch.int32)
    batch = Batch.allocate(
        specs,
        {
            "response_length": response_length,
            "num_loss_tokens": num_loss_tokens,
            "loss_mask_divisor": divisor,
            "num_examples": num_examples,
            "num_tokens": grid.num_tokens,
            "example_indices": Ragged(grid.examples, grid.row_offsets),
            "example_starts": Ragged(grid.starts, grid.row_offsets),
            "num_actions": Ragged(mover.num_actions, grid.row_offsets),
            **metadata,
        },
    )
    mover.fill(batch, pad_token_id, divisor)
    batch["sub_seq_lengths"].values.numpy()[:] = grid.lengths
    if grid.segment_lengths is not None:
        batch["cu_seq_lens"].values.numpy()[:] = _boundaries(grid.segment_lengths, grid.width)
    return batch


def token_mover(grid: Grid, columns: Columns, *, compiled: bool) -> Mover:
    """For SFT examples."""
    if compiled:
        from torch_collate_kit.collators._compiled import CompiledLanes

        if CompiledLanes.supports(columns):
            return CompiledLanes(grid, columns)
    return Lanes(grid, columns)


def _cells_to_row_end(grid: Grid, num_actions: np.ndarray) -> int:
    """The widest run of cells from a row's first response token to the row's end."""
    ends = grid.cells + grid.lengths
    tail = -ends % grid.width
    return int(np.where(num_actions > 0, num_actions + tail, 0).max(initial=0))


def _boundaries(segment_lengths: Ragged, width: int) -> np.ndarray:
    """0, ..., width of every row, one row behind the other."""
    # A row's boundaries begin where those of the row before it end: that one is there twice.
    rows = np.repeat(np.arange(len(segment_lengths)), segment_lengths.lengths + 1)
    flat = cu_seqlens_from_lengths(segment_lengths.values)[np.arange(len(rows)) - rows]
    boundaries: np.ndarray = flat - rows * width
    return boundaries
