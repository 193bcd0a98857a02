"""Where prompts and mini-batches begin among rows that lie prompt by prompt."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from torch_collate_kit._checks import checked_int
from torch_collate_kit.errors import DataError
from torch_collate_kit.rl._checks import Uids, checked_uids

__all__ = ["mini_batch_boundaries", "prompt_boundaries"]


def prompt_boundaries(uids: Uids) -> np.ndarray:
    """The row at which each prompt begins, and the number of rows: int64 [P + 1], 0, ..., N.

    ``uids`` names the prompt of each row: a list of hashables, an ndarray or a tensor [N]. The rows
    of one prompt (its samples, and their steps) lie next to each other. Take the uids of rows that
    were not padded yet: a row that ``Batch.pad_rows`` added repeats the uid of row 0.

    Raises:
        DataError: no rows, a uid that comes back after another one, or one that is None or NaN.
        TypeError, ValueError: uids that are not one hashable a row.

    >>> prompt_boundaries(["a", "a", "b", "c", "c", "c"]).tolist()
    [0, 2, 3, 6]
    """
    keys = checked_uids(uids)
    if not keys:
        raise DataError("uids is empty (0 rows); give at least one row")
    first_row: dict[Hashable, int] = {keys[0]: 0}
    starts = [0]
    for row in range(1, len(keys)):
        if keys[row] == keys[row - 1]:
            continue
        if keys[row] in first_row:
            raise DataError(
                f"uid {keys[row]!r} begins at row {first_row[keys[row]]} and comes back at row "
                f"{row} after uid {keys[row - 1]!r}; rows of one prompt must lie next to each "
                "other: sort the rows by uid (stable), give prompts different uids, or take the "
                "boundaries before Batch.pad_rows, whose rows repeat the first uid"
            )
        first_row[keys[row]] = row
        starts.append(row)
    return np.array([*starts, len(keys)], dtype=np.int64)


def mini_batch_boundaries(uids: Uids, prompts_per_mini_batch: int) -> np.ndarray:
    """The row at which each mini-batch begins, and the number of rows: int64 [M + 1], 0, ..., N.

    Every mini-batch has exactly ``prompts_per_mini_batch`` prompts, with however many rows these
    have: the number of optimizer steps does not depend on how many turns the model took.

    Raises:
        ValueError: a number of prompts that does not divide.
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
