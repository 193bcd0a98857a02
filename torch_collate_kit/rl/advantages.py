"""Advantages of response tokens, from rewards."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit._checks import checked_bool, checked_choice
from torch_collate_kit.rl.estimators import check_epsilon, gae, group_advantages, whitened
from torch_collate_kit.rl.groups import Uids, checked_uids, last_steps, trajectories
from torch_collate_kit.rl.response_tensors import (
    checked_mask,
    checked_tensors,
    narrow,
    refuse_cells,
    wide,
)

__all__ = ["compute_advantages"]

_OUTCOME = ("grpo", "grpo_no_std", "rloo", "maxrl")
_ESTIMATORS = (*_OUTCOME, "gae", "reinforce++")
_NOT_FINITE = (
    "row {row}: the value at column {column} is {value}; values of response tokens must be finite"
)
_LOST = (
    "row {row} is not the last step of its trajectory, but has reward {value} at column {column}, "
    "which would be lost; add it to the last step"
)


def compute_advantages(
    rewards: Tensor,
    response_mask: Tensor,
    uids: Uids,
    *,
    estimator: str,
    is_last_step: Any = None,
    trajectory_ids: Uids | None = None,
    values: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = False,
    epsilon: float = 1e-6,
    group_of_one: Literal["raise", "zero", "score"] = "raise",
) -> Tensor:
    """The advantage of every response token: a new tensor [B, A], 0 outside ``response_mask``.

    Outcome estimators compare the score of a row, the sum of its rewards, with the other rows of
    its uid, and assign the result to all its response tokens:

    - ``"grpo"``: ``(score - mean) / (std + epsilon)``, unbiased std (Shao et al. 2024).
    - ``"grpo_no_std"``: ``score - mean`` (Dr. GRPO, Liu et al. 2025).
    - ``"rloo"``: score minus the mean of the others (Kool et al. 2019, Ahmadian et al. 2024).
    - ``"maxrl"``: ``(score - mean) / (mean + epsilon)``, for 0/1 rewards (Tajwar et al. 2026).

    Token estimators use each row alone; cells with mask 0 are no time steps:

    - ``"gae"``: generalized advantage estimation with ``values`` (Schulman et al. 2016).
    - ``"reinforce++"``: the discounted sum of the rewards from a token on, minus its mean over all
      response tokens of the batch, over ``std + epsilon`` (Hu 2025).

    Rows without response tokens, such as those that ``Batch.pad_rows`` adds, are ignored.

    Args:
        rewards: ``[B, A]``, 0 where ``response_mask`` is 0.
        response_mask: ``[B, A]``, not 0 at the response tokens.
        uids: the prompt of each row; a list of hashables, an ndarray or a tensor.
        estimator: see above.
        is_last_step: one bool per row, where rows are steps of trajectories. The rows of a
            trajectory lie next to each other; the last is True and has the whole reward. Then
            trajectories are compared, and each advantage goes to the tokens of all its steps.
        trajectory_ids: the trajectory of each row, within its uid; hashables like ``uids``. They
            check ``is_last_step``, or replace it if it is None.
        values: ``[B, A]``, for "gae" only. The critic's targets are ``advantages + values``.
        gamma: discount per token, 0 to 1; read by "gae" and "reinforce++".
        lam: 0 to 1; read by "gae".
        whiten: for "gae" only: ``(a - mean) / (std + epsilon)`` over all response tokens of the
            batch, as PPO does in TRL and verl. Take the critic's targets from a call without it.
        epsilon: above 0.
        group_of_one: what outcome estimators do with a uid that has only one score: ``"raise"``;
            ``"zero"``: advantage 0 (its tokens still count in ``normalize_advantages``);
            ``"score"``: as if the mean were 0 and the std 1, as in verl.

    Returns:
        On the device of ``rewards``, float64 if they are, else float32; no autograd graph. Sums are
        computed in float64, so group scores are the same on every device.

    Raises:
        DataError: a reward or value that is not finite, or a reward that no token or trajectory
            would get; a mask that is negative or not finite; a uid that is None or NaN;
            trajectories that do not end, have several uids, are interrupted or contradict
            ``is_last_step``; a uid with one score; a negative mean reward with "maxrl".
        ValueError: shapes that do not fit; an option that is unknown, missing or not read by the
            estimator; a token estimator with trajectories of several steps.
        TypeError: not tensors.

    >>> rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 3.0]]), torch.tensor([[0, 1], [1, 1]])
    >>> compute_advantages(rewards, mask, ["a", "a"], estimator="grpo_no_std").tolist()
    [[0.0, -1.0], [1.0, 1.0]]
    """
    _check(rewards, response_mask, estimator, values, whiten)
    for name, discount in (("gamma", gamma), ("lam", lam)):
        if not 0 <= discount <= 1:
            raise ValueError(f"{name} must be from 0 to 1, got {discount}")
    check_epsilon(epsilon)
    checked_choice("group_of_one", group_of_one, ("raise", "zero", "score"))
    keys = checked_uids(uids, len(rewards))
    valid = checked_mask("response_mask", response_mask).to(rewards.device)
    rows = np.flatnonzero(valid.any(dim=1).cpu().numpy())  # the others are pads, never read
    _check_rewards(rewards.detach(), valid)
    given = wide(rewards)
    last = last_steps(is_last_step, trajectory_ids, keys, rows)
    if estimator in _OUTCOME:
        per_row = np.zeros(len(rewards))
        options = {"estimator": estimator, "epsilon": epsilon, "group_of_one": group_of_one}
        per_row[rows] = _outcomes(given, last, rows, keys, options)
        advantages = torch.where(valid, torch.from_numpy(per_row).to(given)[:, None], 0)
    else:
        if not last.all():
            raise ValueError(
                f"{estimator=} needs one time axis, but row {rows[~last][0]} is not the last step "
                "of its trajectory: rewards of later steps would not reach it; make a trajectory "
                'one row with merge_steps, or use an outcome estimator such as "grpo"'
            )
        if values is None:  # discounted sums of the rewards
            values, lam, whiten = torch.zeros_like(given), 1.0, True
        critic = values.detach().to(given)
        refuse_cells(~critic.isfinite() & valid, critic, _NOT_FINITE)
        advantages = gae(given, critic, valid, gamma=gamma, lam=lam)
        if whiten:
            advantages = whitened(advantages, valid, epsilon=epsilon)
    return narrow(advantages, like=rewards)


def _outcomes(
    rewards: Tensor,
    last: np.ndarray,
    rows: np.ndarray,
    keys: list[Hashable],
    options: dict[str, Any],
) -> np.ndarray:
    """The advantage of each of ``rows``, which is that of its trajectory: float64 [N]."""
    is_earlier = torch.zeros(len(rewards), 1, dtype=torch.bool)
    is_earlier[rows[~last]] = True
    refuse_cells((rewards != 0) & is_earlier.to(rewards.device), rewards, _LOST)
    numbers = trajectories(last, [keys[i] for i in rows.tolist()], rows)
    ends = rows[last]
    scores = rewards.sum(dim=1).cpu().double().numpy()[ends]
    return group_advantages(scores, [keys[i] for i in ends.tolist()], **options)[numbers]


def _check(rewards: Any, response_mask: Any, estimator: str, values: Any, whiten: bool) -> None:
    checked_choice("estimator", estimator, _ESTIMATORS)
    checked_tensors(rewards=rewards, response_mask=response_mask)
    if estimator == "gae":
        if values is None:
            raise ValueError('estimator="gae" needs values [B, A], the critic\'s estimates')
        checked_tensors(rewards=rewards, values=values)
    elif values is not None:
        raise ValueError(
            f'values are read by estimator="gae" only, got them with {estimator!r}; leave them out'
        )
    if checked_bool("whiten", whiten) and estimator != "gae":
        raise ValueError(
            f'whiten=True is read by estimator="gae" only, got it with {estimator!r}; reinforce++ '
            "is always whitened, for the others use normalize_advantages(..., z_score=True)"
        )


def _check_rewards(rewards: Tensor, valid: Tensor) -> None:
    """In rows with response tokens, rewards must be finite and at response tokens."""
    is_real = valid.any(dim=1, keepdim=True)
    where = "row {row}: the reward at column {column} is {value}; "
    why = "rewards must be finite; look at what computed it"
    refuse_cells(~rewards.isfinite() & is_real, rewards, where + why)
    why = "response_mask is 0 there, so no token would get it; put it on a response token"
    refuse_cells((rewards != 0) & ~valid & is_real, rewards, where + why)
