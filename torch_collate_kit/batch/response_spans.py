"""Where the tokens of every example lie in right-aligned rows, ``[R, A]`` or ``[R, W]``."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.batch.batch import Batch
from torch_collate_kit.batch.dense import cells_of_responses
from torch_collate_kit.ragged import Ragged, span_indices

__all__ = ["cells_by_example", "cells_of_spans", "response_cells", "values_of_cells"]


def values_of_cells(values: Tensor, cells: Ragged, dtype: torch.dtype) -> Ragged:
    """The values ``[R, A]`` in these cells, in host memory: a copy without a graph.

    >>> cells = Ragged.from_lengths(np.array([1, 2, 5]), np.array([2, 1]))
    >>> values_of_cells(torch.arange(6).view(2, 3), cells, torch.float32).tolist()
    [[1.0, 2.0], [5.0]]
    """
    places = torch.from_numpy(cells.values).to(values.device)
    picked = values.detach().reshape(-1)[places].cpu().to(dtype)
    return Ragged(picked.numpy(), cells.offsets)


def response_cells(batch: Batch) -> Tensor | None:
    """Where ``[R, A]`` holds response tokens: int64 [n], flat cells in their order, on the device.

    All cells that ``loss_mask`` trains are among them. None where the batch does not say, since it
    was built of dense fields or its ``loss_mask`` was replaced or changed. Waits for no device.
    """
    stored = batch.stored()
    if stored.columns is None or "loss_mask" in stored.given:
        return None
    return cells_of_responses(stored.columns, batch._shared)


def cells_by_example(
    batch: Batch, num_columns: int, count: Literal["responses", "tokens", "predicted"] = "responses"
) -> tuple[np.ndarray, Ragged]:
    """The examples, int64 [E] ascending, and the cells of their tokens, ragged int64.

    ``count``: of their response tokens, of all tokens, or of all but the first of each piece, which
    nothing predicts. Cells are counted over all rows of ``[R, num_columns]``. The pieces of a split
    example are joined in order. Only a batch that was built from dense tensors is read from its
    device.
    """
    per_row = batch.row_metadata["example_indices"].lengths  # 0 in an added row
    owners, firsts, responses = (
        np.asarray(batch.row_metadata[name].values)
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
    after, lengths = _pieces(batch, per_row)
    counts = {"responses": responses, "tokens": lengths, "predicted": lengths - 1}[count][order]
    cells = cells_of_spans(rows[order], after[order] + counts, counts, num_columns)
    begins = np.flatnonzero(np.diff(owners, prepend=-1))
    before = np.append(0, np.cumsum(counts))
    return owners[begins], Ragged(cells, before[np.append(begins, len(owners))])


def _pieces(batch: Batch, num_pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the first pieces of every row, which are those of examples: int64 [S] each.

    The cells of the row after the tokens of a piece, and its tokens.
    """
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
        np.asarray(of.values, dtype=np.int64)[span_indices(of.offsets[:-1], num_pieces)]
        for of in (starts, lengths)
    )
    return width - first - length, length


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
