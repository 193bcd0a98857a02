"""Checks, masks and dtypes of tensors with one value per response token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_collate_kit.errors import DataError


def checked_tensors(**tensors: Any) -> None:
    """Check that all are tensors ``[B, A]`` of one shape."""
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor [B, A], got {type(tensor).__name__}")
        if tensor.ndim != 2:
            raise ValueError(f"{name} must be [B, A], got shape {list(tensor.shape)}")
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, {first_name} has {list(first.shape)}; "
                "they must have the same rows and response columns"
            )


def refuse_cells(is_wrong: Tensor, values: Tensor, message: str) -> None:
    """Raise DataError for the first wrong cell, whose {row}, {column} and {value} are filled in."""
    cells = is_wrong.nonzero()
    if len(cells):
        row, column = cells[0].tolist()
        value = values[row, column].item()
        raise DataError(message.format(row=row, column=column, value=value))


def checked_mask(name: str, mask: Tensor) -> Tensor:
    """Return where ``mask`` is not 0; an entry that is negative or not finite is refused."""
    given = mask.detach()
    refuse_cells(
        ~((given >= 0) & given.isfinite()),
        given,
        f"row {{row}}: {name} is {{value}} at column {{column}}; it must be finite and 0 or more",
    )
    return given != 0


def wide(tensor: Tensor) -> Tensor:
    """Convert to float64 (float32 where the device has none), without a graph."""
    # In float32 the mean of equal rewards can be off by one bit, and that bit divided by
    # 0 + epsilon is an advantage of 0.01 where there is nothing to learn.
    return tensor.detach().to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def narrow(result: Tensor, *, like: Tensor) -> Tensor:
    """Convert to float64 if ``like`` is float64, else to float32."""
    return result.to(torch.float64 if like.dtype == torch.float64 else torch.float32)
