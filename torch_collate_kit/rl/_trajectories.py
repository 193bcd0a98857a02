"""Which trajectory a row is a step of."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit.errors import DataError

__all__ = ["checked_last_steps", "trajectories"]


def checked_last_steps(is_last_step: Any, num_rows: int) -> np.ndarray:
    """``is_last_step`` as bool [num_rows].

    Raises:
        TypeError: neither bools nor 0 and 1.
        ValueError: another number of entries than rows.
    """
    on_host = is_last_step.cpu() if isinstance(is_last_step, Tensor) else is_last_step
    flags = np.asarray(on_host)
    if flags.shape != (num_rows,):
        raise ValueError(
            f"is_last_step has shape {list(flags.shape)} for {num_rows} rows; give one bool a row"
        )
    if (
        num_rows
        and flags.dtype.kind != "b"
        and not (flags.dtype.kind in "iu" and np.isin(flags, (0, 1)).all())
    ):
        raise TypeError(
            f"is_last_step must be True or False a row, got {flags[:4].tolist()} ({flags.dtype})"
        )
    return flags.astype(bool)


def trajectories(last: np.ndarray, uids: Sequence[Hashable], rows: np.ndarray) -> np.ndarray:
    """The number of the trajectory of each step: int64 [N], 0, 0, 1, ...

    ``last`` bool [N] is True at the last step of each, ``rows`` [N] says which rows of the batch
    the steps are, for messages.

    Raises:
        DataError: a trajectory with two uids, or steps behind the last trajectory's end.

    >>> trajectories(np.array([False, True, True]), "aab", np.arange(3)).tolist()
    [0, 0, 1]
    """
    for i in np.flatnonzero(~last).tolist():
        if i + 1 == len(last):
            raise DataError(
                f"row {int(rows[i])} of uid {uids[i]!r} is not a last step, and no step follows; "
                "the last row of every trajectory needs is_last_step=True"
            )
        if uids[i + 1] != uids[i]:
            raise DataError(
                f"row {int(rows[i])} of uid {uids[i]!r} is not a last step, but the next step, row "
                f"{int(rows[i + 1])}, is of uid {uids[i + 1]!r}; the rows of a trajectory lie next "
                "to each other and end with is_last_step=True"
            )
    return np.cumsum(last) - last
