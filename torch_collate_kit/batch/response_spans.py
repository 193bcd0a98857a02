"""Where the response tokens of every example lie in right-aligned rows ``[R, A]``."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.batch.batch import Batch
from torch_collate_kit.ragged import Ragged, span_indices

__all__ = ["cells_by_example", "cells_of_spans"]


def cells_by_example(batch: Batch, num_columns: int) -> tuple[np.ndarray, Ragged]:
    """The examples, int64 [E] ascending, and the cells of their response tokens, ragged int64.

    Cells are counted over all rows of ``[R, num_columns]``. The pieces of a split example are
    joined in order. Only a batch that was built from dense tensors is read from its device.
    """
    per_row = batch.row_metadata["example_indices"].lengths  # 0 in an added row
    owners, firsts, counts = (
        np.asarray(batch.row_metadata[name].flat_values)
        for name in ("example_indices", "example_starts", "num_actions")
    )
    rows = np.repeat(np.arange(len(batch)), per_row)
    order = np.lexsort((firsts, owners))
    owners, firsts = owners[order], firsts[order]
    again = np.flatnonzero((np.diff(owners) == 0) & (np.diff(firsts) == 0))
    if len(again):
        raise ValueError(
            f"a piece of example {owners[again[0]]} is in the batch twice, so its values have no "
            "order; take them before batches are joined or rows repeated"
        )
    from_end = (_cells_after(batch, per_row) + counts)[order]
    cells = cells_of_spans(rows[order], from_end, counts[order], num_columns)
    begins = np.flatnonzero(np.diff(owners, prepend=-1))
    before = np.append(0, np.cumsum(counts[order]))
    return owners[begins], Ragged(cells, before[np.append(begins, len(owners))])


def _cells_after(batch: Batch, num_pieces: np.ndarray) -> np.ndarray:
    """The cells of the row after each of its first pieces, which are those of examples: [S]."""
    if (placement := batch.placement) is not None:
        width = placement.width
        starts, lengths = (placement.segments[name] for name in ("starts", "lengths"))
    else:
        width, lengths = batch["input_ids"].shape[1], batch["sub_seq_lengths"].to("cpu")
        if "cu_seq_lens" in batch:
            starts = batch["cu_seq_lens"].to("cpu")
        else:
            starts = Ragged(batch["attention_mask"].argmax(1).cpu(), np.arange(len(batch) + 1))
    first, length = (
        np.asarray(of.flat_values)[span_indices(of.offsets[:-1] - of.offsets[0], num_pieces)]
        for of in (starts, lengths)
    )
    return width - first.astype(np.int64) - length


def cells_of_spans(
    rows: np.ndarray, from_end: np.ndarray, counts: np.ndarray, num_columns: int
) -> np.ndarray:
    """The cells of spans of tokens, which begin ``from_end`` columns before their row ends: [T]."""
    too_few = np.flatnonzero((from_end > num_columns) & (counts > 0))
    if len(too_few):
        i = too_few[from_end[too_few].argmax()]
        raise ValueError(
            f"row {rows[i]} has response tokens in its last {from_end[i]} cells, but values has "
            f"{num_columns} columns; take the values of at least the last A cells"
        )
    return span_indices((rows + 1) * num_columns - from_end, counts)
