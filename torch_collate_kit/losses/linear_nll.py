"""Losses and log-probs through the last linear layer: [T, V] logits never exist at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Tokens at a time: 0.6 GB of fp32 logits with a vocabulary of 152,000. Fewer make the products too
# narrow to keep a GPU busy, and add to the gradient of the weight more often.
_CHUNK = 1024


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

    What a log-prob weighs in the loss is known only after all of them, so the backward pass makes
    the logits of a chunk again: one product more than ``linear_nll``, and the same memory.
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
