"""Where pieces of examples lie on rows: integers, from which every field of a batch follows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torch_collate_kit._host_memory import host_array
from torch_collate_kit.ragged import Ragged

__all__ = ["Grid", "one_a_row", "spans"]


@dataclass(frozen=True)
class Grid:
    """``num_rows`` x ``width`` cells, and the pieces on them in the order of their cells."""

    num_rows: int
    width: int
    examples: np.ndarray  # int64 [S], the example each piece is of
    starts: np.ndarray  # int64 [S], its first token there
    lengths: np.ndarray  # int64 [S], its tokens
    cells: np.ndarray  # int64 [S], where it starts, counted over the rows
    row_offsets: np.ndarray  # int64 [num_rows + 1], the pieces of each row
    segment_lengths: Ragged | None  # cells a segment, gaps and tail included; None: padded rows

    @property
    def size(self) -> int:
        return self.num_rows * self.width

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    # Not cached properties: below Python 3.12 these hold a lock while they compute, and a process
    # that is forked meanwhile waits for it for good.
    def token_cells(self) -> np.ndarray:
        """int64 [num_tokens], the cell of every token."""
        return spans(self.cells, self.lengths)

    def gap_cells(self) -> np.ndarray:
        """int64 [size - num_tokens], the cells without a token."""
        ends = np.append(0, self.cells + self.lengths)
        return spans(ends, np.append(self.cells, self.size) - ends)


def one_a_row(lengths: np.ndarray, width: int, *, padding_side: str = "left") -> Grid:
    """Whole examples, each in a row of its own."""
    rows = np.arange(len(lengths), dtype=np.int64)
    pads = width - lengths if padding_side == "left" else 0
    return Grid(
        num_rows=len(lengths),
        width=width,
        examples=rows,
        starts=np.zeros_like(rows),
        lengths=lengths,
        cells=rows * width + pads,
        row_offsets=np.arange(len(lengths) + 1, dtype=np.int64),
        segment_lengths=None,
    )


def spans(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``starts[0], starts[0] + 1, ...`` of each length, one span behind the other: int64.

    A running sum of steps needs no other array.
    """
    filled = lengths > 0
    starts, lengths = starts[filled], lengths[filled]
    ends = np.cumsum(lengths)
    steps = host_array(int(ends[-1]) if len(ends) else 0, np.int64)
    steps.fill(1)
    if len(ends):
        steps[0] = starts[0]
        steps[ends[:-1]] = starts[1:] - starts[:-1] - lengths[:-1] + 1
    return np.cumsum(steps, out=steps)
