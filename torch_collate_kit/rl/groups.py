"""The prompt and the trajectory of each row."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit.batch.rows import PackedValues
from torch_collate_kit.errors import DataError
from torch_collate_kit.reading.values import flag_column, id_column

__all__ = [
    "Uids",
    "checked_trajectory_ids",
    "checked_uids",
    "group_numbers",
    "last_steps",
    "trajectories",
]

Uids = Sequence[Hashable] | np.ndarray | Tensor


def checked_uids(uids: Any, num_rows: int | None = None, *, name: str = "uid") -> list[Hashable]:
    """Return ``uids`` as hashables that compare by value; None, NaN and packed rows are refused."""
    if isinstance(uids, Sequence) and any(isinstance(uid, PackedValues) for uid in uids):
        row = next(i for i, uid in enumerate(uids) if isinstance(uid, PackedValues))
        raise ValueError(
            f"{name}s[{row}] is {uids[row]!r}, of a packed row, and here a row is one rollout; "
            "compute this on the batch of a RolloutCollator, and move advantages to packed rows "
            "with rl.from_response_values(rl.response_values(advantages, padded), packed)"
        )
    return id_column(name, _one_per_row(f"{name}s", name, uids, num_rows), "row")


def _one_per_row(name: str, what: str, values: Any, num_rows: int | None) -> list[Any]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(
            f"{name} must be one {what} per row, got {values!r:.40} of type "
            f"{type(values).__name__}; pass a list"
        )
    if isinstance(values, np.ndarray | Tensor):
        if values.ndim != 1:
            raise ValueError(f"{name} must be one {what} per row, got shape {list(values.shape)}")
        values = values.tolist()
    listed = list(values)
    if num_rows is not None and len(listed) != num_rows:
        raise ValueError(
            f"{name} has {len(listed)} entries for {num_rows} rows; give one {what} per row"
        )
    return listed


def group_numbers(uids: Sequence[Hashable]) -> tuple[np.ndarray, list[Hashable]]:
    """Return the group of each uid, int64 [N], and the uid of each group, in order."""
    numbers: dict[Hashable, int] = {}
    groups = np.array([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=np.int64)
    return groups, list(numbers)


def last_steps(
    is_last_step: Any, trajectory_ids: Any, uids: Sequence[Hashable], rows: np.ndarray
) -> np.ndarray:
    """Return whether each of ``rows`` ends its trajectory: bool [N], all True by default."""
    last = None
    if is_last_step is not None:
        flags = _one_per_row("is_last_step", "bool", is_last_step, len(uids))
        last = np.array(flag_column("is_last_step", flags, "row"), dtype=bool)[rows]
    if trajectory_ids is not None:
        ids = checked_uids(trajectory_ids, len(uids), name="trajectory_id")
        last = checked_trajectory_ids([(uids[i], ids[i]) for i in rows.tolist()], last, rows)
    return np.ones(len(rows), dtype=bool) if last is None else last


def checked_trajectory_ids(
    names: Sequence[tuple[Hashable, Hashable]],
    last: np.ndarray | None,
    rows: np.ndarray,
    *,
    row: str = "row",
) -> np.ndarray:
    """Check ``last`` (but its last entry) against (uid, trajectory id) pairs, or derive it."""
    begins: dict[tuple[Hashable, Hashable], int] = {}
    ends = np.ones(len(names), dtype=bool)
    for i, name in enumerate(names):
        if i and name == names[i - 1]:
            ends[i - 1] = False
        elif begins.setdefault(name, i) != i:
            raise DataError(
                f"trajectory_id {name[1]!r} of uid {name[0]!r} begins at {row} "
                f"{rows[begins[name]]} and comes back at {row} {rows[i]}; the {row}s of a "
                "trajectory lie next to each other, in the order of their steps"
            )
    if last is None:
        return ends
    for i in np.flatnonzero(last[:-1] != ends[:-1]).tolist():
        (uid, own), (next_uid, other) = names[i], names[i + 1]
        raise DataError(
            f"{row} {rows[i]} has is_last_step={bool(last[i])} and trajectory_id {own!r} of uid "
            f"{uid!r}, but {row} {rows[i + 1]} has trajectory_id {other!r} of uid {next_uid!r}; "
            f"is_last_step is True at the last {row} of every trajectory, and only there"
        )
    return last


def trajectories(last: np.ndarray, uids: Sequence[Hashable], rows: np.ndarray) -> np.ndarray:
    """Return the number of the trajectory of each step, int64 [N]; ``rows`` are for messages."""
    for i in np.flatnonzero(~last).tolist():
        ends = i + 1 == len(last)
        if ends or uids[i + 1] != uids[i]:
            after = "no step follows" if ends else f"row {rows[i + 1]} is of uid {uids[i + 1]!r}"
            raise DataError(
                f"row {rows[i]} of uid {uids[i]!r} is not a last step, but {after}; the rows of a "
                "trajectory lie next to each other and end with is_last_step=True"
            )
    return np.cumsum(last) - last
