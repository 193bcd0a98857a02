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


def token_width(batch: Batch) -> int:
    """Return the tokens of a row, pads included; the cells of one without shared prefixes.

    Raises:
        ValueError: fields per token and per cell without the placement, which relates them.
    """
    if (placement := batch.placement) is not None:
        return placement.width
    width, mask = int(batch["input_ids"].shape[1]), batch.get("loss_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= max(width, 1):
        raise ValueError(
            f"loss_mask has {mask.shape[1]} columns, rows have {width} cells: of rows that share "
            "prefixes (share_prefixes) tensors alone do not say where tokens lie; pass the Batch "
            f"that the collator returned, otherwise a loss_mask of at most {width - 1} columns"
        )
    return width


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
