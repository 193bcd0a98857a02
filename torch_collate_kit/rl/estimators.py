"""The arithmetic of the estimators: over groups in NumPy, over tokens in torch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.errors import DataError

__all__ = ["check_epsilon", "gae", "group_advantages", "group_numbers", "whitened"]


def group_numbers(uids: Sequence[Hashable]) -> tuple[np.ndarray, list[Hashable]]:
    """The group of each uid, int64 [N], and the uid of each group, in order of appearance."""
    numbers: dict[Hashable, int] = {}
    groups = np.array([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=np.int64)
    return groups, list(numbers)


def group_advantages(
    scores: np.ndarray,
    uids: Sequence[Hashable],
    *,
    estimator: str,
    epsilon: float,
    group_of_one: str,
) -> np.ndarray:
    """The advantage of every score among the scores of its uid: float64 [N], as ``scores``.

    >>> options = {"estimator": "rloo", "epsilon": 1e-6, "group_of_one": "score"}
    >>> group_advantages(np.array([1.0, 3.0, 7.0]), "aab", **options).tolist()
    [-2.0, 2.0, 7.0]
    """
    groups, names = group_numbers(uids)
    sizes = np.bincount(groups, minlength=len(names))
    is_alone = sizes == 1
    if group_of_one == "raise" and is_alone.any():
        raise DataError(
            f"uid {names[int(is_alone.argmax())]!r} has only one score (so have "
            f"{np.count_nonzero(is_alone)} of {len(sizes)} uids), and {estimator=} compares the "
            "scores of a uid; sample its prompt more than once, filter such rows out, or pass "
            'group_of_one="zero" (advantage 0) or "score" (its score, as if the mean were 0 and '
            "the std 1)"
        )
    means = np.bincount(groups, weights=scores, minlength=len(names)) / np.maximum(sizes, 1)
    negative = (means < 0) & ~is_alone
    if estimator == "maxrl" and negative.any():
        worst = int(negative.argmax())
        raise DataError(
            f"the mean reward of uid {names[worst]!r} is {means[worst]}: maxrl divides by it, "
            "which would turn the advantages around; give it rewards of 0 or more, or use "
            'estimator="grpo"'
        )
    deviation = scores - means[groups]  # exactly 0 in a group of one
    others = np.maximum(sizes - 1, 1)
    if estimator == "grpo":
        variance = np.bincount(groups, weights=deviation**2, minlength=len(names)) / others
        advantages = deviation / (np.sqrt(variance) + epsilon)[groups]
    elif estimator == "rloo":  # s - (sum - s) / (n - 1), without the difference of large sums
        advantages = deviation * (sizes / others)[groups]
    elif estimator == "maxrl":
        advantages = deviation / np.where(is_alone, 1, means + epsilon)[groups]
    else:
        advantages = deviation
    return np.where(is_alone[groups], scores, advantages) if group_of_one == "score" else advantages


def gae(rewards: Tensor, values: Tensor, valid: Tensor, *, gamma: float, lam: float) -> Tensor:
    """Generalized advantage estimates [B, A], a scan from the right; cells not valid are skipped.

    With values of 0 and ``lam=1`` these are the discounted sums of the rewards from each cell on.
    """
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        error = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = error + gamma * lam * next_advantage
        next_value = torch.where(valid[:, t], values[:, t], next_value)
        next_advantage = torch.where(valid[:, t], advantage, next_advantage)
        advantages[:, t] = torch.where(valid[:, t], advantage, 0)
    return advantages


def check_epsilon(epsilon: float) -> None:
    if not epsilon > 0:
        raise ValueError(f"epsilon must be above 0, got {epsilon}; it keeps a std of 0 from 0 / 0")


def whitened(values: Tensor, valid: Tensor, *, epsilon: float) -> Tensor:
    """``(v - mean) / (std + epsilon)`` over all valid cells, 0 elsewhere; 0 for a single cell."""
    picked = values[valid]
    if len(picked) < 2:
        return torch.zeros_like(values)
    return torch.where(valid, (values - picked.mean()) / (picked.std() + epsilon), 0)
