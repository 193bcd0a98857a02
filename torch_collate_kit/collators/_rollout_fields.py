"""What rollouts add to a batch, moved onto a grid: one left-padded block, or packed rows.

Tensors of the response are right-aligned: with ``A`` columns, column ``j`` is the cell
``width - A + j`` of the row, so that they match ``log_probs[:, -A-1:-1]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torch_collate_kit.batch import Batch
from torch_collate_kit.collators._fill import Mover
from torch_collate_kit.collators._grid import Grid, spans
from torch_collate_kit.collators._rollouts import Rollouts
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.segments import position_ids_from_lengths

__all__ = ["PackedRollouts", "RolloutBlock"]


class ResponseFields:
    """Fields of response tokens, and expert routes, for whole rollouts on a grid."""

    def __init__(self, grid: Grid, rollouts: Rollouts, names: list[str]) -> None:
        self._grid, self._rollouts, self._names = grid, rollouts, names

    def specs(self, response_length: int) -> dict[str, Any]:
        grid, routes = self._grid, self._rollouts.expert_indices
        shape = (grid.num_rows, response_length)
        specs: dict[str, Any] = {"response_mask": (shape, torch.int64)}
        specs |= dict.fromkeys(self._names, (shape, torch.float32))
        if routes is not None:
            cells = (grid.num_rows, grid.width)
            of_token = routes.values.shape[1:]
            specs["rollout_expert_indices"] = ((*cells, *of_token), torch.int16)
            specs["router_padding_mask"] = (cells, torch.bool)
        return specs

    def fill_values(self, batch: Batch, divisor: int) -> None:
        grid, rollouts = self._grid, self._rollouts
        counts = rollouts.response_ids.lengths[grid.examples]
        width = batch["response_mask"].shape[1]
        rows, columns = np.divmod(grid.cells, grid.width)
        first = columns + grid.lengths - counts - (grid.width - width)
        cells = spans(rows * width + first, counts)
        mask = batch["response_mask"].numpy().reshape(-1)
        mask.fill(0)
        mask[cells] = 1
        for name in self._names:
            out, values = batch[name].numpy().reshape(-1), self._in_order(rollouts.fields[name])
            out.fill(0)
            out[cells] = values / np.float32(divisor) if name == "loss_mask" else values

    def _in_order(self, column: Ragged) -> np.ndarray:
        """The values of a column, in the order of the pieces; as they lie where that is theirs."""
        if np.array_equal(self._grid.examples, np.arange(len(column))):
            return column.values
        return column.take(self._grid.examples).values

    def fill_routes(self, batch: Batch) -> None:
        """Tokens without a route get distinct experts: routers refuse one that is there twice."""
        routes = self._rollouts.expert_indices
        if routes is None:
            return
        indices = batch["rollout_expert_indices"].numpy()
        is_pad = batch["router_padding_mask"].numpy()
        indices[:] = np.arange(indices.shape[-1], dtype=np.int16)
        is_pad.fill(True)
        cells = spans(self._grid.cells, routes.lengths[self._grid.examples])
        indices.reshape(-1, *indices.shape[2:])[cells] = self._in_order(routes)
        is_pad.reshape(-1)[cells] = False


class RolloutBlock:
    """One rollout a row, as whole columns."""

    def __init__(self, grid: Grid, rollouts: Rollouts, *, compiled: bool) -> None:
        self._grid, self._rollouts, self._compiled = grid, rollouts, compiled
        self._responses = ResponseFields(grid, rollouts, list(rollouts.fields))
        self.num_loss_tokens = int(np.count_nonzero(rollouts.fields["loss_mask"].values))
        self.num_actions = rollouts.response_ids.lengths

    def specs(self, response_length: int) -> dict[str, Any]:
        """As ``Mover.specs``."""
        names = ("input_ids", "attention_mask", "position_ids")
        shape = (self._grid.num_rows, self._grid.width)
        specs: dict[str, Any] = dict.fromkeys(names, (shape, torch.int64))
        specs |= self._responses.specs(response_length)
        for name, images in self._rollouts.images.items():
            dtype = torch.float32 if name == "pixel_values" else torch.int64
            specs[name] = ((images.offsets, images.values.shape[1]), dtype)
        return specs

    def fill(self, batch: Batch, pad_token_id: int, divisor: int) -> None:
        """As ``Mover.fill``."""
        if self._compiled:
            from torch_collate_kit.collators._compiled_rollouts import fill_block

            fill_block(batch, self._rollouts, pad_token_id, divisor)
        else:
            self._fill_cells(batch, pad_token_id)
            self._responses.fill_values(batch, divisor)
        self._responses.fill_routes(batch)
        for name, images in self._rollouts.images.items():
            batch[name].values.numpy()[:] = images.values

    def _fill_cells(self, batch: Batch, pad_token_id: int) -> None:
        grid, rollouts = self._grid, self._rollouts
        names = ("input_ids", "attention_mask", "position_ids")
        input_ids, mask, positions = (batch[name].numpy().reshape(-1) for name in names)
        input_ids.fill(pad_token_id)
        first = grid.cells
        for ids in (rollouts.prompt_ids, rollouts.response_ids):
            input_ids[spans(first, ids.lengths)] = ids.values
            first = first + ids.lengths
        cells = grid.token_cells()
        mask.fill(0)
        mask[cells] = 1
        positions.fill(0)
        positions[cells] = position_ids_from_lengths(grid.lengths)


class PackedRollouts:
    """Rollouts in packed rows: what SFT examples have, by ``tokens``, and what rollouts add."""

    def __init__(self, grid: Grid, rollouts: Rollouts, tokens: Mover) -> None:
        names = [name for name in rollouts.fields if name != "loss_mask"]
        self._tokens, self._responses = tokens, ResponseFields(grid, rollouts, names)
        self.num_loss_tokens = tokens.num_loss_tokens
        self.num_actions = rollouts.response_ids.lengths[grid.examples]

    def specs(self, response_length: int) -> dict[str, Any]:
        """As ``Mover.specs``."""
        return self._tokens.specs(response_length) | self._responses.specs(response_length)

    def fill(self, batch: Batch, pad_token_id: int, divisor: int) -> None:
        """As ``Mover.fill``."""
        self._tokens.fill(batch, pad_token_id, divisor)
        self._responses.fill_values(batch, divisor)
        self._responses.fill_routes(batch)
