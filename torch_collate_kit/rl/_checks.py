"""Checks that several modules of this folder share: uids, boundaries, and tensors of one shape."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.errors import DataError

__all__ = [
    "Uids",
    "checked_boundaries",
    "checked_flag",
    "checked_mask",
    "checked_tensors",
    "checked_uids",
    "wide_dtype",
]

Uids = Sequence[Hashable] | np.ndarray | Tensor


def checked_uids(
    uids: Any,
    num_rows: int | None = None,
    *,
    name: str = "uid",
    owner: str = "prompt",
    row: str = "row",
) -> list[Hashable]:
    """``uids`` as a list of hashables that compare by value; a tensor's are its numbers.

    ``name``, ``owner`` and ``row`` are the words for one of them, for messages.

    Raises:
        TypeError: a string, nothing to iterate over, or a uid that cannot be hashed.
        ValueError: not one-dimensional, or another number of them than ``num_rows``.
        DataError: a uid that is missing, None or NaN: such rows would be one prompt, or one each.
    """
    if isinstance(uids, str | bytes) or not isinstance(uids, Iterable):
        raise TypeError(
            f"{name}s must be one {name} a {row}, got {uids!r} of type {type(uids).__name__}; pass "
            "a list"
        )
    if isinstance(uids, np.ndarray | Tensor):
        if uids.ndim != 1:
            raise ValueError(f"{name}s must be one {name} a {row}, got shape {list(uids.shape)}")
        keys = uids.tolist()
    else:
        # Tensors hash by identity, so two equal ones would be two prompts.
        has_item = Tensor | np.ndarray | np.generic
        keys = [uid.item() if isinstance(uid, has_item) else uid for uid in uids]
    for i, key in enumerate(keys):
        try:
            hash(key)
        except TypeError:
            raise TypeError(
                f"the {name} of {row} {i} is {key!r} of type {type(key).__name__}, which cannot be "
                "hashed; use a string, an int or a tuple"
            ) from None
        if key is None or (key == key) is not True:  # NaN and NA: pandas' missing values
            raise DataError(
                f"the {name} of {row} {i} is {key}; give every {row} the id of its {owner}, for "
                f"{row}s are grouped by it"
            )
    if num_rows is not None and len(keys) != num_rows:
        raise ValueError(
            f"{name}s has {len(keys)} entries for {num_rows} {row}s; give one {name} a {row}"
        )
    return keys


def checked_boundaries(boundaries: Any, num_rows: int) -> list[int]:
    """``boundaries`` as Python ints 0, ..., ``num_rows`` that rise.

    Raises:
        TypeError: anything but integers.
        ValueError: they do not start at 0, do not rise, or do not end at ``num_rows``.
    """
    way_out = "pass what mini_batch_boundaries(uids, ...) of these rows returned"
    on_host = boundaries.cpu() if isinstance(boundaries, Tensor) else boundaries
    edges = np.asarray(on_host)
    if edges.dtype.kind not in "iu" and edges.size:
        raise TypeError(f"boundaries must be integers, got {edges.dtype}; {way_out}")
    if edges.ndim != 1 or len(edges) < 2:
        raise ValueError(
            f"boundaries must be one-dimensional with at least 2 entries, got shape "
            f"{list(edges.shape)}; {way_out}"
        )
    numbers: list[int] = edges.tolist()
    if numbers[0] != 0:
        raise ValueError(f"boundaries must start at 0, got {numbers[0]}; {way_out}")
    for i in range(1, len(numbers)):
        if numbers[i] <= numbers[i - 1]:
            raise ValueError(
                f"boundaries must rise, got {numbers[i - 1]} and then {numbers[i]} at entry {i}: "
                f"a mini-batch has at least one row; {way_out}"
            )
    if numbers[-1] != num_rows:
        raise ValueError(
            f"boundaries end at {numbers[-1]}, but there are {num_rows} rows; {way_out}"
        )
    return numbers


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
                f"{name} must be [B, A], one value a response token, got {list(tensor.shape)}"
            )
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, {first_name} has {list(first.shape)}; "
                "they must be of the same rows and response columns"
            )


def checked_flag(name: str, value: Any) -> bool:
    """``value``, which must be a bool: "no" would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


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
