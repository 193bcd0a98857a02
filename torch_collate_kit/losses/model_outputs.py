"""Outputs of a model: their checks, and the logits (or hidden states) that predict given cells."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.context_shards import is_shard
from torch_collate_kit.batch.unpacking import (
    before_and_at,
    cells_of_rows,
    shares_prefixes,
    token_width,
)

_HALF = (torch.float16, torch.bfloat16)


def predicting(
    logits: Tensor, tokens: Tensor, num_columns: int, batch: Batch | None = None
) -> Tensor:
    """Return the logits [K, V] that predict tokens of ``[R, num_columns]``, int64 [K].

    Rows of logits end where those of the tokens end, and each token is predicted by the cell before
    it: where segments of the batch share prefixes, by that on its path. In a context shard each
    entry is that of the cell which predicts it.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    if batch is not None and is_shard(batch):
        return flat.index_select(0, tokens)
    if batch is not None and shares_prefixes(batch):
        return flat.index_select(0, before_and_at(batch, tokens)[0])
    last = logits.shape[-2] - 1
    before = tokens // max(num_columns, 1) * (last + 1 - num_columns) + (last - num_columns)
    return flat.index_select(0, tokens + before)


def ids_of_tokens(batch: Batch) -> Tensor:
    """Return the id of every token, int64 [R, U]; where no cell is shared, ``input_ids``."""
    token_width(batch)  # refuses tensors alone
    ids: Tensor = batch["input_ids"]
    return ids.flatten()[cells_of_rows(batch)] if shares_prefixes(batch) else ids


def widened(values: Tensor) -> Tensor:
    """Return half precision as float32, everything else as it is."""
    return values.float() if values.dtype in _HALF else values


def check_floats(name: str, values: Any, hint: str = "pass model(...).logits") -> None:
    """Refuse what is no tensor of floats."""
    if not isinstance(values, Tensor) or not values.is_floating_point():
        found = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{name} must be a tensor of floats, got {found}; {hint}")


def is_number(value: Any) -> bool:
    """Tell whether a value is one number; a bool is none."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def check_head(hidden: Tensor, head: Any, softcap: float | None) -> None:
    """Refuse a head that is no plain linear layer, or not of these hidden states."""
    if head is None:
        if softcap is not None:
            raise ValueError(
                f"logit_softcap={softcap} without head: logits of a model are capped already; "
                "remove it, or pass hidden states and head=model.lm_head"
            )
        return
    if (name := type(head).__name__).endswith("DataParallel") or hasattr(
        getattr(head, "weight", None), "full_tensor"
    ):
        raise TypeError(
            f"head is a {name} or has weights in parts, so the loss would not reach all ranks: "
            "wrap losses.ModelWithLoss(model), and call what DDP or FSDP returns"
        )
    is_plain = isinstance(head, torch.nn.Linear) and "forward" not in vars(head)
    is_plain = is_plain and type(head).forward is torch.nn.Linear.forward
    if not is_plain or head._forward_hooks or head._forward_pre_hooks:
        raise TypeError(
            "head must be a torch.nn.Linear without hooks or a forward of its own (as adapters "
            f"have), got {type(head).__name__}; without head pass the logits of the model"
        )
    if hidden.shape[-1] != head.in_features:
        raise ValueError(
            f"hidden states have shape {list(hidden.shape)}, head has {head.in_features} input "
            "features; with head pass model.model(...).last_hidden_state, not logits"
        )
    if head.weight.device != hidden.device:
        raise ValueError(
            f"head is on {head.weight.device}, the hidden states are on {hidden.device}; move one "
            "of them (on meta a head has no values: load its weights first)"
        )
    if softcap is not None and not (is_number(softcap) and 0 < softcap < math.inf):
        raise ValueError(f"logit_softcap must be a number above 0 or None, got {softcap!r}")


def check_fit(logits: Tensor, labels: Tensor, response_length: int, *, from_batch: bool) -> None:
    """Refuse logits of other rows or columns than the labels have."""
    fits = logits.ndim == labels.ndim + 1 and logits.shape[:-2] == labels.shape[:-1]
    if fits and logits.shape[-2] != labels.shape[-1]:
        fits = from_batch and response_length < logits.shape[-2] < labels.shape[-1]
    if not fits:
        also = f", or at least its last {response_length + 1} columns" if from_batch else ""
        raise ValueError(
            f"logits have shape {list(logits.shape)}, labels {list(labels.shape)}; pass logits of "
            f"the same rows, not shifted: {[*labels.shape, 'V']}{also}"
        )
    if logits.device != labels.device:
        raise ValueError(
            f"logits are on {logits.device}, labels on {labels.device}; call batch.to(device) with "
            "the device of the model first"
        )
