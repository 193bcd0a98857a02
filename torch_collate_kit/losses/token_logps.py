"""Log-probabilities and losses of tokens, from logits or through the last linear layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torch_collate_kit.batch import IGNORE_INDEX, Batch
from torch_collate_kit.batch.context_shards import is_shard
from torch_collate_kit.batch.dense import cells_of_rows, trained_labels
from torch_collate_kit.batch.unpacking import (
    before_and_at,
    in_rows,
    shares_prefixes,
    targets_of,
    token_width,
)
from torch_collate_kit.ragged import Ragged

# Tokens at a time: 0.6 GB of fp32 logits with a vocabulary of 152,000. Fewer make the products too
# narrow to keep a GPU busy, and add to the gradient of the weight more often.
_CHUNK = 1024
_HALF = (torch.float16, torch.bfloat16)


def token_logps(
    logits: Tensor,
    batch: Batch,
    *,
    head: nn.Linear | None = None,
    logit_softcap: float | None = None,
) -> Tensor:
    """Return the log-probability of each trained token, [n], with a graph; fp32 for half.

    Trained are the cells of ``loss_mask`` that are not 0 and whose label is not -100, row by row.
    Log-probs are of the labels, which may differ from the ids, and are not weighted.
    :func:`segment_sums` adds them up, and :func:`~torch_collate_kit.losses.trained_values` selects
    other fields at the same tokens.

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
    mask, cells = loss_mask_of(batch), batch["input_ids"]
    logits = in_rows(logits, *cells.shape)
    check_fit(logits, cells, mask.shape[1], from_batch=not shares_prefixes(batch))
    targets = trained_values(_labels_of(batch), batch)
    taken = predicting(logits, trained_cells(batch), mask.shape[1], batch)
    if head is not None:
        return linear_logps(taken, head.weight, head.bias, targets, logit_softcap)
    return -F.cross_entropy(widened(taken), targets, reduction="none")


def _labels_of(batch: Batch) -> Tensor:
    """Return the label of each trained token, [R, U]; elsewhere anything."""
    labels = trained_labels(batch)
    name = "targets" if is_shard(batch) else "labels"
    if labels is None:
        labels = batch[name] if name in batch else ids_of_tokens(batch)
    return labels


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
    num_rows, num_columns = loss_mask_of(batch).shape
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
    """Return the trained cells of ``loss_mask``, int64 [n] over all rows, on its device."""
    is_trained = is_trained_in(batch).flatten()
    stored, counts = batch.stored(), batch.row_metadata.get("num_trained")
    number = int(counts.values.sum()) if isinstance(counts, Ragged) else None
    if stored.columns and (shard := stored.columns.placement.shard) is not None:
        number = shard.num_trained
    has_changed = not {"loss_mask", "labels", "targets"}.isdisjoint(stored.given)
    if number is None or not stored.columns or has_changed:
        return is_trained.nonzero()[:, 0]
    cells = torch.arange(len(is_trained), device=is_trained.device)
    places = torch.where(is_trained, is_trained.cumsum(0) - 1, number)
    return cells.new_full((number + 1,), -1).scatter_(0, places, cells)[:number]


def is_trained_in(batch: Batch) -> Tensor:
    """Return where ``loss_mask`` is not 0 and the label is not -100: bool, as ``loss_mask``."""
    mask, labels = loss_mask_of(batch), trained_labels(batch)
    if labels is None:
        return mask != 0
    return (mask != 0) & (labels[:, labels.shape[1] - mask.shape[1] :] != IGNORE_INDEX)


def loss_mask_of(batch: Batch) -> Tensor:
    """Return ``batch["loss_mask"]``. ValueError of a batch in which no token has a target."""
    if targets_of(batch) is None:
        raise ValueError(
            "the batch has targets=None, so no token has a target; pool hidden states with "
            "losses.segment_pool, and divide the loss by losses.global_num_examples"
        )
    return cast("Tensor", batch["loss_mask"])


def check_batch(batch: Any) -> None:
    """Check that ``batch`` is a Batch."""
    if not isinstance(batch, Batch):
        raise TypeError(
            f"batch must be the Batch that the collator returned, got {type(batch).__name__}"
        )


def linear_nll(
    hidden_KH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_K: Tensor,
    loss_weights_K: Tensor,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of token losses (scalar), and each loss [K] without a gradient.

    The logits are ``softcap * tanh((hidden @ weight.T + bias) / softcap)``, or without the cap.
    Their gradient is made with them, chunk by chunk, in the forward pass (Hsu et al., "Liger
    Kernel", 2024): the head costs as many products as with whole logits, and its memory is that
    of one chunk and of the gradients. Results are fp32 for half inputs. Under autocast products are
    in its dtype (float32 for float16). The gradient of the weight is summed in the weight's dtype.
    """
    apply: Callable[..., tuple[Tensor, Tensor]] = _LinearNll.apply
    inputs = (hidden_KH, weight_VH, bias_V)
    wanted = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]
    return apply(*inputs, targets_K, loss_weights_K, softcap, wanted)


def linear_logps(
    hidden_KH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_K: Tensor,
    softcap: float | None,
) -> Tensor:
    """Return the log-probability of each target, [K], with a graph; logits as ``linear_nll``.

    The weight of a log-prob in the loss is known only after all are computed, so the backward pass
    makes the logits of a chunk again: one product more than ``linear_nll``, the same memory.
    """
    apply: Callable[..., Tensor] = _LinearLogps.apply
    return apply(hidden_KH, weight_VH, bias_V, targets_K, softcap)


class _LinearNll(torch.autograd.Function):
    """``linear_nll`` with the gradients of its forward pass; its backward pass runs once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        loss_weights: Tensor,
        softcap: float | None,
        wanted: list[bool],
    ) -> tuple[Tensor, Tensor]:
        dtype = _product_dtype(hidden)
        pairs = zip((hidden, weight, bias), wanted, strict=True)
        inputs = [x if want else None for x, want in pairs]
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        ctx.gradients = _no_gradients(inputs)
        nll = hidden.new_empty(len(hidden), dtype=torch.promote_types(dtype, torch.float32))
        with _without_autocast(hidden.device.type):
            for part, states, used_weight, logits in _chunks(hidden, weight, bias, dtype):
                of_part = loss_weights[part] if any(wanted) else None
                nll[part], slope = _nll_and_slope(logits, targets[part], of_part, softcap)
                if slope is not None:
                    _add_gradients(ctx.gradients, part, slope.to(dtype), states, used_weight)
        ctx.mark_non_differentiable(nll)
        trained = loss_weights != 0  # an infinite loss that is not trained must not become 0 * inf
        return (torch.where(trained, nll, 0) * loss_weights.to(nll.dtype)).sum(), nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "the loss through the head was already sent backward: its gradients are made once, "
                "and scaled in place; compute the loss again"
            )
        scaled = [
            None if g is None else g.mul_(grad_total.to(g.dtype)).to(dtype)
            for g, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None, None)


class _LinearLogps(torch.autograd.Function):
    """``linear_logps``, whose backward pass makes the logits of each chunk again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        softcap: float | None,
    ) -> Tensor:
        ctx.dtype, ctx.softcap = _product_dtype(hidden), softcap
        ctx.save_for_backward(hidden, weight, bias, targets)
        logps = hidden.new_empty(len(hidden), dtype=torch.promote_types(ctx.dtype, torch.float32))
        with _without_autocast(hidden.device.type):
            for part, _, _, logits in _chunks(hidden, weight, bias, ctx.dtype):
                nll, _ = _nll_and_slope(logits, targets[part], None, softcap)
                logps[part] = nll.neg_()
        return logps

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        pairs = zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        gradients = _no_gradients([x if want else None for x, want in pairs])
        with _without_autocast(grad.device.type):
            for part, states, used_weight, logits in _chunks(hidden, weight, bias, ctx.dtype):
                _, slope = _nll_and_slope(logits, targets[part], -grad[part], ctx.softcap)
                assert slope is not None
                _add_gradients(gradients, part, slope.to(ctx.dtype), states, used_weight)
        return (*gradients, None, None)  # autograd casts them to the dtypes of the inputs


def _chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield each part with its hidden states, the weight and its logits, fp32 for half."""
    used_weight = weight.to(dtype)
    used_bias = None if bias is None else bias.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    for start in range(0, len(hidden), _CHUNK):
        part = slice(start, start + _CHUNK)
        states = hidden[part].to(dtype)
        yield part, states, used_weight, F.linear(states, used_weight, used_bias).to(wide)


def _no_gradients(inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return zeros for each input whose gradient is wanted, else None."""
    return [None if x is None else torch.zeros_like(x, dtype=_wide(x.dtype)) for x in inputs]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for float16, which loses gradients before a GradScaler's factor."""
    return torch.float32 if dtype == torch.float16 else dtype


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of autocast, else of the hidden states; float32 for float16."""
    device, dtype = hidden.device.type, hidden.dtype
    can_autocast = torch.amp.is_autocast_available(device)
    if can_autocast and dtype != torch.float64 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return _wide(dtype)


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    if not torch.amp.is_autocast_available(device):  # meta, which torch.autocast refuses
        return nullcontext()
    return torch.autocast(device, enabled=False)


def _nll_and_slope(
    logits: Tensor, targets: Tensor, loss_weights: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return the token losses and the gradient of their weighted sum; overwrites ``logits``."""
    capped = None
    if softcap is not None:
        capped = logits.div_(softcap).tanh_()
        logits = capped * softcap
    log_sums = logits.logsumexp(dim=1)
    nll = log_sums - logits.gather(1, targets[:, None])[:, 0]
    if loss_weights is None:
        return nll, None
    slope = logits.sub_(log_sums[:, None]).exp_()  # the probabilities
    slope.scatter_add_(1, targets[:, None], slope.new_full((len(targets), 1), -1))
    slope.mul_(loss_weights[:, None].to(slope.dtype))
    if capped is not None:
        slope.mul_(1 - capped * capped)
    return nll, slope.masked_fill_((loss_weights == 0)[:, None], 0)


def _add_gradients(
    gradients: list[Tensor | None], part: slice, slope: Tensor, states: Tensor, weight: Tensor
) -> None:
    """Add a chunk's gradients of the hidden states, the weight and the bias."""
    of_hidden, of_weight, of_bias = gradients
    if of_hidden is not None:
        of_hidden[part] = slope @ weight
    if of_weight is not None:
        if of_weight.dtype == slope.dtype:
            of_weight.addmm_(slope.T, states)
        else:
            of_weight.add_(slope.T @ states)
    if of_bias is not None:
        of_bias.add_(slope.sum(dim=0))


def predicting(
    logits: Tensor, tokens: Tensor, num_columns: int, batch: Batch | None = None
) -> Tensor:
    """Return the logits [K, V] that predict tokens of ``[R, num_columns]``, int64 [K].

    Rows of logits end where those of the tokens end, and each token is predicted by the cell before
    it: where segments of the batch share prefixes, by that on its path. In a context shard each
    entry is that of the cell which predicts it. With ``targets="same_token"`` it is its own cell.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    if batch is not None and is_shard(batch):
        return flat.index_select(0, tokens)
    if batch is not None and shares_prefixes(batch):
        return flat.index_select(0, before_and_at(batch, tokens)[0])
    more = logits.shape[-2] - num_columns
    shift = more - (targets_of(batch) == "next_token")
    return flat.index_select(0, tokens + tokens // max(num_columns, 1) * more + shift)


def ids_of_tokens(batch: Batch) -> Tensor:
    """Return the id of every token, int64 [R, U]; where no cell is shared, ``input_ids``."""
    token_width(batch)  # refuses tensors alone
    ids: Tensor = batch["input_ids"]
    return ids.flatten()[cells_of_rows(batch)] if shares_prefixes(batch) else ids


def widened(values: Tensor) -> Tensor:
    """Return half precision as float32, everything else as it is."""
    return values.float() if values.dtype in _HALF else values


def check_floats(name: str, values: Any, hint: str = "pass model(...).logits") -> None:
    """Check that ``values`` is a tensor of floats."""
    if not isinstance(values, Tensor) or not values.is_floating_point():
        found = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{name} must be a tensor of floats, got {found}; {hint}")


def is_one_number(value: Any) -> bool:
    """Return whether a value is one number; bools are not."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def check_head(hidden: Tensor, head: Any, softcap: float | None) -> None:
    """Check that the head is a plain linear layer that fits these hidden states."""
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
    if softcap is not None and not (is_one_number(softcap) and 0 < softcap < math.inf):
        raise ValueError(f"logit_softcap must be a number above 0 or None, got {softcap!r}")


def check_fit(logits: Tensor, labels: Tensor, response_length: int, *, from_batch: bool) -> None:
    """Refuse logits of other rows or columns than the labels have."""
    fits = logits.ndim == labels.ndim + 1 and logits.shape[:-2] == labels.shape[:-1]
    if fits and logits.shape[-2] != labels.shape[-1]:
        fits = from_batch and response_length < logits.shape[-2] < labels.shape[-1]
    if not fits:
        can_be_cut = from_batch and response_length < labels.shape[-1]
        also = f", or at least its last {response_length + 1} columns" if can_be_cut else ""
        raise ValueError(
            f"logits have shape {list(logits.shape)}, labels {list(labels.shape)}; pass logits of "
            f"the same rows, not shifted: {[*labels.shape, 'V']}{also}"
        )
    if logits.device != labels.device:
        raise ValueError(
            f"logits are on {logits.device}, labels on {labels.device}; call batch.to(device) with "
            "the device of the model first"
        )
