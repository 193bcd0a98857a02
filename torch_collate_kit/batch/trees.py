"""Rows whose segments share prefixes: where each token is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_collate_kit.batch.batch import Batch
from torch_collate_kit.batch.dense import cells_of_tokens


def shares_prefixes(batch: Any) -> bool:
    """Return whether rows of the batch have fewer cells than tokens, since segments share them."""
    placement = getattr(batch, "placement", None)
    return placement is not None and placement.tree_width > 0


def refuse_trees(batch: Any, what: str) -> None:
    """Refuse a batch whose segments share prefixes."""
    if shares_prefixes(batch):
        raise ValueError(
            f"{what} does not know rows whose segments share prefixes; collate without "
            "share_prefixes"
        )


def token_width(batch: Batch) -> int:
    """Return the tokens of a row, pads included; the cells of one without shared prefixes."""
    placement = batch.placement
    return int(batch["input_ids"].shape[1]) if placement is None else placement.width


def cells_of_rows(batch: Batch) -> Tensor:
    """Return the cell of every token, int64 [R, U] over all rows of cells; 0 at pads."""
    made, stored = batch._shared, batch.stored()
    if "cells of tokens" not in made:
        placement = stored.columns.placement
        with torch.inference_mode(False):
            places = torch.from_numpy(placement.cells("lengths"))
            cells = cells_of_tokens(stored.columns)
            dense = cells.new_zeros(stored.num_rows * placement.width)
            dense.scatter_(0, places.to(cells.device, non_blocking=True), cells)
        made["cells of tokens"] = dense.view(stored.num_rows, placement.width)
    return made["cells of tokens"]


def before_and_at(batch: Batch, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cells that predict tokens, and those of the tokens: int64 [K] each.

    ``tokens`` int64 [K] count the columns of ``[R, U - 1]``, of which the first token has none.
    """
    cells = cells_of_rows(batch)
    return cells[:, :-1].flatten()[tokens], cells[:, 1:].flatten()[tokens]
