"""Losses of pairs of segments: DPO, KTO and Bradley-Terry rewards.

A pair's segments are neighbours. So ``sums[0::2]`` are those of the chosen answers, ``sums[1::2]``
those of the rejected ones, in a batch, its slices and its micro-batches.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_collate_kit.losses.token_logps import check_floats, widened
from torch_collate_kit.ragged import Ragged


class PreferenceLoss(NamedTuple):
    """Losses of pairs, and detached values to log; all float [P].

    ``loss`` sums up over micro-batches and ranks: divide ``loss.sum()`` by
    :func:`~torch_collate_kit.losses.global_num_examples`. A reward of :func:`kto` is NaN on the
    side that an example is not on, so log ``chosen_rewards.nanmean()``. ``accuracy`` is 1 where
    ``margin`` is above 0.

    >>> rewards = torch.tensor([2.0, -1.0, 0.0, 1.0])
    >>> bradley_terry(rewards).accuracy
    tensor([1., 0.])
    """

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    accuracy: Tensor
    margin: Tensor


def dpo(
    sums: Tensor, ref_sums: Tensor | Ragged, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> PreferenceLoss:
    """Return the DPO loss of pairs, equation 7 of Rafailov et al. (2023).

    Args:
        sums: ``[2P]``, log-probabilities of the answers, chosen and rejected in turn, as
            ``segment_sums(token_logps(...), batch)`` returns them.
        ref_sums: the same of the reference model: ``[2P]``, ``[P, 2]``, or a field of the batch.
        beta: above 0; large values keep the policy near the reference.
        label_smoothing: probability that a label is wrong, 0 to below 0.5 (conservative DPO,
            Mitchell 2023).

    Rewards are ``beta * (sums - ref_sums)``, ``margin`` chosen minus rejected. Nothing waits for
    the device.

    Raises:
        ValueError: an odd number of sums, another number of ``ref_sums``; options out of range.
        TypeError: sums that are not tensors of floats.

    >>> sums = torch.tensor([-1.0, -2.0])
    >>> round(dpo(sums, sums).loss.item(), 4)  # log(2), before the first step
    0.6931
    """
    _check_beta(beta)
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be 0 to below 0.5, got {label_smoothing}")
    rewards = beta * _log_ratios(sums, ref_sums)
    margin = rewards[0::2] - rewards[1::2]
    right, wrong = F.logsigmoid(margin), F.logsigmoid(-margin)
    loss = -(1 - label_smoothing) * right - label_smoothing * wrong
    return _pairs(loss, rewards, margin)


def kto(
    sums: Tensor,
    ref_sums: Tensor | Ragged,
    labels: Tensor | Ragged,
    *,
    beta: float = 0.1,
    kl: float | Tensor | None = None,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> PreferenceLoss:
    """Return the KTO loss of rated answers (Ethayarajh et al., 2024).

    Args:
        sums: ``[2P]``, log-probabilities in turn of an example's answer and of the answer to
            another prompt, which only estimates the KL divergence and gets no gradient.
        ref_sums: the same of the reference model: ``[2P]``, ``[P, 2]``, or a field of the batch.
        labels: ``[P]``, bool or 0 and 1: the answer is desirable.
        beta: above 0.
        kl: the reference point, the mean of ``(sums - ref_sums)[1::2]``; below 0 it counts as 0.
            None: from these sums. Where a step has several micro-batches or ranks, pass
            that of the whole step, or the loss depends on how it was divided.
        desirable_weight: factor of the loss of desirable answers.
        undesirable_weight: factor of the loss of the others.

    Rewards are ``beta * (sums - ref_sums)[0::2]``. ``margin`` is how far the reward lies above
    ``beta * kl``, or of an undesirable answer below. Nothing waits for the device: there a label
    that is neither 0 nor 1 makes its loss NaN.

    Raises:
        ValueError: an odd number of sums, other numbers of ``ref_sums`` or labels; labels in host
            memory that are neither 0 nor 1; options out of range.
        TypeError: sums that are not tensors of floats, labels that are floats.

    >>> sums = torch.tensor([-1.0, -5.0])
    >>> kto(sums, sums, torch.tensor([True])).loss
    tensor([0.5000])
    """
    _check_beta(beta)
    for name, value in (
        ("desirable_weight", desirable_weight),
        ("undesirable_weight", undesirable_weight),
    ):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a number from 0 on, got {value}")
    if kl is not None and (kl.numel() != 1 if isinstance(kl, Tensor) else not math.isfinite(kl)):
        found = list(kl.shape) if isinstance(kl, Tensor) else kl
        raise ValueError(f"kl must be one finite number, got {found}; take the mean over the step")
    ratios = _log_ratios(sums, ref_sums)
    rated, others = ratios[0::2], ratios[1::2]
    is_chosen, is_label = _checked_labels(labels, len(rated))
    if kl is None:
        kl = others.sum() / max(len(others), 1)
    point = kl.to(ratios) if isinstance(kl, Tensor) else ratios.new_full((), kl)
    point = point.detach().clamp(min=0)
    side = torch.where(is_chosen, 1, -1).to(ratios)
    margin = side * beta * (rated - point)
    weights = torch.where(is_chosen, desirable_weight, undesirable_weight).to(ratios)
    loss = torch.where(is_label, weights * torch.sigmoid(-margin), torch.nan)
    rewards, margin = beta * rated.detach(), margin.detach()
    chosen, rejected = (torch.where(of, rewards, torch.nan) for of in (is_chosen, ~is_chosen))
    return PreferenceLoss(loss, chosen, rejected, (margin > 0).to(margin), margin)


def bradley_terry(rewards: Tensor, margin: Tensor | Ragged | None = None) -> PreferenceLoss:
    """Return the loss of a reward model on pairs, ``-log sigmoid(chosen - rejected - margin)``.

    Bradley and Terry (1952); with a margin Touvron et al., "Llama 2" (2023), equation 2.

    Args:
        rewards: ``[2P]``, of the chosen and the rejected answer in turn, such as the outputs of a
            score head at ``segment_ends(batch)``.
        margin: ``[P]``, by how much the chosen answer is better, or a field of the batch. The
            result's ``margin`` does not contain it.

    Nothing waits for the device: there a NaN in ``margin`` makes its loss NaN.

    Raises:
        ValueError: an odd number of rewards, another number of margins, a margin in host memory
            that is not finite.
        TypeError: rewards that are not a tensor of floats.

    >>> round(bradley_terry(torch.tensor([1.0, 0.0]), torch.tensor([1.0])).loss.item(), 4)
    0.6931
    """
    rewards = _checked_sums("rewards", rewards)
    distance = rewards[0::2] - rewards[1::2]
    if margin is None:
        return _pairs(-F.logsigmoid(distance), rewards, distance)
    wanted = _per_pair("margin", margin, len(distance))
    if wanted.device.type == "cpu" and not bool(wanted.isfinite().all()):
        i = int((~wanted.isfinite()).nonzero()[0])
        raise ValueError(f"margin is {wanted[i].item()} for pair {i}; it must be finite")
    return _pairs(-F.logsigmoid(distance - wanted.to(distance)), rewards, distance)


def _pairs(loss: Tensor, rewards: Tensor, margin: Tensor) -> PreferenceLoss:
    rewards, margin = rewards.detach(), margin.detach()
    return PreferenceLoss(loss, rewards[0::2], rewards[1::2], (margin > 0).to(margin), margin)


def _log_ratios(sums: Any, ref_sums: Any) -> Tensor:
    """Return ``sums - ref_sums``, [2P], without a gradient of the reference."""
    sums = _checked_sums("sums", sums)
    reference = _values("ref_sums", ref_sums)
    if tuple(reference.shape) not in ((len(sums),), (len(sums) // 2, 2)):
        raise ValueError(
            f"ref_sums have shape {list(reference.shape)}, sums {list(sums.shape)}; pass a sum of "
            f"the reference model for every segment, [{len(sums)}] or [{len(sums) // 2}, 2]"
        )
    return sums - reference.detach().reshape(-1).to(sums)


def _checked_sums(name: str, sums: Tensor) -> Tensor:
    """Return a sum per segment, two for each pair: float32 for half."""
    check_floats(name, sums, "pass one number for each segment, as segment_sums returns")
    if sums.ndim != 1 or len(sums) % 2:
        raise ValueError(
            f"{name} must be [2P], two for each pair in turn, got shape {list(sums.shape)}; pass "
            "one number for each segment of a batch of whole pairs"
        )
    return widened(sums)


def _values(name: str, given: Any) -> Tensor:
    values = given.values if isinstance(given, Ragged) else given
    if not isinstance(values, Tensor):
        raise TypeError(
            f"{name} must be a tensor or a field of the batch, got {type(given).__name__}"
        )
    return values


def _per_pair(name: str, given: Any, num_pairs: int) -> Tensor:
    values = _values(name, given)
    if values.shape != (num_pairs,):
        raise ValueError(
            f"{name} has shape {list(values.shape)} for {num_pairs} pairs; pass [{num_pairs}]"
        )
    return values


def _checked_labels(given: Any, num_examples: int) -> tuple[Tensor, Tensor]:
    """Return which labels are 1, and which are 0 or 1, bool [P]."""
    labels = _per_pair("labels", given, num_examples)
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"labels must be bool, or the integers 0 and 1, got {labels.dtype}")
    is_chosen = labels == 1
    is_label = is_chosen | (labels == 0)
    if labels.device.type == "cpu" and not bool(is_label.all()):
        i = int((~is_label).nonzero()[0])
        raise ValueError(
            f"label {labels[i].item()} of example {i}: labels must be bool, or the integers 0 and 1"
        )
    return is_chosen, is_label


def _check_beta(beta: float) -> None:
    if not 0 < beta < float("inf"):
        raise ValueError(f"beta must be above 0 and finite, got {beta}")
