"""Pieces of examples placed on a grid of rows: the one fast path behind every layout.

A collator decides with integers where each piece starts (:class:`Grid`); :func:`fill_batch` then
moves whole arrays there. There is one ``np.concatenate`` a field, whose parts are the pieces and
views of one block of fill between them, so no token is touched from Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    def pieces(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The piece of each example's array: views."""
        whole = [arrays[i] for i in self.examples.tolist()]
        bounds = zip(whole, self.starts.tolist(), self.lengths.tolist(), strict=True)
        return [array if len(array) == n else array[a : a + n] for array, a, n in bounds]

    def place(
        self, parts: Sequence[np.ndarray], cells: np.ndarray, out: np.ndarray, fill: Any
    ) -> None:
        """Write ``parts[i]`` to ``out[cells[i]:]`` and ``fill`` everywhere else."""
        ends = cells + np.array([len(part) for part in parts], dtype=np.int64)
        gaps = np.diff(np.concatenate(([0], np.stack([cells, ends], axis=1).ravel(), [len(out)])))
        gaps = gaps[::2]
        block = np.full(int(gaps.max()), fill, dtype=out.dtype)
        pieces: list[np.ndarray] = []
        for gap, part in zip(gaps.tolist(), [*parts, block[:0]], strict=True):
            if gap:
                pieces.append(block[:gap])
            pieces.append(part)
        np.concatenate(pieces, out=out, casting="same_kind")


@dataclass(frozen=True)
class _Targets:
    """Where the loss is, on the grid's flat cells, first tokens of segments already cleared."""

    weights: np.ndarray  # float32 [size]
    labels: np.ndarray | None  # int64 [size], where the caller gave labels
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
    targets = _place_targets(grid, columns)
    if response_length is None:
        response_length = _cells_to_row_end(grid, targets.num_actions)
    num_loss_tokens = int(np.count_nonzero(targets.weights)) + num_loss_tokens_elsewhere
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
            "num_tokens": int(grid.lengths.sum()),
            "example_indices": Ragged(grid.examples, grid.row_offsets),
            "example_starts": Ragged(grid.starts, grid.row_offsets),
            "num_actions": Ragged(targets.num_actions, grid.row_offsets),
            **metadata,
        },
    )
    _fill_tokens(batch, grid, columns, pad_token_id)
    _fill_loss(batch, grid, targets, response_length, divisor)
    return batch


def _place_targets(grid: Grid, columns: Columns) -> _Targets:
    labels = None
    if columns.target is None:
        weights = np.empty(grid.size, dtype=np.float32)
        ones = np.ones(int(grid.lengths.max(initial=0)), dtype=np.float32)
        grid.place([ones[:n] for n in grid.lengths.tolist()], grid.cells, weights, 0)
    elif columns.target_name == "labels":
        labels = np.empty(grid.size, dtype=np.int64)
        grid.place(grid.pieces(columns.target), grid.cells, labels, IGNORE_INDEX)
        _check_labels(labels, grid)
        labels[grid.cells] = IGNORE_INDEX
        weights = (labels != IGNORE_INDEX).astype(np.float32)
    else:
        weights = _place_weights(grid, columns)
    weights[grid.cells] = 0  # nothing predicts the first token of a segment
    return _Targets(weights, labels, _num_actions(grid, columns, weights))


def _place_weights(grid: Grid, columns: Columns) -> np.ndarray:
    assert columns.target is not None
    weights = np.empty(grid.size, dtype=np.float32)
    if columns.num_actions is None:
        grid.place(grid.pieces(columns.target), grid.cells, weights, 0)
    else:
        # The mask speaks of tokens n - a .. n of an example; a piece may hold a part of them.
        prompt = (columns.lengths - columns.num_actions)[grid.examples]
        first = np.clip(prompt - grid.starts, 0, grid.lengths)
        skip = np.maximum(grid.starts - prompt, 0)
        spans = zip(grid.examples, skip, skip + grid.lengths - first, strict=True)
        parts = [columns.target[i][a:b] for i, a, b in spans]
        grid.place(parts, grid.cells + first, weights, 0)
    if not (weights.min(initial=0) >= 0 and weights.max(initial=0) < np.inf):
        cell = int(np.flatnonzero(~((weights >= 0) & (weights < np.inf)))[0])
        where = _where(grid, cell)
        raise DataError(
            f"{where[0]}: {columns.target_name} is {weights[cell]} at token {where[1]}; weights "
            "must be finite and 0 or more"
        )
    return weights


def _num_actions(grid: Grid, columns: Columns, weights: np.ndarray) -> np.ndarray:
    """Response tokens of each piece: as given, or from the first trained one to the end."""
    if columns.num_actions is not None:
        prompt = (columns.lengths - columns.num_actions)[grid.examples]
        return np.clip(grid.starts + grid.lengths - prompt, 0, grid.lengths - 1)
    if columns.target is None:
        return grid.lengths - 1
    trained = np.append(np.flatnonzero(weights), grid.size)
    first = trained[np.searchsorted(trained, grid.cells)]
    return np.maximum(grid.cells + grid.lengths - first, 0)


def _cells_to_row_end(grid: Grid, num_actions: np.ndarray) -> int:
    """The widest run of cells from a row's first response token to the row's end."""
    ends = grid.cells + grid.lengths
    tail = -ends % grid.width
    return int(np.where(num_actions > 0, num_actions + tail, 0).max(initial=0))


def _fill_tokens(batch: Batch, grid: Grid, columns: Columns, pad_token_id: int) -> None:
    input_ids = batch["input_ids"].numpy().reshape(-1)
    grid.place(grid.pieces(columns.input_ids), grid.cells, input_ids, pad_token_id)
    if input_ids.min(initial=0) < 0:
        cell = int(np.flatnonzero(input_ids < 0)[0])
        where = _where(grid, cell)
        raise DataError(
            f"{where[0]}: input_ids is {input_ids[cell]} at token {where[1]}; token ids are 0 or "
            "more (-100 belongs into labels)"
        )
    mask = batch["attention_mask"].numpy().reshape(-1)
    ones = np.ones(int(grid.lengths.max(initial=0)), dtype=np.int64)
    grid.place([ones[:n] for n in grid.lengths.tolist()], grid.cells, mask, 0)
    positions = batch["position_ids"].numpy()
    batch["sub_seq_lengths"].values.numpy()[:] = grid.lengths
    if grid.segment_lengths is None:
        first_columns = (grid.cells % grid.width)[:, None]
        np.subtract(np.arange(grid.width), first_columns, out=positions)
        positions *= batch["attention_mask"].numpy()
        return
    segments = grid.segment_lengths
    positions.reshape(-1)[:] = position_ids_from_lengths(segments.values)
    # A row's boundaries begin where those of the row before it end: that one is there twice.
    rows = np.repeat(np.arange(grid.num_rows), segments.lengths + 1)
    flat = cu_seqlens_from_lengths(segments.values)[np.arange(len(rows)) - rows]
    batch["cu_seq_lens"].values.numpy()[:] = flat - rows * grid.width


def _fill_loss(
    batch: Batch, grid: Grid, targets: _Targets, response_length: int, divisor: int
) -> None:
    labels = batch["labels"].numpy().reshape(-1)
    if targets.labels is not None:
        labels[:] = targets.labels
    else:
        labels[:] = IGNORE_INDEX
        np.copyto(labels, batch["input_ids"].numpy().reshape(-1), where=targets.weights != 0)
    weights = targets.weights.reshape(grid.num_rows, grid.width)
    np.divide(
        weights[:, grid.width - response_length :],
        np.float32(divisor),
        out=batch["loss_mask"].numpy(),
    )


def _check_labels(labels: np.ndarray, grid: Grid) -> None:
    bad = (labels < 0) & (labels != IGNORE_INDEX)
    if bad.any():
        cell = int(np.flatnonzero(bad)[0])
        where = _where(grid, cell)
        raise DataError(
            f"{where[0]}: labels is {labels[cell]} at token {where[1]}; a label is a token id, or "
            f"{IGNORE_INDEX} where nothing is trained"
        )


def _where(grid: Grid, cell: int) -> tuple[str, int]:
    """The example and its token that lie in a flat cell, for messages."""
    piece = int(np.searchsorted(grid.cells, cell, side="right")) - 1
    token = cell - int(grid.cells[piece]) + int(grid.starts[piece])
    return f"example {grid.examples[piece]}", token
