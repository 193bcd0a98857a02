"""Targets at a depth: what the cell of a token predicts that many tokens on in its segment."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_collate_kit._checks import checked_int
from torch_collate_kit.batch.context_shards import DEPTH, check_whole
from torch_collate_kit.batch.dense import cells_of_rows, make_field
from torch_collate_kit.batch.fields import IGNORE_INDEX
from torch_collate_kit.batch.placement import Placement
from torch_collate_kit.batch.storage import Storage
from torch_collate_kit.ragged import span_indices


class Targets(NamedTuple):
    """Pairs of a cell and a token that it predicts, ``[n]`` each, ordered by that token.

    With a depth of 1 the order is that of :func:`~torch_collate_kit.losses.trained_values`.
    """

    cells: Tensor
    """int64, the predicting cells: indices of ``[R * W]``, of a tree several times each."""
    ids: Tensor
    """int64, the labels of the predicted tokens."""
    weights: Tensor
    """float32, their loss weights, not divided by any count."""


def pairs_of(batch: Any, stored: Storage, depth: int) -> Targets:
    """Return ``Batch.targets``; ``stored`` is what the batch stores."""
    checked_int("depth", depth, hint=DEPTH)
    instead = 'its field "targets" has the target of each cell'
    check_whole(stored, "take the targets of", "asked for pairs", instead)
    columns, given, placement = stored.columns, stored.given, stored.columns.placement
    mask: Any = given.get("loss_mask")
    divisor = 1 if mask is None else stored.metadata.get("loss_mask_divisor", 1)
    if mask is None:
        mask = make_field("loss_mask", columns, batch._shared, {})
    weights = (pad(mask, (placement.width - mask.shape[1], 0)) * float(divisor)).flatten()
    outside = torch.from_numpy(_without_target(placement, depth, len(weights)))
    weights.index_fill_(0, outside.to(weights.device, non_blocking=True), 0)
    tokens = weights.nonzero()[:, 0]  # the one wait, for their number
    cells, predicting = tokens, tokens - depth
    if placement.tree_width:
        of_tokens = cells_of_rows(batch).flatten()
        cells, predicting = of_tokens[cells], of_tokens[predicting]
    ids = batch["input_ids"].flatten()[cells]
    if "labels" in columns.values or "labels" in given:
        labels = batch["labels"].flatten()[tokens]
        ids = torch.where(labels == IGNORE_INDEX, ids, labels)
    return Targets(predicting, ids, weights[tokens])


def _without_target(placement: Placement, depth: int, number: int) -> np.ndarray:
    """Return which of ``number`` tokens, pads included, no token of their segment predicts."""
    firsts, lengths = placement.first_cells(), placement.segments["lengths"].values
    ends = np.append(0, firsts + lengths)
    begins = np.append(firsts + np.minimum(depth, lengths), number)
    return span_indices(ends, begins - ends)
