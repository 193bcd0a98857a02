"""Advantages of response tokens, from rewards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit._checks import checked_bool, checked_choice
from torch_collate_kit.errors import DataError
from torch_collate_kit.rl.estimators import discounted_returns, gae, group_advantages, whitened
from torch_collate_kit.rl.response_tensors import checked_mask, checked_tensors, wide_dtype
from torch_collate_kit.rl.trajectories import last_steps, trajectories
from torch_collate_kit.rl.uids import Uids, checked_uids

__all__ = ["compute_advantages"]

_OUTCOME = ("grpo", "grpo_no_std", "rloo", "maxrl")
_ESTIMATORS = (*_OUTCOME, "gae", "reinforce++")
_GROUPS_OF_ONE = ("raise", "zero", "score")


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
    its uid (they need not lie next to each other), and give it to all its response tokens:

    - ``"grpo"``: ``(score - mean) / (std + epsilon)``, unbiased std (Shao et al. 2024).
    - ``"grpo_no_std"``: ``score - mean`` (Dr. GRPO, Liu et al. 2025).
    - ``"rloo"``: score minus the mean of the others (Kool et al. 2019, Ahmadian et al. 2024).
    - ``"maxrl"``: ``(score - mean) / (mean + epsilon)`` (Tajwar et al. 2026, arXiv 2602.02710).
      It is derived for rewards of 0 and 1; a negative mean is refused.

    The only score of a uid has nothing to be compared with: ``group_of_one`` says what it gets.
    Token estimators look at every row alone:

    - ``"gae"``: generalized advantage estimation (Schulman et al. 2016) with ``values``. Cells in a
      row with mask 0 are no time steps: the next response token follows.
    - ``"reinforce++"``: the discounted sum of the rewards from a token on, minus its mean over all
      response tokens of the batch, over ``std + epsilon`` (Hu 2025).

    Rows without any response token (``Batch.pad_rows`` adds such) count nowhere; what their rewards
    hold is not looked at.

    Args:
        rewards: ``[B, A]``, 0 where ``response_mask`` is 0.
        response_mask: ``[B, A]``, not 0 at the response tokens.
        uids: the prompt of each row; a list of hashables, an ndarray or a tensor.
        estimator: see above.
        is_last_step: one bool per row, where rows are the steps of trajectories. The rows of a
            trajectory lie next to each other, and the last of them is True and has all the reward.
            Groups are then the trajectories of a uid, and the advantage of a trajectory goes to the
            response tokens of all its steps.
        trajectory_ids: the trajectory of each row, within its uid; hashables as ``uids``. They
            check ``is_last_step``, which alone cannot tell that a True was forgotten between two
            trajectories of one uid, or stand for it where it is None.
        values: ``[B, A]``, for "gae" only. The critic's targets are ``advantages + values``.
        gamma: discount per token, 0 to 1; read by "gae" and "reinforce++".
        lam: 0 to 1; read by "gae".
        whiten: for "gae" only: ``(a - mean) / (std + epsilon)`` over all response tokens of the
            batch, as PPO does in TRL and verl. Then ``advantages + values`` are no targets of the
            critic; take these from a call without it. Over the loss tokens of every mini-batch
            instead: ``normalize_advantages(..., z_score=True)``.
        epsilon: above 0.
        group_of_one: read by outcome estimators where a uid has one score, because the others were
            filtered out, say: ``"raise"``, as TRL refuses one sample per prompt; ``"zero"``, so the
            row teaches nothing, but its tokens still count in ``normalize_advantages``;
            ``"score"``, as if the mean were 0 and the std 1, which is what verl does: a row without
            a baseline, often far larger than the others.

    Returns:
        On the device of ``rewards``, float64 if they are, else float32; no autograd graph. Sums are
        formed in float64, so group scores are the same on every device.

    Raises:
        DataError: a reward or value that is not finite, a mask that is negative or not finite, a
            uid that is None or NaN, a reward that no token or no trajectory would get, trajectories
            that do not end, have several uids, are interrupted by others or contradict
            ``is_last_step``, a uid with one score and ``group_of_one="raise"``, a mean reward below
            0 with "maxrl".
        ValueError: shapes that do not fit, ``values`` missing or not needed, ``whiten`` without
            "gae", an unknown estimator, or a token estimator with trajectories of several steps.
        TypeError: not tensors.

    >>> rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 3.0]]), torch.tensor([[0, 1], [1, 1]])
    >>> compute_advantages(rewards, mask, ["a", "a"], estimator="grpo_no_std").tolist()
    [[0.0, -1.0], [1.0, 1.0]]
    """
    _check(rewards, response_mask, estimator, values, (gamma, lam), epsilon)
    _check_choices(estimator, group_of_one, whiten)
    keys = checked_uids(uids, len(rewards))
    given = rewards.detach()
    valid = checked_mask("response_mask", response_mask).to(given.device)
    real = np.flatnonzero(valid.any(dim=1).cpu().numpy())  # the others are pads
    _check_rewards(given, valid)
    wide = given.to(wide_dtype(given))  # what pads hold is never read
    last = last_steps(is_last_step, trajectory_ids, keys, real)
    if estimator in _OUTCOME:
        scores = wide.sum(dim=1).cpu().double().numpy()[real]
        outcome = np.zeros(len(rewards))
        compare = partial(
            group_advantages, estimator=estimator, epsilon=epsilon, group_of_one=group_of_one
        )
        outcome[real] = _outcome(scores, real, keys, last, wide, compare)
        per_row = torch.from_numpy(outcome).to(wide.device, wide.dtype)
        advantages = torch.where(valid, per_row[:, None], 0)
    else:
        _check_single_steps(last, real, estimator)
        if values is not None:
            _check_values(values.detach().to(given.device), valid)
            advantages = gae(wide, values.detach().to(wide), valid, gamma=gamma, lam=lam)
            if whiten:
                advantages = whitened(advantages, valid, epsilon=epsilon)
        else:
            returns = discounted_returns(wide, valid, gamma=gamma)
            advantages = whitened(returns, valid, epsilon=epsilon)
    return advantages.to(torch.float64 if given.dtype == torch.float64 else torch.float32)


def _outcome(
    scores: np.ndarray,
    real: np.ndarray,
    keys: list[Any],
    last: np.ndarray | None,
    rewards: Tensor,
    compare: Callable[[np.ndarray, list[Any]], np.ndarray],
) -> np.ndarray:
    """The advantage of every real row, float64: that of its trajectory."""
    uids = [keys[i] for i in real.tolist()]
    if last is None:
        return compare(scores, uids)
    _check_earlier_steps(rewards, real[~last])
    numbers = trajectories(last, uids, real)
    of_last = compare(
        scores[last], [uid for uid, is_last in zip(uids, last.tolist(), strict=True) if is_last]
    )
    return of_last[numbers]


def _check(
    rewards: Any,
    response_mask: Any,
    estimator: str,
    values: Any,
    discounts: tuple[float, float],
    epsilon: float,
) -> None:
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
    for name, discount in zip(("gamma", "lam"), discounts, strict=True):
        if not 0 <= discount <= 1:
            raise ValueError(f"{name} must be from 0 to 1, got {discount}")
    if not epsilon > 0:
        raise ValueError(f"epsilon must be above 0, got {epsilon}; it keeps a std of 0 from 0 / 0")


def _check_choices(estimator: str, group_of_one: str, whiten: bool) -> None:
    checked_choice("group_of_one", group_of_one, _GROUPS_OF_ONE)
    if checked_bool("whiten", whiten) and estimator != "gae":
        raise ValueError(
            f'whiten=True is read by estimator="gae" only, got it with {estimator!r}; reinforce++ '
            "is always whitened, for the others use normalize_advantages(..., z_score=True)"
        )


def _check_rewards(rewards: Tensor, valid: Tensor) -> None:
    """Of rows with response tokens: rewards must be finite, and on response tokens."""
    is_real = valid.any(dim=1, keepdim=True)
    for wrong, why in (
        (~rewards.isfinite() & is_real, "rewards must be finite; look at what computed it"),
        (
            (rewards != 0) & ~valid & is_real,
            "response_mask is 0 there, so no token would get it; put it on a response token",
        ),
    ):
        cells = wrong.nonzero()
        if len(cells):
            row, column = cells[0].tolist()
            found = rewards[row, column].item()
            raise DataError(f"row {row}: the reward at column {column} is {found}; {why}")


def _check_values(values: Tensor, valid: Tensor) -> None:
    cells = (~values.isfinite() & valid).nonzero()
    if len(cells):
        row, column = cells[0].tolist()
        raise DataError(
            f"row {row}: the value at column {column} is {values[row, column].item()}; values of "
            "response tokens must be finite"
        )


def _check_earlier_steps(rewards: Tensor, rows: np.ndarray) -> None:
    """Only the last step's rewards are the outcome of its trajectory."""
    earlier = rewards[torch.from_numpy(rows).to(rewards.device)]
    cells = (earlier != 0).nonzero()
    if len(cells):
        i, column = cells[0].tolist()
        raise DataError(
            f"row {int(rows[i])} is not the last step of its trajectory, but has reward "
            f"{earlier[i, column].item()} at column {column}, which would be lost; add it to the "
            "last step"
        )


def _check_single_steps(last: np.ndarray | None, real: np.ndarray, estimator: str) -> None:
    if last is not None and not last.all():
        row = int(real[np.flatnonzero(~last)[0]])
        raise ValueError(
            f"estimator={estimator!r} needs one time axis, but row {row} is not the last step of "
            "its trajectory: rewards of later steps would not reach it; make a trajectory one row "
            'with merge_steps, or use an outcome estimator such as "grpo"'
        )
