"""First rows of prompts and mini-batches, among rows that lie prompt by prompt."""

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
    """Return the first row of each prompt, and the number of rows: int64 [P + 1], 0, ..., N.

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
                f"{keys[row - 1]!r}; sort the rows by uid (stable), give prompts different uids, "
                "or compute boundaries before Batch.pad_rows, whose rows repeat the first uid"
            )
    return np.array([*starts.values(), len(keys)], dtype=np.int64)


def mini_batch_boundaries(uids: Uids, prompts_per_mini_batch: int) -> np.ndarray:
    """Return the first row of each mini-batch, and the number of rows: int64 [M + 1], 0, ..., N.

    Every mini-batch has ``prompts_per_mini_batch`` prompts, with any number of rows: the number of
    optimizer steps does not depend on how many turns the model took.

    Raises:
        ValueError: the number of prompts is not a multiple of ``prompts_per_mini_batch``.
        DataError, TypeError: as :func:`prompt_boundaries`; ``prompts_per_mini_batch`` not an int.

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
            f"{size}; drop {left} prompts, add {size - left}, or choose a divisor of {num_prompts}"
        )
    return starts[::size].copy()


def checked_boundaries(boundaries: Any, num_rows: int) -> list[int]:
    """Return ``boundaries`` as Python ints 0, ..., ``num_rows`` that rise."""
    edges = np.asarray(boundaries.cpu() if isinstance(boundaries, Tensor) else boundaries)
    numbers: list[int] = edges.tolist()
    if edges.ndim == 1 and edges.dtype.kind in "iu" and len(numbers) > 1:
        rises = all(start < stop for start, stop in pairwise(numbers))
        if rises and numbers[0] == 0 and numbers[-1] == num_rows:
            return numbers
    raise ValueError(
        f"boundaries must be integers that rise from 0 to the {num_rows} rows, got {edges}; pass "
        "what mini_batch_boundaries(uids, ...) of these rows returned"
    )
