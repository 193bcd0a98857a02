"""Which trajectory a row is a step of."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit.errors import DataError
from torch_collate_kit.reading.grouping import flag_column
from torch_collate_kit.rl.uids import checked_uids

__all__ = ["checked_trajectory_ids", "last_steps", "trajectories"]


def last_steps(
    is_last_step: Any, trajectory_ids: Any, uids: Sequence[Hashable], rows: np.ndarray
) -> np.ndarray | None:
    """bool [N], whether each of ``rows`` is the last step of its trajectory; None: nothing says.

    Raises:
        DataError: ``is_last_step`` and ``trajectory_ids`` contradict each other.
        TypeError, ValueError: not one bool, not one id for every uid.
    """
    last = None if is_last_step is None else _checked_flags(is_last_step, len(uids))[rows]
    if trajectory_ids is None:
        return last
    ids = checked_uids(trajectory_ids, len(uids), name="trajectory_id")
    return checked_trajectory_ids([(uids[i], ids[i]) for i in rows.tolist()], last, rows)


def checked_trajectory_ids(
    names: Sequence[tuple[Hashable, Hashable]],
    last: np.ndarray | None,
    rows: np.ndarray,
    *,
    row: str = "row",
) -> np.ndarray:
    """``last``, checked against the uids and trajectory ids of the steps, or made of them.

    Raises:
        DataError: a trajectory that comes back, or a flag that contradicts the ids; not the last
            flag of all, after which nothing comes.

    >>> checked_trajectory_ids([("a", 0), ("a", 0), ("a", 1)], None, np.arange(3)).tolist()
    [False, True, True]
    """
    begins: dict[tuple[Hashable, Hashable], int] = {}
    ends = np.ones(len(names), dtype=bool)
    for i, name in enumerate(names):
        if i and name == names[i - 1]:
            ends[i - 1] = False
        elif begins.setdefault(name, i) != i:
            raise DataError(
                f"trajectory_id {name[1]!r} of uid {name[0]!r} begins at {row} "
                f"{rows[begins[name]]} and comes back at {row} {rows[i]}; the {row}s of a "
                "trajectory lie next to each other, in the order of their steps, and other "
                "trajectories have other ids"
            )
    if last is None:
        return ends
    for i in np.flatnonzero(last[:-1] != ends[:-1]).tolist():
        (uid, own), (next_uid, other) = names[i], names[i + 1]
        if last[i]:
            raise DataError(
                f"{row} {rows[i]} has is_last_step=True, but {row} {rows[i + 1]} is of the same "
                f"trajectory, trajectory_id {own!r} of uid {uid!r}; only the last {row} of a "
                "trajectory is its last step"
            )
        raise DataError(
            f"{row} {rows[i]} has is_last_step=False, but {row} {rows[i + 1]}, the next step, is "
            f"of trajectory_id {other!r} of uid {next_uid!r}, not of {own!r} of {uid!r}; set "
            f"is_last_step=True at the last {row} of every trajectory, or give both {row}s one "
            "trajectory_id"
        )
    return last


def _checked_flags(is_last_step: Any, num_rows: int) -> np.ndarray:
    """``is_last_step`` as bool [num_rows].

    Raises:
        TypeError: nothing to iterate over.
        ValueError: another number of entries than rows.
        DataError: an entry that is neither a bool nor 0 or 1.
    """
    if isinstance(is_last_step, str | bytes) or not isinstance(is_last_step, Iterable):
        raise TypeError(
            f"is_last_step must be one bool per row, got {is_last_step!r:.40} of type "
            f"{type(is_last_step).__name__}; pass a list"
        )
    if isinstance(is_last_step, np.ndarray | Tensor):
        flags, shape = is_last_step.tolist(), list(is_last_step.shape)
    else:
        flags = list(is_last_step)
        shape = [len(flags)]
    if shape != [num_rows]:
        raise ValueError(
            f"is_last_step has shape {shape} for {num_rows} rows; give one bool per row"
        )
    return np.array(flag_column("is_last_step", flags, "row"), dtype=bool)


def trajectories(last: np.ndarray, uids: Sequence[Hashable], rows: np.ndarray) -> np.ndarray:
    """The number of the trajectory of each step: int64 [N], 0, 0, 1, ...

    ``last`` bool [N] is True at the last step of each, ``rows`` [N] says which rows of the batch
    the steps are, for messages.

    Raises:
        DataError: a trajectory with two uids, or steps after the last trajectory's end.

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
