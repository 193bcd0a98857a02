"""Tensors with one value per response token: checks of their shapes, masks, and wide sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_collate_kit.errors import DataError

__all__ = ["checked_mask", "checked_tensors", "wide_dtype"]


def checked_tensors(**tensors: Any) -> None:
    """All are tensors of the shape of the first, ``[B, A]``.

    Raises:
        TypeError: not a tensor.
        ValueError: not two-dimensional, or of another shape than the first.
    """
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor [B, A], got {type(tensor).__name__}")
        if tensor.ndim != 2:
            raise ValueError(
                f"{name} must be [B, A], one value per response token, got {list(tensor.shape)}"
            )
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, {first_name} has {list(first.shape)}; "
                "they must be of the same rows and response columns"
            )


def checked_mask(name: str, mask: Tensor) -> Tensor:
    """bool, where ``mask`` is not 0.

    Raises:
        DataError: an entry that is negative or not finite, which would count as one that is kept.
    """
    given = mask.detach()
    wrong = (~((given >= 0) & given.isfinite())).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise DataError(
            f"row {row}: {name} is {given[row, column].item()} at column {column}; it must be "
            "finite and 0 or more: 0 where the token does not count"
        )
    return given != 0


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """What sums are formed in: float64, except where the device has none.

    In float32 the mean of equal rewards can be off by one bit, and that bit divided by
    ``0 + epsilon`` is an advantage of 0.01 where there is nothing to learn.
    """
    return torch.float32 if tensor.device.type == "mps" else torch.float64
