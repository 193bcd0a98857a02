"""Pieces of examples placed on a grid of rows: the one fast path behind every layout.

A collator decides with integers where each piece starts (:class:`Grid`); :func:`fill_batch` then
moves whole columns. Nothing here is done once a piece, let alone once a token, in Python.

The loss is worked out on lanes, the places that pieces are moved to. Where most of the grid holds
tokens, the lanes are its cells and a column is gathered straight into the batch; what lands in the
gaps is overwritten. Where most of it is pads, there is a lane a token, and lanes are scattered.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from torch_collate_kit.batch import IGNORE_INDEX, Batch
from torch_collate_kit.collators._columns import Columns
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.segments import cu_seqlens_from_lengths, position_ids_from_lengths

__all__ = ["Grid", "fill_batch"]


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

    @cached_property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def is_dense(self) -> bool:
        return 2 * self.num_tokens > self.size

    @cached_property
    def num_lanes(self) -> int:
        return self.size if self.is_dense else self.num_tokens

    @cached_property
    def lanes(self) -> np.ndarray:
        """int64 [S], the first lane of each piece."""
        return self.cells if self.is_dense else np.cumsum(self.lengths) - self.lengths

    @cached_property
    def token_cells(self) -> np.ndarray:
        """int64 [num_tokens], the cell of every token."""
        return _spans(self.cells, self.lengths)

    @cached_property
    def gap_cells(self) -> np.ndarray:
        """int64 [size - num_tokens], the cells without a token."""
        ends = np.append(0, self.cells + self.lengths)
        return _spans(ends, np.append(self.cells, self.size) - ends)

    def sources(self, offsets: np.ndarray) -> np.ndarray:
        """What each lane reads of a column whose example i begins at ``offsets[i]``.

        int64 [num_lanes - lanes[0]]. A gap reads on behind its piece.
        """
        spans = np.diff(self.lanes, append=self.num_lanes)
        return _spans(offsets[self.examples] + self.starts, spans)

    def gather(self, values: np.ndarray, sources: np.ndarray, out: np.ndarray, fill: Any) -> None:
        """A column to its lanes; ``fill`` to the lanes without a token."""
        if self.num_tokens:
            rest = out[self.num_lanes - len(sources) :]
            if values.dtype == out.dtype:
                np.take(values, sources, out=rest, mode="clip")
            else:
                rest[:] = values.take(sources, mode="clip")
        if self.is_dense:
            out[self.gap_cells] = fill

    def scatter(self, lanes: np.ndarray, out: np.ndarray, fill: Any) -> None:
        """From lanes that are tokens to the cells of the grid."""
        out.fill(fill)
        out[self.token_cells] = lanes


def _spans(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``starts[0], starts[0] + 1, ...`` of each length, one span behind the other: int64."""
    before = np.cumsum(lengths) - lengths
    spans = np.repeat(starts - before, lengths)
    spans += np.arange(len(spans))
    return spans


@dataclass(frozen=True)
class _Loss:
    """Where the loss is; first tokens of segments are cleared already."""

    weights: np.ndarray  # float32 [num_lanes]
    trained: np.ndarray  # bool [num_lanes]: weights that are not 0
    labels: np.ndarray | None  # int64 [num_lanes], where the caller gave labels
    num_actions: np.ndarray  # int64 [S]


def fill_batch(
    grid: Grid,
    columns: Columns,
    *,
    pad_token_id: int,
    response_length: int | None,
    normalize_loss: bool,
    metadata: dict[str, Any],
    num_loss_tokens_elsewhere: int = 0,
) -> Batch:
    """The Batch of a grid. ``response_length=None``: the cells from the first trained one on.

    ``num_loss_tokens_elsewhere``: of rows that other ranks collate. ``metadata`` goes last.
    """
    sources = grid.sources(columns.input_ids.offsets)
    loss = _find_loss(grid, columns, sources)
    if response_length is None:
        response_length = _cells_to_row_end(grid, loss.num_actions)
    num_loss_tokens = int(np.count_nonzero(loss.trained)) + num_loss_tokens_elsewhere
    divisor = max(1, num_loss_tokens) if normalize_loss else 1
    shape = (grid.num_rows, grid.width)
    names = ("input_ids", "position_ids", "attention_mask", "labels")
    specs: dict[str, Any] = dict.fromkeys(names, (shape, torch.int64))
    specs["loss_mask"] = ((grid.num_rows, response_length), torch.float32)
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
            "num_examples": len(columns.lengths),
            "num_tokens": grid.num_tokens,
            "example_indices": Ragged(grid.examples, grid.row_offsets),
            "example_starts": Ragged(grid.starts, grid.row_offsets),
            "num_actions": Ragged(loss.num_actions, grid.row_offsets),
            **metadata,
        },
    )
    _fill_tokens(batch, grid, columns.input_ids.values, sources, loss, pad_token_id)
    _fill_layout(batch, grid)
    _fill_loss_mask(batch["loss_mask"].numpy(), grid, loss.weights, divisor)
    return batch


def _find_loss(grid: Grid, columns: Columns, sources: np.ndarray) -> _Loss:
    weights = np.empty(grid.num_lanes, dtype=np.float32)
    labels = None
    if columns.target is None:
        weights.fill(1)
        if grid.is_dense:
            weights[grid.gap_cells] = 0
    elif columns.target_name == "labels":
        labels = np.empty(grid.num_lanes, dtype=np.int64)
        grid.gather(columns.target.values, sources, labels, IGNORE_INDEX)
        _check_labels(labels, grid)
        labels[grid.lanes] = IGNORE_INDEX
        weights[:] = labels != IGNORE_INDEX
    else:
        _gather_weights(grid, columns, sources, weights)
    weights[grid.lanes] = 0  # nothing predicts the first token of a segment
    trained = weights != 0
    return _Loss(weights, trained, labels, _num_actions(grid, columns, trained))


def _gather_weights(grid: Grid, columns: Columns, sources: np.ndarray, weights: np.ndarray) -> None:
    assert columns.target is not None
    if columns.num_actions is None:
        grid.gather(columns.target.values, sources, weights, 0)
    else:
        # The mask speaks of tokens n - a .. n of an example; a piece may hold a part of them.
        prompt = (columns.lengths - columns.num_actions)[grid.examples]
        first = np.clip(prompt - grid.starts, 0, grid.lengths)
        masks = columns.target.offsets[grid.examples] + np.maximum(grid.starts - prompt, 0)
        num_entries = grid.lengths - first
        weights.fill(0)
        given = columns.target.values[_spans(masks, num_entries)]
        weights[_spans(grid.lanes + first, num_entries)] = given
    if not (weights.min(initial=0) >= 0 and weights.max(initial=0) < np.inf):
        lane = int(np.flatnonzero(~((weights >= 0) & (weights < np.inf)))[0])
        where = _where(grid, lane)
        raise DataError(
            f"{where[0]}: {columns.target_name} is {weights[lane]} at token {where[1]}; weights "
            "must be finite and 0 or more"
        )


def _num_actions(grid: Grid, columns: Columns, trained: np.ndarray) -> np.ndarray:
    """Response tokens of each piece: as given, or from the first trained one to the end."""
    if columns.num_actions is not None:
        prompt = (columns.lengths - columns.num_actions)[grid.examples]
        return np.clip(grid.starts + grid.lengths - prompt, 0, grid.lengths - 1)
    if columns.target is None:
        return grid.lengths - 1
    # The first lane of a piece is not trained, so trained ones begin behind one that is not.
    begins = np.append(np.flatnonzero(trained[1:] > trained[:-1]) + 1, grid.num_lanes)
    first = begins[np.searchsorted(begins, grid.lanes)]
    return np.maximum(grid.lanes + grid.lengths - first, 0)


def _cells_to_row_end(grid: Grid, num_actions: np.ndarray) -> int:
    """The widest run of cells from a row's first response token to the row's end."""
    ends = grid.cells + grid.lengths
    tail = -ends % grid.width
    return int(np.where(num_actions > 0, num_actions + tail, 0).max(initial=0))


def _fill_tokens(
    batch: Batch,
    grid: Grid,
    token_ids: np.ndarray,
    sources: np.ndarray,
    loss: _Loss,
    pad_token_id: int,
) -> None:
    names = ("input_ids", "labels", "attention_mask")
    fields = [batch[name].numpy().reshape(-1) for name in names]
    lanes = fields if grid.is_dense else [np.empty(grid.num_lanes, np.int64) for _ in names]
    input_ids, labels, attention_mask = lanes
    grid.gather(token_ids, sources, input_ids, pad_token_id)
    if input_ids.min(initial=0) < 0:
        lane = int(np.flatnonzero(input_ids < 0)[0])
        where = _where(grid, lane)
        raise DataError(
            f"{where[0]}: input_ids is {input_ids[lane]} at token {where[1]}; token ids are 0 or "
            "more (-100 belongs into labels)"
        )
    if loss.labels is not None:
        labels[:] = loss.labels
    else:  # arithmetic: a masked copy takes five times as long where the mask is irregular
        np.subtract(input_ids, IGNORE_INDEX, out=labels)
        labels *= loss.trained
        labels += IGNORE_INDEX
    attention_mask.fill(1)
    if grid.is_dense:
        attention_mask[grid.gap_cells] = 0
        return
    for field, values, fill in zip(fields, lanes, (pad_token_id, IGNORE_INDEX, 0), strict=True):
        grid.scatter(values, field, fill)


def _fill_layout(batch: Batch, grid: Grid) -> None:
    positions = batch["position_ids"].numpy().reshape(-1)
    batch["sub_seq_lengths"].values.numpy()[:] = grid.lengths
    if grid.segment_lengths is None:
        grid.scatter(position_ids_from_lengths(grid.lengths), positions, 0)
        return
    segments = grid.segment_lengths
    position_ids_from_lengths(segments.values, out=positions)
    # A row's boundaries begin where those of the row before it end: that one is there twice.
    rows = np.repeat(np.arange(grid.num_rows), segments.lengths + 1)
    flat = cu_seqlens_from_lengths(segments.values)[np.arange(len(rows)) - rows]
    batch["cu_seq_lens"].values.numpy()[:] = flat - rows * grid.width


def _fill_loss_mask(loss_mask: np.ndarray, grid: Grid, weights: np.ndarray, divisor: int) -> None:
    """The last columns of every row, divided."""
    first_column = grid.width - loss_mask.shape[1]
    if grid.is_dense:
        of_cells = weights.reshape(grid.num_rows, grid.width)
        np.divide(of_cells[:, first_column:], np.float32(divisor), out=loss_mask)
        return
    rows, columns = np.divmod(grid.cells, grid.width)
    skipped = np.clip(first_column - columns, 0, grid.lengths)
    cells = rows * loss_mask.shape[1] + columns + skipped - first_column
    kept = grid.lengths - skipped
    loss_mask.fill(0)
    divided = weights[_spans(grid.lanes + skipped, kept)] / np.float32(divisor)
    loss_mask.reshape(-1)[_spans(cells, kept)] = divided


def _check_labels(labels: np.ndarray, grid: Grid) -> None:
    bad = (labels < 0) & (labels != IGNORE_INDEX)
    if bad.any():
        lane = int(np.flatnonzero(bad)[0])
        where = _where(grid, lane)
        raise DataError(
            f"{where[0]}: labels is {labels[lane]} at token {where[1]}; a label is a token id, or "
            f"{IGNORE_INDEX} where nothing is trained"
        )


def _where(grid: Grid, lane: int) -> tuple[str, int]:
    """The example and its token that lie in a lane, for messages."""
    piece = int(np.searchsorted(grid.lanes, lane, side="right")) - 1
    token = lane - int(grid.lanes[piece]) + int(grid.starts[piece])
    return f"example {grid.examples[piece]}", token
