"""Targets at a depth: what the cell of a token predicts that many tokens on in its segment."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_collate_kit.batch.context_shards import check_whole
from torch_collate_kit.batch.dense import (
    cells_of_rows,
    cells_without,
    make_field,
    trained_labels,
)
from torch_collate_kit.batch.fields import IGNORE_INDEX
from torch_collate_kit.batch.storage import Storage


class Targets(NamedTuple):
    """Pairs of a cell and a token that it predicts, ``[n]`` each, in the order of those tokens.

    ``cells``, int64, are indices of ``[R * W]``, where segments share prefixes several times each;
    ``ids``, int64, the labels; ``weights``, float32, their loss weights, not divided by a count.
    """

    cells: Tensor
    ids: Tensor
    weights: Tensor


def pairs_of(batch: Any, stored: Storage, depth: int) -> Targets:
    """Return ``Batch.targets``; ``stored`` is what the batch stores."""
    instead = 'its field "targets" has the target of each cell'
    check_whole(stored, depth, "take the targets of", "asked for pairs", instead)
    columns, placement = stored.columns, stored.columns.placement
    mask: Any = stored.given.get("loss_mask")
    divisor = 1 if mask is None else stored.metadata.get("loss_mask_divisor", 1)
    if mask is None:
        mask = make_field("loss_mask", columns, batch._shared, {})
    weights = (pad(mask, (placement.width - mask.shape[1], 0)) * float(divisor)).flatten()
    labels = trained_labels(batch)
    if labels is not None:
        weights = weights * (labels.flatten() != IGNORE_INDEX)
    without = torch.from_numpy(cells_without(placement, len(weights), depth))
    weights.index_fill_(0, without.to(weights.device, non_blocking=True), 0)
    tokens = weights.nonzero()[:, 0]  # the one wait, for their number
    cells, predicting = tokens, tokens - depth
    if placement.tree_width:
        of_tokens = cells_of_rows(batch).flatten()
        cells, predicting = of_tokens[cells], of_tokens[predicting]
    if labels is None and ("labels" in columns.values or "input_ids" in stored.given):
        labels = batch.get("labels")  # which the ids are not, or no more
    ids = batch["input_ids"].flatten()[cells] if labels is None else labels.flatten()[tokens]
    return Targets(predicting, ids, weights[tokens])
