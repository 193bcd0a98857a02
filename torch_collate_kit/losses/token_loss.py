"""Token-mean loss, from logits or through the head, and per-token outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_collate_kit._checks import checked_bool
from torch_collate_kit.batch import IGNORE_INDEX, Batch
from torch_collate_kit.batch.context_shards import is_shard
from torch_collate_kit.batch.unpacking import (
    cells_by_example,
    in_rows,
    response_cells,
    shares_prefixes,
    values_of_cells,
)
from torch_collate_kit.losses.linear_nll import linear_nll
from torch_collate_kit.losses.loss_tokens import check_labels
from torch_collate_kit.losses.model_outputs import (
    check_fit,
    check_floats,
    check_head,
    ids_of_tokens,
    is_number,
    predicting,
    widened,
)

_COUNT = "pass the loss tokens of the step, as global_num_loss_tokens(micro_batches) returns them"


@dataclass(frozen=True)
class PerTokenOutputs:
    """Values of the response tokens, one array per example, in the order of the examples.

    ``example_indices`` int64 ``[E]``, ascending, names the examples of the batch's rows. ``nll[i]``
    float32 ``[n]``, in host memory, has the last ``n = row_metadata["num_actions"]`` tokens of
    example ``example_indices[i]``. The pieces of a split example are joined in order, without the
    first token of each piece, which nothing predicts. An added row has no example.

    >>> from torch_collate_kit import PackedCollator
    >>> batch = PackedCollator(0, max_tokens=8)([{"input_ids": [1, 2]}, {"input_ids": [3, 1, 2]}])
    >>> logits = torch.zeros(1, 5, 4)
    >>> _, outputs = token_loss(logits, batch, num_loss_tokens=3, return_per_token_outputs=True)
    >>> outputs.example_indices.tolist(), [len(values) for values in outputs.nll]
    ([0, 1], [1, 2])
    """

    example_indices: np.ndarray
    nll: list[np.ndarray]

    @property
    def log_probs(self) -> list[np.ndarray]:
        """Log-probabilities of the same tokens: ``-nll``, a copy."""
        return [-values for values in self.nll]


@overload
def token_loss(
    logits: Tensor,
    batch_or_labels: Batch | Tensor,
    *,
    num_loss_tokens: float | Tensor,
    head: torch.nn.Linear | None = None,
    logit_softcap: float | None = None,
    return_per_token_outputs: Literal[False] = False,
) -> Tensor: ...
@overload
def token_loss(
    logits: Tensor,
    batch_or_labels: Batch | Tensor,
    *,
    num_loss_tokens: float | Tensor,
    head: torch.nn.Linear | None = None,
    logit_softcap: float | None = None,
    return_per_token_outputs: Literal[True],
) -> tuple[Tensor, PerTokenOutputs]: ...
def token_loss(
    logits: Tensor,
    batch_or_labels: Batch | Tensor,
    *,
    num_loss_tokens: float | Tensor | None = None,
    head: torch.nn.Linear | None = None,
    logit_softcap: float | None = None,
    return_per_token_outputs: bool = False,
) -> Tensor | tuple[Tensor, PerTokenOutputs]:
    """Divide the sum of weighted token losses by ``num_loss_tokens``: a scalar, fp32 for half.

    ``num_loss_tokens`` counts the whole optimizer step, over all micro-batches and ranks
    (:func:`global_num_loss_tokens`). Then the losses of all micro-batches and ranks add up to the
    token mean, whatever the layout. Where gradients are averaged over ranks
    (DistributedDataParallel), multiply the loss by ``dp_size``.

    From a collator's batch only the logits that predict response tokens are cast and kept for the
    backward pass. From plain labels, or where ``loss_mask`` was replaced or changed in place, all
    predicting cells are. Nothing waits for the device.

    With ``head`` the logits of at most 1,024 tokens exist at a time, here and in the backward pass:
    :class:`~torch_collate_kit.losses.ModelWithLoss` passes hidden states and head. The backward
    pass then runs once (no ``retain_graph``), and no change that the model makes to its
    logits is applied but ``logit_softcap``.

    Args:
        logits: ``[R, W, V]``, or with a Batch only the last ``K >= A + 1`` columns (as
            ``logits_to_keep=A + 1`` returns), where ``A = metadata["response_length"]``, or
            ``[1, R * W, V]`` of a model that gets all rows as one. With ``head`` hidden states of
            that shape, with the hidden size for V.
        batch_or_labels: the Batch (its ``loss_mask`` may hold weights, divided or not), or
            unshifted labels ``[R, W]`` with -100 where nothing is trained. A context shard takes
            logits of its own cells; the losses of all context ranks add up to that of the batch.
        num_loss_tokens: a number, or a scalar tensor on the device of the logits; 0 divides by 1.
            A tensor that is negative or not finite makes the loss NaN: checking would wait for it.
        head: the layer that makes logits of hidden states, ``model.lm_head``.
        logit_softcap: with ``head``, ``config.final_logit_softcapping`` of Gemma models.
        return_per_token_outputs: also return :class:`PerTokenOutputs`, copied to the host.

    Raises:
        ValueError: shapes that do not fit; a number that is negative, infinite or NaN; per-token
            outputs of plain labels, which do not say where examples lie.
        TypeError: arguments of another type.

    >>> logits = torch.zeros(1, 3, 4)
    >>> labels = torch.tensor([[-100, 2, 3]])
    >>> round(token_loss(logits, labels, num_loss_tokens=2).item(), 4)  # log(4)
    1.3863
    """
    num_loss_tokens = _checked_types(logits, batch_or_labels, num_loss_tokens)
    check_head(logits, head, logit_softcap)
    checked_bool("return_per_token_outputs", return_per_token_outputs)
    if isinstance(batch_or_labels, Tensor):
        if return_per_token_outputs:
            raise ValueError(
                "return_per_token_outputs needs a Batch, got plain labels, which do not say where "
                "examples lie; pass the Batch that the collator returned"
            )
        labels, mask = batch_or_labels, batch_or_labels[..., 1:] != IGNORE_INDEX
        check_fit(logits, labels, mask.shape[-1], from_batch=False)
        total, _ = _total_and_nll(logits, labels[..., 1:], mask, None, head, logit_softcap)
        return _divided(total, num_loss_tokens)
    batch = batch_or_labels
    mask, ids = batch["loss_mask"], ids_of_tokens(batch)
    hidden = ids.shape[1] - mask.shape[1]
    cells_RW = batch["input_ids"]
    logits = in_rows(logits, *cells_RW.shape)
    if is_shard(batch):
        if return_per_token_outputs:
            raise ValueError(
                "return_per_token_outputs needs whole examples, and a context shard has parts of "
                "them; join token_logps() of all ranks with attention.context_join()"
            )
        labels = batch["targets"]
    elif "labels" in batch:
        labels = batch["labels"]
    else:  # rollouts
        labels = torch.where(F.pad(mask, (hidden, 0)) != 0, ids, IGNORE_INDEX)
    check_fit(logits, cells_RW, mask.shape[1], from_batch=not shares_prefixes(batch))
    targets = labels[:, hidden:]
    if return_per_token_outputs:
        targets = torch.where(targets == IGNORE_INDEX, ids[:, hidden:], targets)
    cells = response_cells(batch)
    total, nll = _total_and_nll(logits, targets, mask, cells, head, logit_softcap, batch)
    loss = _divided(total * batch.metadata.get("loss_mask_divisor", 1), num_loss_tokens)
    if not return_per_token_outputs:
        return loss
    examples, of_examples = cells_by_example(batch, mask.shape[1])
    return loss, PerTokenOutputs(examples, list(values_of_cells(nll, of_examples, torch.float32)))


def _total_and_nll(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor,
    cells: Tensor | None,
    head: torch.nn.Linear | None,
    softcap: float | None,
    batch: Batch | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum, and the nll [R, A] of the targets in ``cells`` (None: all), else 0.

    The logits needed are selected before anything of the size of all logits is made.
    """
    flat_targets = targets.long().flatten()
    if cells is None:
        cells = torch.arange(len(flat_targets), device=logits.device)
    taken, wanted = predicting(logits, cells, targets.shape[-1], batch), flat_targets[cells]
    if head is not None:
        ignored = wanted == IGNORE_INDEX
        weights = mask.flatten()[cells].masked_fill(ignored, 0)
        wanted = wanted.masked_fill(ignored, 0)
        total, nll = linear_nll(taken, head.weight, head.bias, wanted, weights, softcap)
        nll = nll.masked_fill(ignored, 0)
    else:
        nll = F.cross_entropy(widened(taken), wanted, ignore_index=IGNORE_INDEX, reduction="none")
    nll = nll.new_zeros(len(flat_targets)).index_copy(0, cells, nll).view(targets.shape)
    if head is None:
        # where() first: an infinite loss of a token that is not trained must not become 0 * inf.
        total = (torch.where(mask != 0, nll, 0) * mask.to(nll.dtype)).sum()
    return total, nll


def _divided(total: Tensor, num_loss_tokens: float | Tensor) -> Tensor:
    if isinstance(num_loss_tokens, Tensor):
        number = num_loss_tokens.reshape(()).to(total.dtype)
        is_count = (number >= 0) & (number < math.inf)
        return total / torch.where(is_count, torch.where(number == 0, 1, number), math.nan)
    if not 0 <= num_loss_tokens < math.inf:  # NaN too
        raise ValueError(
            f"num_loss_tokens must be finite and 0 or more, got {num_loss_tokens}; {_COUNT}"
        )
    return total / (num_loss_tokens or 1)


def _checked_types(logits: Any, batch_or_labels: Any, num_loss_tokens: Any) -> float | Tensor:
    check_floats("logits", logits)
    if not isinstance(batch_or_labels, Batch | Tensor):
        raise TypeError(
            "the second argument must be the Batch or labels, got "
            f"{type(batch_or_labels).__name__}; pass what the collator returned"
        )
    if isinstance(batch_or_labels, Tensor):
        check_labels(batch_or_labels)
    if not (isinstance(num_loss_tokens, Tensor) or is_number(num_loss_tokens)):
        found = type(num_loss_tokens).__name__
        raise TypeError(f"num_loss_tokens must be a number, got {found}; {_COUNT}")
    if isinstance(num_loss_tokens, Tensor) and num_loss_tokens.numel() != 1:
        shape = list(num_loss_tokens.shape)
        raise ValueError(f"num_loss_tokens must be one number, got shape {shape}; {_COUNT}")
    return num_loss_tokens
