"""Where prompts and mini-batches begin among rows that lie prompt by prompt."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit._checks import checked_int
from torch_collate_kit.errors import DataError
from torch_collate_kit.rl.groups import Uids, checked_uids

__all__ = ["checked_boundaries", "mini_batch_boundaries", "prompt_boundaries"]


def prompt_boundaries(uids: Uids) -> np.ndarray:
    """The row at which each prompt begins, and the number of rows: int64 [P + 1], 0, ..., N.

    ``uids`` names the prompt of each row: a list of hashables, an ndarray or a tensor [N]. The rows
    of a prompt lie next to each other. Call it before ``Batch.pad_rows``.

    Raises:
        DataError: no rows, a uid that comes back after another one, or one that is None or NaN.
        TypeError, ValueError: uids that are not one hashable per row.

    >>> prompt_boundaries(["a", "a", "b", "c", "c", "c"]).tolist()
    [0, 2, 3, 6]
    """
    keys = checked_uids(uids)
    if not keys:
        raise DataError("uids is empty (0 rows); give at least one row")
    starts: dict[Hashable, int] = {}
    for row, uid in enumerate(keys):
        if row and uid == keys[row - 1]:
            continue
        if starts.setdefault(uid, row) != row:
            raise DataError(
                f"uid {uid!r} begins at row {starts[uid]} and comes back at row {row} after uid "
                f"{keys[row - 1]!r}; rows of one prompt must lie next to each other: sort the rows "
                "by uid (stable), give prompts different uids, or take the boundaries before "
                "Batch.pad_rows, whose rows repeat the first uid"
            )
    return np.array([*starts.values(), len(keys)], dtype=np.int64)


def mini_batch_boundaries(uids: Uids, prompts_per_mini_batch: int) -> np.ndarray:
    """The row at which each mini-batch begins, and the number of rows: int64 [M + 1], 0, ..., N.

    Every mini-batch has ``prompts_per_mini_batch`` prompts, with any number of rows: the number of
    optimizer steps does not depend on how many turns the model took.

    Raises:
        ValueError: the number of prompts is not a multiple of ``prompts_per_mini_batch``.
        DataError, TypeError: as :func:`prompt_boundaries`; ``prompts_per_mini_batch`` not an int.

    >>> mini_batch_boundaries(["a", "a", "b", "c", "c", "c"], 1).tolist()
    [0, 2, 3, 6]
    >>> mini_batch_boundaries(["a", "a", "b", "c", "c", "c", "d"], 2).tolist()
    [0, 3, 7]
    """
    size = checked_int("prompts_per_mini_batch", prompts_per_mini_batch)
    starts = prompt_boundaries(uids)
    num_prompts = len(starts) - 1
    left = num_prompts % size
    if left:
        raise ValueError(
            f"{num_prompts} prompts do not divide into mini-batches of prompts_per_mini_batch="
            f"{size}: {num_prompts // size} mini-batches and {left} prompts left over; drop {left} "
            f"prompts, add {size - left}, or choose a divisor of {num_prompts}"
        )
    return starts[::size].copy()


def checked_boundaries(boundaries: Any, num_rows: int) -> list[int]:
    """``boundaries`` as Python ints 0, ..., ``num_rows`` that rise; anything else is refused."""
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
    for i, (start, stop) in enumerate(pairwise(numbers), start=1):
        if stop <= start:
            raise ValueError(
                f"boundaries must rise, got {start} and then {stop} at entry {i}: a mini-batch has "
                f"at least one row; {way_out}"
            )
    if numbers[-1] != num_rows:
        raise ValueError(
            f"boundaries end at {numbers[-1]}, but there are {num_rows} rows; {way_out}"
        )
    return numbers
