"""Log-probabilities of the trained tokens of a batch, and its other values there."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_collate_kit.batch import IGNORE_INDEX, Batch
from torch_collate_kit.batch.context_shards import is_shard
from torch_collate_kit.batch.unpacking import in_rows, shares_prefixes, token_width
from torch_collate_kit.losses.linear_nll import linear_logps
from torch_collate_kit.losses.model_outputs import (
    check_fit,
    check_floats,
    check_head,
    ids_of_tokens,
    predicting,
    widened,
)
from torch_collate_kit.ragged import Ragged


def token_logps(
    logits: Tensor,
    batch: Batch,
    *,
    head: nn.Linear | None = None,
    logit_softcap: float | None = None,
) -> Tensor:
    """Return the log-probability of each trained token, [n], with a graph; fp32 for half.

    Trained are the cells of ``loss_mask`` that are not 0, row by row. Log-probs are of the labels,
    which may differ from the ids, and are not weighted. :func:`segment_sums` adds them up, and
    :func:`~torch_collate_kit.losses.trained_values` takes other fields at the same tokens.

    With ``head`` the logits of at most 1,024 tokens exist at a time, here and in the backward pass,
    which computes them again: what a log-prob weighs need not be known before. The loss of
    :func:`token_loss` needs no second computation.

    Args:
        logits: as for :func:`token_loss`: ``[R, W, V]``, only the last ``K >= A + 1`` columns, or
            ``[1, R * W, V]``. With ``head`` hidden states of that shape.
        batch: padded, packed, of rollouts, or a context shard, whose targets are trained. The host
            waits for the device only where ``loss_mask`` was replaced or changed in place, or a
            batch there was cut into shards, to count.
        head: the layer that makes logits of hidden states, ``model.lm_head``.
        logit_softcap: with ``head``, ``config.final_logit_softcapping`` of Gemma models.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: arguments of another type.

    >>> from torch_collate_kit import PackedCollator, token_logps
    >>> batch = PackedCollator(0, max_tokens=8)([{"input_ids": [1, 2]}, {"input_ids": [3, 1, 2]}])
    >>> token_logps(torch.zeros(1, 5, 4), batch)  # log(1/4)
    tensor([-1.3863, -1.3863, -1.3863])
    """
    check_floats("logits", logits)
    check_batch(batch)
    check_head(logits, head, logit_softcap)
    mask, cells = batch["loss_mask"], batch["input_ids"]
    logits = in_rows(logits, *cells.shape)
    check_fit(logits, cells, mask.shape[1], from_batch=not shares_prefixes(batch))
    if is_shard(batch):
        name, ids = "targets", batch.get("target_ids", batch["targets"])
    else:
        name, ids = "labels", ids_of_tokens(batch)
    targets = trained_values(ids, batch)
    taken = predicting(logits, trained_cells(batch), mask.shape[1], batch)
    if name in batch:
        labels = trained_values(batch[name], batch)
        targets = torch.where(labels == IGNORE_INDEX, targets, labels)
    if head is not None:
        return linear_logps(taken, head.weight, head.bias, targets, logit_softcap)
    return -F.cross_entropy(widened(taken), targets, reduction="none")


def trained_values(values: Tensor, batch: Batch) -> Tensor:
    """Return the values at the trained tokens, [n, ...], as :func:`token_logps` orders them.

    ``values`` ``[R, C, ...]`` end where the rows end, such as fields ``[R, W]`` and ``[R, A]``:
    ``ratios = (token_logps(...) - trained_values(batch["rollout_logprobs"], batch)).exp()``.
    Gradients flow, and nothing waits for the device, but as in ``token_logps``.

    Raises:
        ValueError: other rows than the batch has, or fewer columns than its ``loss_mask``.
        TypeError: neither a tensor nor a Batch.

    >>> from torch_collate_kit import PaddedCollator
    >>> batch = PaddedCollator(0)([{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]}])
    >>> trained_values(batch["input_ids"], batch)
    tensor([6])
    """
    if not isinstance(values, Tensor):
        raise TypeError(f"values must be a tensor, got {type(values).__name__}")
    check_batch(batch)
    num_rows, num_columns = batch["loss_mask"].shape
    values = in_rows(values, num_rows, token_width(batch))
    if values.ndim < 2 or len(values) != num_rows or values.shape[1] < num_columns:
        raise ValueError(
            f"values have shape {list(values.shape)}, loss_mask [{num_rows}, {num_columns}]; pass "
            "values of the same rows, with at least as many columns"
        )
    cells, more = trained_cells(batch), values.shape[1] - num_columns
    cells = cells + (cells // max(num_columns, 1) + 1) * more
    return values.flatten(0, 1).index_select(0, cells)


def trained_cells(batch: Batch) -> Tensor:
    """Return the cells of ``loss_mask`` that are not 0, int64 [n] over all rows, on its device."""
    is_trained = batch["loss_mask"].flatten() != 0
    stored, counts = batch.stored(), batch.row_metadata.get("num_trained")
    number = int(counts.values.sum()) if isinstance(counts, Ragged) else None
    if stored.columns and (shard := stored.columns.placement.shard) is not None:
        number = shard.num_trained
    if number is None or not stored.columns or "loss_mask" in stored.given:
        return is_trained.nonzero()[:, 0]
    cells = torch.arange(len(is_trained), device=is_trained.device)
    places = torch.where(is_trained, is_trained.cumsum(0) - 1, number)
    return cells.new_full((number + 1,), -1).scatter_(0, places, cells)[:number]


def check_batch(batch: Any) -> None:
    """Refuse what is no Batch."""
    if not isinstance(batch, Batch):
        raise TypeError(
            f"batch must be the Batch that the collator returned, got {type(batch).__name__}"
        )
