"""Advantages of response tokens, from rewards, and their scale for the wanted mean."""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from itertools import pairwise
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit._checks import checked_bool, checked_choice, checked_int
from torch_collate_kit.errors import DataError
from torch_collate_kit.rl.groups import (
    Uids,
    checked_boundaries,
    checked_uids,
    group_numbers,
    last_steps,
    trajectories,
)
from torch_collate_kit.rl.responses import checked_mask, checked_tensors, narrow, refuse_cells, wide

Estimator: TypeAlias = Literal["grpo", "grpo_no_std", "rloo", "maxrl", "gae", "reinforce++"]
_OUTCOME = ("grpo", "grpo_no_std", "rloo", "maxrl")
Reduction: TypeAlias = Literal["token_mean", "sequence_mean", "prompt_mean", "constant_length_mean"]


def compute_advantages(
    rewards: Tensor,
    response_mask: Tensor,
    uids: Uids,
    *,
    estimator: Estimator,
    is_last_step: Any = None,
    trajectory_ids: Uids | None = None,
    values: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = False,
    epsilon: float = 1e-6,
    group_of_one: Literal["raise", "zero", "score"] = "raise",
) -> Tensor:
    """Compute the advantage of every response token: [B, A], 0 outside ``response_mask``.

    Outcome estimators compare the score of a row, the sum of its rewards, with the other rows of
    its uid, and assign the result to all its response tokens:

    - ``"grpo"``: ``(score - mean) / (std + epsilon)``, unbiased std (Shao et al. 2024).
    - ``"grpo_no_std"``: ``score - mean`` (Dr. GRPO, Liu et al. 2025).
    - ``"rloo"``: score minus the mean of the others (Kool et al. 2019, Ahmadian et al. 2024).
    - ``"maxrl"``: ``(score - mean) / (mean + epsilon)``, for 0/1 rewards (Tajwar et al. 2026).

    Token estimators use each row alone and skip cells with mask 0:

    - ``"gae"``: generalized advantage estimation with ``values`` (Schulman et al. 2016).
    - ``"reinforce++"``: the discounted sum of the rewards from a token on, whitened (Hu 2025).

    Rows without response tokens, such as those that ``Batch.pad_rows`` adds, are ignored.

    Args:
        rewards: ``[B, A]``, 0 where ``response_mask`` is 0.
        response_mask: ``[B, A]``, not 0 at the response tokens.
        uids: the prompt of each row; a list of hashables, an ndarray or a tensor.
        estimator: see above.
        is_last_step: one bool per row, where rows are steps of trajectories, or segments of
            rollouts: pass ``row_metadata["is_last_step"]``. The rows of a trajectory lie next to
            each other, and the last is True. Then trajectories are compared by the sum of all their
            rewards, and each advantage goes to the tokens of all its steps.
        trajectory_ids: the trajectory of each row, within its uid; hashables like ``uids``. They
            check ``is_last_step``, or replace it if it is None.
        values: ``[B, A]``, for "gae" only. The critic's targets are ``advantages + values``.
        gamma: discount per token, 0 to 1; read by "gae" and "reinforce++".
        lam: 0 to 1; read by "gae".
        whiten: for "gae" only: ``(a - mean) / (std + epsilon)`` over all response tokens of the
            batch. Compute the critic's targets from a call without it.
        epsilon: above 0.
        group_of_one: for a uid with only one score: ``"raise"``; ``"zero"``: advantage 0 (its
            tokens still count in ``normalize_advantages``); ``"score"``: the score itself.

    Returns:
        A new tensor on the device of ``rewards``, float64 if they are, else float32, without an
        autograd graph. Sums are computed in float64.

    Raises:
        DataError: a reward or value that is not finite, or a reward that no token or trajectory
            would get; a mask that is negative or not finite; a uid that is None or NaN;
            trajectories that do not end, have several uids, are interrupted or contradict
            ``is_last_step``; a uid with one score; a reward below 0 with "maxrl".
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
        scores, names, trajectory_of = _scores(given, last, rows, keys)
        masked = {keys[i] for i in set(range(len(keys))).difference(rows.tolist())}
        outcomes = _group_advantages(scores, names, estimator, epsilon, group_of_one, masked)
        per_row = np.zeros(len(rewards))
        per_row[rows] = outcomes[trajectory_of]
        advantages = torch.where(valid, torch.from_numpy(per_row).to(given)[:, None], 0)
    else:
        if not last.all():
            raise ValueError(
                f"{estimator=} needs one time axis, but row {rows[~last][0]} is not the last step "
                "of its trajectory; make a trajectory one row with merge_steps, or use an outcome "
                'estimator such as "grpo"'
            )
        if values is None:  # discounted sums of the rewards
            values, lam, whiten = torch.zeros_like(given), 1.0, True
        critic = values.detach().to(given)
        message = "row {row}: the value at column {column} is {value}; values of response tokens "
        refuse_cells(~critic.isfinite() & valid, critic, message + "must be finite")
        advantages = _gae(given, critic, valid, gamma=gamma, lam=lam)
        if whiten:
            advantages = whitened(advantages, valid, epsilon=epsilon)
    return narrow(advantages, like=rewards)


def _check(rewards: Any, response_mask: Any, estimator: str, values: Any, whiten: bool) -> None:
    checked_choice("estimator", estimator, get_args(Estimator))
    checked_tensors(rewards=rewards, response_mask=response_mask)
    checked_bool("whiten", whiten)
    if estimator == "gae":
        if values is None:
            raise ValueError('estimator="gae" needs values [B, A], the critic\'s estimates')
        checked_tensors(rewards=rewards, values=values)
    elif values is not None or whiten:
        what, hint = "values", "leave it out"
        if whiten:
            what, hint = "whiten=True", "use normalize_advantages(..., z_score=True)"
        raise ValueError(f'{what} is read by estimator="gae" only, got {estimator!r}; {hint}')


def _check_rewards(rewards: Tensor, valid: Tensor) -> None:
    """Check that rewards of rows with response tokens are finite and at response tokens."""
    is_real = valid.any(dim=1, keepdim=True)
    where = "row {row}: the reward at column {column} is {value}; "
    why = "rewards must be finite; look at what computed it"
    refuse_cells(~rewards.isfinite() & is_real, rewards, where + why)
    why = "response_mask is 0 there, so no token would get it; put it on a response token"
    refuse_cells((rewards != 0) & ~valid & is_real, rewards, where + why)


def _scores(
    rewards: Tensor, last: np.ndarray, rows: np.ndarray, keys: list[Hashable]
) -> tuple[np.ndarray, list[Hashable], np.ndarray]:
    """Return the score and uid of each trajectory, and the trajectory of each of ``rows``."""
    uids = [keys[i] for i in rows.tolist()]
    trajectory_of = trajectories(last, uids, rows)
    scores = np.bincount(trajectory_of, rewards.sum(dim=1).cpu().double().numpy()[rows])
    return scores, [uids[i] for i in np.flatnonzero(last).tolist()], trajectory_of


def _group_advantages(
    scores: np.ndarray,
    uids: Sequence[Hashable],
    estimator: str,
    epsilon: float,
    group_of_one: str,
    masked: Set[Hashable],
) -> np.ndarray:
    """Compare every score with the others of its uid: float64 [N]; ``masked`` uids lost rows."""
    groups, names = group_numbers(uids)
    sizes = np.bincount(groups, minlength=len(names))
    is_alone = sizes == 1
    if group_of_one == "raise" and is_alone.any():
        uid = names[int(is_alone.argmax())]
        why = ", as response_mask is 0 in all of its other rows," if uid in masked else ""
        raise DataError(
            f"uid {uid!r} has only one score{why} (as have "
            f"{np.count_nonzero(is_alone)} of {len(sizes)} uids), and {estimator=} compares the "
            "scores of a uid; sample its prompt more than once, filter such rows out, or pass "
            'group_of_one="zero" (advantage 0) or "score" (the score itself)'
        )
    means = np.bincount(groups, weights=scores, minlength=len(names)) / np.maximum(sizes, 1)
    negative = (scores < 0) & ~is_alone[groups]
    if estimator == "maxrl" and negative.any():  # of both signs, their mean could be 0
        i = int(negative.argmax())
        raise DataError(
            f"a reward of uid {uids[i]!r} is {scores[i]}, and maxrl divides by their mean; give it "
            'rewards of 0 or more, or use estimator="grpo"'
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


def _gae(rewards: Tensor, values: Tensor, valid: Tensor, *, gamma: float, lam: float) -> Tensor:
    """Compute generalized advantage estimates [B, A] from right to left, over valid cells only."""
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
    """Check that ``epsilon`` is above 0."""
    if not epsilon > 0:
        raise ValueError(f"epsilon must be above 0, got {epsilon}; it keeps a std of 0 from 0 / 0")


def whitened(values: Tensor, valid: Tensor, *, epsilon: float) -> Tensor:
    """Return ``(v - mean) / (std + epsilon)`` over valid cells; 0 elsewhere and for one cell."""
    picked = values[valid]
    if len(picked) < 2:
        return torch.zeros_like(values)
    return torch.where(valid, (values - picked.mean()) / (picked.std() + epsilon), 0)


def normalize_advantages(
    advantages: Tensor,
    loss_mask: Tensor,
    boundaries: Any,
    *,
    reduction: Reduction,
    uids: Uids | None = None,
    max_response_length: int | None = None,
    z_score: bool = False,
    epsilon: float = 1e-6,
    count_masked_rows: bool = False,
) -> Tensor:
    """Divide the advantages of each mini-batch by the divisor of its loss.

    The loss of a mini-batch is then the plain SUM of ``-(advantages * term) * (loss_mask != 0)``
    over its rows, in any micro-batches and on any ranks (times ``dp_size`` where gradients are
    averaged over ranks). Do not multiply by a ``loss_mask`` that was divided
    (``normalize_loss=True``); for weights use ``loss_mask * metadata["loss_mask_divisor"]``.

    Args:
        advantages: ``[B, A]`` floating point.
        loss_mask: ``[B, A]``; loss tokens are the cells that are not 0.
        boundaries: integers 0, ..., B: the first row of each mini-batch, and the number of rows.
        reduction: ``"token_mean"``: the mean over the loss tokens of the mini-batch (DAPO, Yu et
            al. 2025). ``"sequence_mean"``: the mean over rows of their token means (GRPO, Shao et
            al. 2024). ``"prompt_mean"``: the mean over prompts of the mean over all loss tokens of
            the prompt. ``"constant_length_mean"``: the token sum over ``max_response_length`` times
            the number of rows (Dr. GRPO, Liu et al. 2025). Rows are those with a loss token.
        uids: the prompt of each row; required for "prompt_mean", read only there.
        max_response_length: required for "constant_length_mean", read only there.
        z_score: first take ``(a - mean) / (std + epsilon)`` over the loss tokens of the mini-batch,
            with the unbiased std (0 for a single token).
        epsilon: above 0.
        count_masked_rows: also count rows and prompts without loss tokens (never in "token_mean").
            Rows that ``Batch.pad_rows`` added count too: normalize before padding or staging.

    Returns:
        A new tensor on the device of ``advantages``, float64 if they are, else float32; 0 where
        ``loss_mask`` is 0; no autograd graph. A mini-batch without loss tokens is divided by 1.

    Raises:
        DataError: an advantage of a loss token that is not finite, a mask that is negative or not
            finite, a uid that is None or NaN.
        ValueError, TypeError: shapes or boundaries that do not fit, an unknown reduction, or one
            without the option that it reads.

    >>> advantages, mask = torch.tensor([[0.0, 4.0], [8.0, 8.0]]), torch.tensor([[0, 1], [1, 1]])
    >>> normalize_advantages(advantages, mask, [0, 1, 2], reduction="token_mean").tolist()
    [[0.0, 4.0], [4.0, 4.0]]
    """
    checked_choice("reduction", reduction, get_args(Reduction))
    checked_tensors(advantages=advantages, loss_mask=loss_mask)
    if not advantages.is_floating_point():
        raise TypeError(
            f"advantages must be floating point, got {advantages.dtype}; pass the result of "
            "compute_advantages"
        )
    check_epsilon(epsilon)
    checked_bool("count_masked_rows", count_masked_rows)
    edges = checked_boundaries(boundaries, len(advantages))
    trained = checked_mask("loss_mask", loss_mask).to(advantages.device)
    scaled = torch.where(trained, wide(advantages), 0)
    message = "row {row}: the advantage at column {column}, a loss token, is {value}, not finite"
    refuse_cells(~scaled.isfinite(), scaled, message)
    counts = trained.sum(dim=1).cpu().numpy()
    units, length = _units(reduction, len(counts), uids), None
    if reduction == "constant_length_mean":
        if max_response_length is None:
            raise ValueError(
                f"{reduction=} needs max_response_length, the most tokens that a response may have"
            )
        length = checked_int("max_response_length", max_response_length)
    divisors = np.ones(len(counts))
    for a, b in pairwise(edges):
        if z_score:
            scaled[a:b] = whitened(scaled[a:b], trained[a:b], epsilon=epsilon)
        divisors[a:b] = _divisors(counts[a:b], units[a:b], length, count_masked_rows)
    scale = torch.from_numpy(1.0 / np.maximum(divisors, 1)).to(scaled)
    return narrow(scaled * scale[:, None], like=advantages)


def _units(reduction: str, num_rows: int, uids: Uids | None) -> np.ndarray:
    """Return the unit that each row is averaged in first (all, its prompt, itself): int64 [B]."""
    if reduction == "token_mean":
        return np.zeros(num_rows, dtype=np.int64)
    if reduction != "prompt_mean":
        return np.arange(num_rows)
    if uids is None:
        raise ValueError('reduction="prompt_mean" needs uids, the prompt of each row')
    return group_numbers(checked_uids(uids, num_rows))[0]


def _divisors(
    counts: np.ndarray, units: np.ndarray, length: int | None, count_masked: bool
) -> np.ndarray:
    """Return the counted units of a mini-batch times the loss tokens (or length) of each row's."""
    _, unit_of_row = np.unique(units, return_inverse=True)
    tokens = np.bincount(unit_of_row, weights=counts)
    num_units = len(tokens) if count_masked else np.count_nonzero(tokens)
    return num_units * (tokens[unit_of_row] if length is None else np.full(len(counts), length))
