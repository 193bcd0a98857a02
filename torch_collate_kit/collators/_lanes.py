"""Columns moved onto a grid with NumPy: nothing is done once an example in Python.

The loss is worked out on lanes, the places that pieces are moved to. Where most of the grid holds
tokens, the lanes are its cells and a column is gathered straight into the batch; what lands in the
gaps is overwritten. Where most of it is pads, there is a lane a token, and lanes are scattered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torch_collate_kit._host_memory import host_array
from torch_collate_kit.batch import IGNORE_INDEX, Batch
from torch_collate_kit.collators._columns import Columns
from torch_collate_kit.collators._grid import Grid, spans
from torch_collate_kit.errors import DataError
from torch_collate_kit.segments import position_ids_from_lengths

__all__ = ["Lanes", "token_specs"]


def token_specs(grid: Grid, response_length: int) -> dict[str, Any]:
    """The fields of an SFT batch that have a cell a token, for ``Batch.allocate``."""
    names = ("input_ids", "position_ids", "attention_mask", "labels")
    specs: dict[str, Any] = dict.fromkeys(names, ((grid.num_rows, grid.width), torch.int64))
    specs["loss_mask"] = ((grid.num_rows, response_length), torch.float32)
    return specs


class Lanes:
    """Finds the loss of the pieces, and fills the fields that have a cell a token."""

    def __init__(self, grid: Grid, columns: Columns) -> None:
        self._grid, self._columns = grid, columns
        self._is_dense = 2 * grid.num_tokens > grid.size
        self._num_lanes = grid.size if self._is_dense else grid.num_tokens
        self._gap_cells = grid.gap_cells() if self._is_dense else np.empty(0, dtype=np.int64)
        is_scattered = not self._is_dense or grid.segment_lengths is None
        self._token_cells = grid.token_cells() if is_scattered else np.empty(0, dtype=np.int64)
        # int64 [S], the first lane of each piece
        self._lanes = grid.cells if self._is_dense else np.cumsum(grid.lengths) - grid.lengths
        # int64, what each lane reads of a column; a gap reads on behind its piece
        firsts = columns.input_ids.offsets[grid.examples] + grid.starts
        self._sources = spans(firsts, np.diff(self._lanes, append=self._num_lanes))
        self._find_loss()

    def _find_loss(self) -> None:
        columns = self._columns
        self._labels = None
        self._weights = host_array(self._num_lanes, np.float32)
        if columns.target is None:
            self._weights.fill(1)
            self._fill_gaps(self._weights, 0)
        elif columns.target_name == "labels":
            self._labels = host_array(self._num_lanes, np.int64)
            self._gather(columns.target.values, self._labels, IGNORE_INDEX)
            self._check_labels(self._labels)
            self._labels[self._lanes] = IGNORE_INDEX
            self._weights[:] = self._labels != IGNORE_INDEX
        else:
            self._gather_weights()
        self._weights[self._lanes] = 0  # nothing predicts the first token of a segment
        self._trained = np.not_equal(self._weights, 0, out=host_array(self._num_lanes, np.bool_))
        self.num_loss_tokens = int(np.count_nonzero(self._trained))
        self.num_actions = self._count_actions()

    def _gather(self, values: np.ndarray, out: np.ndarray, fill: Any) -> None:
        """A column to its lanes; ``fill`` to the lanes without a token."""
        if self._grid.num_tokens:
            rest = out[self._num_lanes - len(self._sources) :]
            if values.dtype == out.dtype:
                np.take(values, self._sources, out=rest, mode="clip")
            else:
                rest[:] = values.take(self._sources, mode="clip")
        self._fill_gaps(out, fill)

    def _fill_gaps(self, lanes: np.ndarray, fill: Any) -> None:
        if self._is_dense:
            lanes[self._gap_cells] = fill

    def _gather_weights(self) -> None:
        grid, columns, weights = self._grid, self._columns, self._weights
        assert columns.target is not None
        if columns.num_actions is None:
            self._gather(columns.target.values, weights, 0)
        else:
            # The mask speaks of tokens n - a .. n of an example; a piece may hold a part of them.
            prompt = (columns.lengths - columns.num_actions)[grid.examples]
            first = np.clip(prompt - grid.starts, 0, grid.lengths)
            masks = columns.target.offsets[grid.examples] + np.maximum(grid.starts - prompt, 0)
            num_entries = grid.lengths - first
            weights.fill(0)
            given = columns.target.values[spans(masks, num_entries)]
            weights[spans(self._lanes + first, num_entries)] = given
        if not (weights.min(initial=0) >= 0 and weights.max(initial=0) < np.inf):
            lane = int(np.flatnonzero(~((weights >= 0) & (weights < np.inf)))[0])
            example, token = self._where(lane)
            raise DataError(
                f"{example}: {columns.target_name} is {weights[lane]} at token {token}; weights "
                "must be finite and 0 or more"
            )

    def _count_actions(self) -> np.ndarray:
        """As given, or from the first trained token to the end."""
        grid, columns = self._grid, self._columns
        if columns.num_actions is not None:
            prompt = (columns.lengths - columns.num_actions)[grid.examples]
            return np.clip(grid.starts + grid.lengths - prompt, 0, grid.lengths - 1)
        if columns.target is None:
            return grid.lengths - 1
        # The first lane of a piece is not trained, so trained ones begin behind one that is not.
        begins = np.flatnonzero(self._trained[1:] > self._trained[:-1]) + 1
        begins = np.append(begins, self._num_lanes)
        first = begins[np.searchsorted(begins, self._lanes)]
        return np.maximum(self._lanes + grid.lengths - first, 0)

    def specs(self, response_length: int) -> dict[str, Any]:
        """As ``Mover.specs``."""
        return token_specs(self._grid, response_length)

    def fill(self, batch: Batch, pad_token_id: int, divisor: int) -> None:
        """As ``Mover.fill``."""
        names = ("input_ids", "labels", "attention_mask")
        fields = [batch[name].numpy().reshape(-1) for name in names]
        lanes = fields
        if not self._is_dense:
            lanes = [host_array(self._num_lanes, np.int64) for _ in names]
        input_ids, labels, attention_mask = lanes
        self._gather(self._columns.input_ids.values, input_ids, pad_token_id)
        self._check_token_ids(input_ids)
        if self._labels is not None:
            labels[:] = self._labels
        else:  # arithmetic: a masked copy takes five times as long where the mask is irregular
            np.subtract(input_ids, IGNORE_INDEX, out=labels)
            labels *= self._trained
            labels += IGNORE_INDEX
        attention_mask.fill(1)
        self._fill_gaps(attention_mask, 0)
        if not self._is_dense:
            fills = (pad_token_id, IGNORE_INDEX, 0)
            for field, values, value in zip(fields, lanes, fills, strict=True):
                self._scatter(values, field, value)
        self._fill_positions(batch["position_ids"].numpy().reshape(-1))
        self._fill_loss_mask(batch["loss_mask"].numpy(), divisor)

    def _scatter(self, lanes: np.ndarray, out: np.ndarray, fill: Any) -> None:
        """From lanes that are tokens to the cells of the grid."""
        out.fill(fill)
        out[self._token_cells] = lanes

    def _fill_positions(self, positions: np.ndarray) -> None:
        segments = self._grid.segment_lengths
        if segments is None:
            lanes = host_array(self._grid.num_tokens, np.int64)
            self._scatter(position_ids_from_lengths(self._grid.lengths, out=lanes), positions, 0)
        else:
            position_ids_from_lengths(segments.values, out=positions)

    def _fill_loss_mask(self, loss_mask: np.ndarray, divisor: int) -> None:
        """The last columns of every row, divided."""
        grid, weights = self._grid, self._weights
        first_column = grid.width - loss_mask.shape[1]
        if self._is_dense:
            of_cells = weights.reshape(grid.num_rows, grid.width)
            np.divide(of_cells[:, first_column:], np.float32(divisor), out=loss_mask)
            return
        rows, columns = np.divmod(grid.cells, grid.width)
        skipped = np.clip(first_column - columns, 0, grid.lengths)
        cells = rows * loss_mask.shape[1] + columns + skipped - first_column
        kept = grid.lengths - skipped
        loss_mask.fill(0)
        divided = weights[spans(self._lanes + skipped, kept)] / np.float32(divisor)
        loss_mask.reshape(-1)[spans(cells, kept)] = divided

    def _check_token_ids(self, input_ids: np.ndarray) -> None:
        if input_ids.min(initial=0) < 0:
            lane = int(np.flatnonzero(input_ids < 0)[0])
            example, token = self._where(lane)
            raise DataError(
                f"{example}: input_ids is {input_ids[lane]} at token {token}; token ids are 0 or "
                "more (-100 belongs into labels)"
            )

    def _check_labels(self, labels: np.ndarray) -> None:
        bad = (labels < 0) & (labels != IGNORE_INDEX)
        if bad.any():
            lane = int(np.flatnonzero(bad)[0])
            example, token = self._where(lane)
            raise DataError(
                f"{example}: labels is {labels[lane]} at token {token}; a label is a token id, or "
                f"{IGNORE_INDEX} where nothing is trained"
            )

    def _where(self, lane: int) -> tuple[str, int]:
        """The example and its token that lie in a lane, for messages."""
        piece = int(np.searchsorted(self._lanes, lane, side="right")) - 1
        token = lane - int(self._lanes[piece]) + int(self._grid.starts[piece])
        return f"example {self._grid.examples[piece]}", token
