"""Advantages scaled so that a plain sum of token losses is the wanted mean."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit._checks import checked_bool, checked_choice, checked_int
from torch_collate_kit.rl.advantages import check_epsilon, whitened
from torch_collate_kit.rl.groups import Uids, checked_boundaries, checked_uids, group_numbers
from torch_collate_kit.rl.response_tensors import (
    checked_mask,
    checked_tensors,
    narrow,
    refuse_cells,
    wide,
)

Reduction: TypeAlias = Literal["token_mean", "sequence_mean", "prompt_mean", "constant_length_mean"]


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
            the number of rows (Dr. GRPO, Liu et al. 2025).
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
