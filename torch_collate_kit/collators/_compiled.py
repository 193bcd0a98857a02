"""What ``Lanes`` does, as loops compiled by numba, to the same bytes. Imported on use.

The loops let go of the GIL, go over one piece at a time, so that it stays in the cache from field
to field, and are written so that the compiler finds vector instructions: slices instead of sums of
indices, arithmetic instead of branches. All signatures are compiled on import, and kept on disk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, float32, int32, int64, njit, types, uint8, void

from torch_collate_kit.batch import Batch
from torch_collate_kit.collators._columns import Columns
from torch_collate_kit.collators._grid import Grid
from torch_collate_kit.collators._lanes import Lanes, token_specs

__all__ = ["TOKEN_IDS", "CompiledLanes", "compiled_loop", "plain_ids", "read_only"]

TOKEN_IDS = int32, int64
_WEIGHTS = uint8, float32


def read_only(dtype: Any) -> Any:
    """A contiguous array that is not written; one that could be will do as well."""
    return types.Array(dtype, 1, "C", readonly=True)


def compiled_loop(*signatures: Any) -> Any:
    """A function compiled on import for these signatures; it lets go of the GIL."""
    return njit(list(signatures), nogil=True, cache=True, error_model="numpy")


_PIECES = types.UniTuple(read_only(int64), 3)  # first token, length, cell


class CompiledLanes:
    """As ``Lanes``, for examples with a mask of all their tokens, or without a target."""

    def __init__(self, grid: Grid, columns: Columns) -> None:
        self._grid, self._columns = grid, columns
        firsts = columns.input_ids.offsets[grid.examples] + grid.starts
        contiguous = np.ascontiguousarray
        self._pieces = firsts, contiguous(grid.lengths), contiguous(grid.cells)
        self._token_ids = plain_ids(columns.input_ids.values)
        if columns.target is None:
            self._weights = np.ones(int(grid.lengths.max(initial=0)), dtype=np.uint8)
            self._weight_firsts = np.zeros_like(firsts)
        else:
            self._weights, self._weight_firsts = _plain_weights(columns.target.values), firsts
        actions = np.empty_like(grid.lengths)
        num_loss_tokens, is_valid = _find_loss(
            self._weights, self._weight_firsts, self._pieces[1], actions
        )
        if not is_valid:
            self._refuse()
        self.num_loss_tokens = int(num_loss_tokens)
        self.num_actions = grid.lengths - 1 if columns.target is None else actions

    @staticmethod
    def supports(columns: Columns) -> bool:
        return columns.target_name != "labels" and columns.num_actions is None

    def specs(self, response_length: int) -> dict[str, Any]:
        """As ``Mover.specs``."""
        return token_specs(self._grid, response_length)

    def fill(self, batch: Batch, pad_token_id: int, divisor: int) -> None:
        """As ``Mover.fill``."""
        grid = self._grid
        names = ("input_ids", "labels", "attention_mask")
        input_ids, labels, mask = (batch[name].numpy().reshape(-1) for name in names)
        is_valid = _fill_tokens(
            self._token_ids,
            self._weights,
            self._weight_firsts,
            self._pieces,
            pad_token_id,
            np.float32(divisor),
            input_ids,
            labels,
            mask,
            batch["loss_mask"].numpy(),
            grid.width,
        )
        if not is_valid:
            self._refuse(batch, pad_token_id)
        positions = batch["position_ids"].numpy().reshape(-1)
        if grid.segment_lengths is None:
            _fill_positions(self._pieces[1], self._pieces[2], positions)
        else:
            lengths = np.ascontiguousarray(grid.segment_lengths.values)
            _fill_positions(lengths, np.cumsum(lengths) - lengths, positions)

    def _refuse(self, batch: Batch | None = None, pad_token_id: int = 0) -> None:
        """Raises what NumPy says is wrong."""
        lanes = Lanes(self._grid, self._columns)
        if batch is not None:
            lanes.fill(batch, pad_token_id, 1)
        raise AssertionError("the compiled loops refuse what NumPy takes")


def plain_ids(token_ids: np.ndarray) -> np.ndarray:
    """In one of ``TOKEN_IDS``, contiguous."""
    dtype = np.int32 if token_ids.dtype == np.int32 else np.int64
    return np.ascontiguousarray(token_ids, dtype=dtype)


def _plain_weights(weights: np.ndarray) -> np.ndarray:
    if weights.dtype == np.bool_:
        weights = weights.view(np.uint8)
    dtype = np.uint8 if weights.dtype == np.uint8 else np.float32
    return np.ascontiguousarray(weights, dtype=dtype)


@compiled_loop(
    *(
        types.Tuple((int64, boolean))(
            read_only(dtype), read_only(int64), read_only(int64), int64[::1]
        )
        for dtype in _WEIGHTS
    )
)
def _find_loss(weights: Any, firsts: Any, lengths: Any, num_actions: Any) -> Any:
    """The number of loss tokens, and whether all weights are valid; fills ``num_actions``."""
    total = num_bad = 0
    for piece in range(len(firsts)):
        length = lengths[piece]
        mine = weights[firsts[piece] : firsts[piece] + length]
        count = 0
        for i in range(length):
            weight = np.float32(mine[i])
            count += weight != 0
            num_bad += not (weight >= 0 and weight < np.inf)
        count -= np.float32(mine[0]) != 0  # nothing predicts the first token
        first = length
        if count:
            first = 1
            while np.float32(mine[first]) == 0:
                first += 1
        num_actions[piece] = length - first
        total += count
    return total, num_bad == 0


@compiled_loop(
    *(
        boolean(
            read_only(token_id),
            read_only(weight),
            read_only(int64),
            _PIECES,
            int64,
            float32,
            int64[::1],
            int64[::1],
            int64[::1],
            float32[:, ::1],
            int64,
        )
        for token_id in TOKEN_IDS
        for weight in _WEIGHTS
    )
)
def _fill_tokens(
    token_ids: Any,
    weights: Any,
    weight_firsts: Any,
    pieces: Any,
    pad_token_id: Any,
    divisor: Any,
    input_ids: Any,
    labels: Any,
    mask: Any,
    loss_mask: Any,
    width: Any,
) -> Any:
    """Fills the last four fields; whether no token id is negative."""
    firsts, lengths, cells = pieces
    first_column = width - loss_mask.shape[1]
    loss_mask[:] = 0
    bits, done = np.int64(0), 0
    for piece in range(len(firsts)):
        length, start = lengths[piece], cells[piece]
        stop = start + length
        input_ids[done:start] = pad_token_id
        labels[done:start] = -100
        mask[done:start] = 0
        done = stop
        ids = token_ids[firsts[piece] : firsts[piece] + length]
        mine = weights[weight_firsts[piece] : weight_firsts[piece] + length]
        out, label = input_ids[start:stop], labels[start:stop]
        for i in range(length):
            out[i] = np.int64(ids[i])
        for i in range(length):
            bits |= out[i]
        for i in range(length):
            kept = -np.int64(np.float32(mine[i]) != 0)  # all bits, or none
            label[i] = ((out[i] + 100) & kept) - 100
        label[0] = -100  # nothing predicts the first token
        mask[start:stop] = 1
        row, column = start // width, start % width
        skipped = min(max(first_column - column, 0), length)
        begin = max(column - first_column, 0)
        loss = loss_mask[row, begin : begin + length - skipped]
        kept_weights = mine[skipped:]
        for i in range(len(loss)):
            loss[i] = np.float32(kept_weights[i]) / divisor
        if not skipped:
            loss[0] = 0
    input_ids[done:] = pad_token_id
    labels[done:] = -100
    mask[done:] = 0
    return bits >= 0


@compiled_loop(void(read_only(int64), read_only(int64), int64[::1]))
def _fill_positions(lengths: Any, cells: Any, positions: Any) -> None:
    """0, 1, 2, ... in every span of cells, 0 between them."""
    done = 0
    for span in range(len(lengths)):
        start, stop = cells[span], cells[span] + lengths[span]
        positions[done:start] = 0
        out = positions[start:stop]
        for i in range(len(out)):
            out[i] = i
        done = stop
    positions[done:] = 0
