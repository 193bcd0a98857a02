"""Ratios of two policies, importance weights, and estimates of the KL, for trained tokens [n]."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from torch_collate_kit._checks import checked_choice
from torch_collate_kit.batch import Batch
from torch_collate_kit.losses.segments import check_shape, spread_over_segments
from torch_collate_kit.losses.token_logps import check_batch, check_floats, trained_cells, widened

Level: TypeAlias = Literal["token", "sequence", "geometric"]
_BOUND = 20.0  # exp(20) is 4.9e8: what lies beyond says nothing more, and would end in inf and NaN


def log_ratios(logps: Tensor, old_logps: Tensor, batch: Batch, *, level: Level = "token") -> Tensor:
    """Return the log of the policy's probability over an old one's, [n], from -20 to 20.

    Both are ``[n]``, as :func:`~torch_collate_kit.token_logps` returns, or
    ``trained_values(batch["rollout_logprobs"], batch)``. Gradients flow to ``logps`` alone. NaN in
    ``old_logps``, of a token that the engine did not score, counts as the present policy: a ratio
    of 1, with its gradient. ``level`` is "token", or what each token of a segment gets of its
    trained tokens: "sequence", their sum, whose exponential is the importance weight, or
    "geometric", their mean, of GSPO (Zheng et al. 2025). A context shard has "token" alone.

    Raises:
        ValueError: other numbers of log-probs than trained tokens; an unknown level; a shard.
        TypeError: log-probs that are not tensors of floats; not a Batch.

    >>> from torch_collate_kit import PackedCollator
    >>> batch = PackedCollator(0, max_tokens=3)([{"input_ids": [5, 6, 7]}])
    >>> log_ratios(torch.tensor([-1.0, -2]), torch.tensor([-1.5, -1]), batch, level="sequence")
    tensor([-0.5000, -0.5000])
    """
    checked_choice("level", level, get_args(Level))
    check_batch(batch)
    ratios = _difference(logps, "old_logps", old_logps)
    check_shape("logps", logps, (len(trained_cells(batch)),), "trained tokens")
    if level != "token":
        ratios = spread_over_segments(ratios, batch, mean=level == "geometric")
    return ratios.clamp(-_BOUND, _BOUND)


def importance_weights(
    logps: Tensor,
    old_logps: Tensor,
    batch: Batch,
    *,
    level: Level = "token",
    low: float = 0.0,
    high: float = math.inf,
    outside: Literal["clamp", "zero"] = "clamp",
) -> Tensor:
    """Return ``exp(log_ratios(...))``, [n], detached: weights of losses on an old policy's samples.

    What is not from ``low`` to ``high`` becomes the nearer of them ("clamp": truncated importance
    sampling) or 0 ("zero": masked, IcePop). Raises as :func:`log_ratios`; ValueError also if not
    ``0 <= low <= high``.

    >>> from torch_collate_kit import PackedCollator
    >>> batch = PackedCollator(0, max_tokens=3)([{"input_ids": [5, 6, 7]}])
    >>> importance_weights(torch.tensor([-1.0, -2]), torch.tensor([-1.5, -1]), batch, high=1.5)
    tensor([1.5000, 0.3679])
    """
    checked_choice("outside", outside, ("clamp", "zero"))
    if not all(isinstance(one, (int, float)) for one in (low, high)) or not 0 <= low <= high:
        raise ValueError(
            f"low and high must be numbers, 0 <= low <= high, got {low!r} and {high!r}; math.inf "
            "is no limit"
        )
    weights = log_ratios(logps, old_logps, batch, level=level).detach().exp()
    is_inside = (weights >= low) & (weights <= high)
    return weights.clamp(low, high) if outside == "clamp" else torch.where(is_inside, weights, 0)


def kl_estimates(
    logps: Tensor, ref_logps: Tensor, *, kind: Literal["k1", "k2", "k3"] = "k3"
) -> Tensor:
    """Return estimates of KL(policy | reference) from samples of the policy, in their shape.

    With ``d = ref_logps - logps``: "k1" is ``-d``, "k2" ``d * d / 2``, "k3" ``exp(d) - 1 - d``
    with d up to 20 (Schulman, "Approximating KL divergence", 2020); 0 where the reference is NaN.
    Gradients flow to ``logps`` alone. ValueError: other shapes, or an unknown kind.

    >>> kl_estimates(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
    tensor([0.1065, 0.7183])
    """
    checked_choice("kind", kind, ("k1", "k2", "k3"))
    difference = -_difference(logps, "ref_logps", ref_logps)
    if kind != "k3":
        return -difference if kind == "k1" else difference.square() / 2
    return (difference := difference.clamp(max=_BOUND)).expm1() - difference


def _difference(logps: Any, name: str, others: Any) -> Tensor:
    """Return ``logps - others``; where these are NaN 0, with the gradient of the rest."""
    for of, given in (("logps", logps), (name, others)):
        check_floats(of, given, "pass log-probs of the trained tokens")
    if logps.shape != others.shape:
        shapes = f"{name} have shape {list(others.shape)}, logps {list(logps.shape)}"
        raise ValueError(f"{shapes}; of a field of the batch pass trained_values(field, batch)")
    logps, others = widened(logps), widened(others.detach())
    return logps - torch.where(others.isnan(), logps.detach(), others)
