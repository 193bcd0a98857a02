"""Advantages scaled so that a plain sum of token losses is the mean that is wanted."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit._checks import checked_bool, checked_choice, checked_int
from torch_collate_kit.errors import DataError
from torch_collate_kit.rl.boundaries import checked_boundaries
from torch_collate_kit.rl.response_tensors import checked_mask, checked_tensors, wide_dtype
from torch_collate_kit.rl.uids import Uids, checked_uids

__all__ = ["normalize_advantages"]

_REDUCTIONS = ("token_mean", "sequence_mean", "prompt_mean", "constant_length_mean")


def normalize_advantages(
    advantages: Tensor,
    loss_mask: Tensor,
    boundaries: Any,
    *,
    reduction: str,
    uids: Uids | None = None,
    max_response_length: int | None = None,
    z_score: bool = False,
    epsilon: float = 1e-6,
    count_masked_rows: bool = False,
) -> Tensor:
    """Advantages divided, mini-batch by mini-batch, by what a loss would be divided by.

    The loss of a mini-batch is then the plain SUM of ``-(advantages * term) * (loss_mask != 0)``
    over its rows, in whatever micro-batches and on whatever ranks they lie; nothing may be divided
    again, by a count or by averaging over micro-batches, and where DistributedDataParallel averages
    over the ranks the sum is multiplied by their number. In particular a ``loss_mask`` that was
    divided (``normalize_loss=True``) must not be multiplied in: use ``loss_mask != 0``, or
    ``loss_mask * metadata["loss_mask_divisor"]`` where the mask holds weights.

    A loss token is a cell of ``loss_mask`` that is not 0, whatever its weight. A masked row has
    none: a response that was cut off by its limit, say. It adds 0 to the sum; whether it counts in
    the denominator is the choice of ``count_masked_rows``. ``reduction``:

    - ``"token_mean"``: the mean over the loss tokens of the mini-batch (DAPO, Yu et al. 2025).
      Masked rows never count.
    - ``"sequence_mean"``: the mean over rows of their token means (GRPO, Shao et al. 2024): over
      the rows with a loss token, or with ``count_masked_rows`` over all rows of the mini-batch.
    - ``"prompt_mean"``: the mean over prompts of the mean over all the prompt's loss tokens: over
      the prompts with a loss token, or with ``count_masked_rows`` over all prompts. A prompt that
      boundaries cut in two counts in each part.
    - ``"constant_length_mean"``: the token sum over ``max_response_length`` times the number of
      rows (Dr. GRPO, Liu et al. 2025): of those with a loss token, or with ``count_masked_rows`` of
      all rows of the mini-batch.

    A mini-batch without loss tokens divides by 1.

    Args:
        advantages: ``[B, A]`` floating point.
        loss_mask: ``[B, A]``.
        boundaries: integers 0, ..., B: where each mini-batch begins, and the number of rows.
        uids: the prompt of each row; read by "prompt_mean" only, and needed there.
        max_response_length: read by "constant_length_mean" only, and needed there.
        z_score: first take ``(a - mean) / (std + epsilon)`` over the loss tokens of the mini-batch,
            with the unbiased std (0 of a single token).
        epsilon: above 0.
        count_masked_rows: False: a row without loss tokens leaves the denominators above, and the
            others weigh more for it. True: it stays, so a row weighs the same however many of its
            peers are masked, as in TRL. Rows that ``Batch.pad_rows`` added look masked and would
            count too: normalize before padding or staging.

    Returns:
        A new tensor on the device of ``advantages``, float64 if they are, else float32; 0 where
        ``loss_mask`` is 0, without autograd graph.

    Raises:
        ValueError, TypeError: an unknown reduction, shapes or boundaries that do not fit, or
            ``uids`` or ``max_response_length`` missing.
        DataError: an advantage of a loss token that is not finite, a mask that is negative or not
            finite, a uid that is None or NaN.

    >>> advantages, mask = torch.tensor([[0.0, 4.0], [8.0, 8.0]]), torch.tensor([[0, 1], [1, 1]])
    >>> normalize_advantages(advantages, mask, [0, 1, 2], reduction="token_mean").tolist()
    [[0.0, 4.0], [4.0, 4.0]]
    """
    _check(advantages, loss_mask, reduction, epsilon)
    count_masked = checked_bool("count_masked_rows", count_masked_rows)
    edges = checked_boundaries(boundaries, len(advantages))
    trained = checked_mask("loss_mask", loss_mask).to(advantages.device)
    wide = advantages.detach().to(wide_dtype(advantages))
    wide = torch.where(trained, wide, 0)
    _check_finite(wide)
    if z_score:
        parts = [_z_score(wide[a:b], trained[a:b], epsilon) for a, b in pairwise(edges)]
        wide = torch.cat(parts)
    counts = trained.sum(dim=1).cpu().numpy()
    if reduction == "prompt_mean":
        divisors = _per_prompt(counts, edges, uids, count_masked)
    elif reduction == "constant_length_mean":
        length = _checked_length(max_response_length)
        divisors = _num_rows(counts, edges, count_masked) * length
    elif reduction == "sequence_mean":
        divisors = _num_rows(counts, edges, count_masked) * counts
    else:
        divisors = np.concatenate([np.full(b - a, counts[a:b].sum()) for a, b in pairwise(edges)])
    scale = torch.from_numpy(1.0 / np.maximum(divisors, 1)).to(wide.device, wide.dtype)
    out = torch.float64 if advantages.dtype == torch.float64 else torch.float32
    return (wide * scale[:, None]).to(out)


def _z_score(advantages: Tensor, trained: Tensor, epsilon: float) -> Tensor:
    picked = advantages[trained]
    if len(picked) < 2:
        return torch.zeros_like(advantages)
    scaled = (advantages - picked.mean()) / (picked.std() + epsilon)
    return torch.where(trained, scaled, 0)


def _num_rows(counts: np.ndarray, edges: list[int], count_masked: bool) -> np.ndarray:
    """Rows that count in the mini-batch of each row: [B]."""
    sizes = np.diff(edges)
    trained = np.array([np.count_nonzero(counts[a:b]) for a, b in pairwise(edges)])
    return np.repeat(sizes if count_masked else trained, sizes)


def _per_prompt(
    counts: np.ndarray, edges: list[int], uids: Uids | None, count_masked: bool
) -> np.ndarray:
    """Prompts that count in the row's mini-batch, times the loss tokens of its own: [B]."""
    if uids is None:
        raise ValueError('reduction="prompt_mean" needs uids, the prompt of each row')
    keys, divisors = checked_uids(uids, len(counts)), np.zeros(len(counts), dtype=np.int64)
    for a, b in pairwise(edges):
        numbers: dict[Any, int] = {}
        prompts = np.array([numbers.setdefault(key, len(numbers)) for key in keys[a:b]])
        tokens = np.zeros(len(numbers), dtype=np.int64)
        np.add.at(tokens, prompts, counts[a:b])
        divisors[a:b] = tokens[prompts] * (
            len(tokens) if count_masked else np.count_nonzero(tokens)
        )
    return divisors


def _checked_length(max_response_length: int | None) -> int:
    if max_response_length is None:
        raise ValueError(
            'reduction="constant_length_mean" needs max_response_length, the most tokens that a '
            "response may have"
        )
    return checked_int("max_response_length", max_response_length)


def _check(advantages: Any, loss_mask: Any, reduction: str, epsilon: float) -> None:
    checked_choice("reduction", reduction, _REDUCTIONS)
    checked_tensors(advantages=advantages, loss_mask=loss_mask)
    if not advantages.is_floating_point():
        raise TypeError(
            f"advantages must be floating point, got {advantages.dtype}; pass what "
            "compute_advantages returned"
        )
    if not epsilon > 0:
        raise ValueError(f"epsilon must be above 0, got {epsilon}; it keeps a std of 0 from 0 / 0")


def _check_finite(advantages: Tensor) -> None:
    wrong = (~advantages.isfinite()).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise DataError(
            f"row {row}: the advantage at column {column} is {advantages[row, column].item()}; "
            "advantages of loss tokens must be finite, look for the value it was computed from"
        )
