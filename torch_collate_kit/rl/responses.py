"""Per-token values of the responses, cut out of right-aligned rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_collate_kit.errors import DataError
from torch_collate_kit.rl.response_tensors import checked_mask

__all__ = ["response_values"]


def response_values(values: Tensor, response_mask: Tensor) -> list[list[float]]:
    """The values of every row's response tokens, a list of Python floats a row: a copy.

    Rows are right-aligned, so these are the LAST ``n`` values of a row with ``n`` response tokens.

    Args:
        values: ``[B, A']``, any dtype and device, with a gradient or without; ``A'`` is at least
            the longest response (what a forward pass over the last ``A'`` cells returned).
        response_mask: ``[B, A]``, not 0 at the response tokens: the last cells of the row. A row of
            zeros gives an empty list.

    Raises:
        TypeError: not tensors.
        ValueError: other numbers of rows, or fewer values than response tokens.
        DataError: a mask that is not one run of ones at the right end of its row, or that is
            negative or not finite.

    >>> values = torch.tensor([[9.0, 1.0, 2.0], [9.0, 9.0, 3.0]])
    >>> response_values(values, torch.tensor([[0, 1, 1], [0, 0, 1]]))
    [[1.0, 2.0], [3.0]]
    """
    _check(values, response_mask)
    mask = checked_mask("response_mask", response_mask).cpu()
    lengths = mask.sum(dim=1)
    columns = torch.arange(mask.shape[1])
    wrong = (mask != (columns >= mask.shape[1] - lengths[:, None])).any(dim=1).nonzero().flatten()
    if len(wrong):
        i = int(wrong[0])
        raise DataError(
            f"row {i}: response_mask has {int(lengths[i])} response tokens that are not the last "
            "cells of the row; responses are right-aligned without gaps (left-pad the rows)"
        )
    longest = int(lengths.max()) if len(lengths) else 0
    if longest > values.shape[1]:
        i = int(lengths.argmax())
        raise ValueError(
            f"row {i} has {longest} response tokens, but values has {values.shape[1]} columns; "
            "take the values of at least the last A cells"
        )
    kept = values.detach()[:, values.shape[1] - longest :].cpu().double().tolist()
    return [row[longest - n :] for row, n in zip(kept, lengths.tolist(), strict=True)]


def _check(values: Any, response_mask: Any) -> None:
    for name, tensor in (("values", values), ("response_mask", response_mask)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.ndim != 2:
            raise ValueError(
                f"{name} must be two-dimensional, rows first, got shape {list(tensor.shape)}"
            )
    if len(values) != len(response_mask):
        raise ValueError(
            f"values has {len(values)} rows, response_mask has {len(response_mask)}; "
            "give the values of the same rows"
        )
