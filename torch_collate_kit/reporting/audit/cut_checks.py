"""What is lost where rows are cut: by ``max_tokens``, or before they came here."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.reporting.audit.columns import AuditColumns, Found
from torch_collate_kit.reporting.audit.findings import Severity

__all__ = ["eos_truncated", "prompt_longer_than_row", "target_truncated"]

_USUAL = 0.5  # of the rows with a target: if so many end it with EOS, the others should


def _is_cut(columns: AuditColumns) -> np.ndarray:
    """bool [N], rows longer than ``max_tokens`` that have a target."""
    if columns.max_tokens is None:
        return np.zeros(len(columns.lengths), dtype=np.bool_)
    return (columns.lengths > columns.max_tokens) & (columns.num_trained > 0)


def _is_near_end(columns: AuditColumns, places: np.ndarray) -> np.ndarray:
    """bool [N], whether the token of each row, or one of the two before it, ends an answer."""
    found = columns.is_end[places]
    for i in (1, 2):
        found |= columns.is_end[np.maximum(places - i, columns.starts)]
    return found


def _limits(columns: AuditColumns) -> np.ndarray:
    """int64 [N], the first token of each row that is cut off."""
    return columns.starts + (columns.max_tokens or 0)


def target_truncated(columns: AuditColumns) -> Found | None:
    """Rows that keep a part of their target and lose the rest when cut at ``max_tokens``.

    Needs ``max_tokens``. Silent about rows that lose all of it, which
    :func:`prompt_longer_than_row` names, and about rows of which only untrained tokens are cut.
    """
    limits = _limits(columns)
    is_lost = _is_cut(columns) & (columns.last_trained >= limits) & (columns.first_trained < limits)
    rows = np.flatnonzero(is_lost)
    if not len(rows):
        return None
    before = np.append(0, np.cumsum(columns.trained))
    lost = before[columns.ends[rows]] - before[limits[rows]]
    first = int(limits[rows[0]])
    place = first, int(columns.last_trained[rows[0]]) + 1
    values = {
        "lost": f"{int(lost.sum()):,}",
        "targets": f"{int(columns.num_trained[rows].sum()):,}",
    }
    return Found(rows, place, values={**values, "max_tokens": columns.max_tokens})


def prompt_longer_than_row(columns: AuditColumns) -> Found | None:
    """Rows whose first trained token is beyond ``max_tokens``, so that no target is left.

    Needs ``max_tokens``. Silent about rows without a target.
    """
    is_lost = _is_cut(columns) & (columns.first_trained >= _limits(columns))
    rows = np.flatnonzero(is_lost)
    if not len(rows):
        return None
    first = int(columns.first_trained[rows[0]])
    place = first, int(columns.ends[rows[0]])
    return Found(rows, place, values={"max_tokens": columns.max_tokens})


def eos_truncated(columns: AuditColumns) -> Found | None:
    """Rows whose answer is there but for its EOS.

    Needs a tokenizer with an EOS. Either the last trained token is an EOS beyond ``max_tokens``,
    with a part of the target before it; or the row ends within its answer, while at least half of
    the rows end theirs with EOS, after which white space may follow, of a token or two. A rollout
    that ends without EOS was stopped by the limit of generation, which is a note and not a warning.
    Silent where few rows train an EOS at all: that is
    :func:`~torch_collate_kit.reporting.audit.end_checks.eos_never_trained`.
    """
    has_target = columns.num_trained > 0
    last = columns.last_trained
    ends_well = has_target & _is_near_end(columns, last)
    limits = _limits(columns)
    is_beyond = _is_cut(columns) & ends_well & (last >= limits)
    is_beyond &= columns.first_trained < limits
    stops = has_target & ~ends_well & (last == columns.ends - 1)
    if ends_well.sum() < _USUAL * has_target.sum():
        stops[:] = False
    rows = np.flatnonzero(is_beyond | stops)
    if not len(rows):
        return None
    where = [f"which is beyond max_tokens={columns.max_tokens}"] * bool(is_beyond.any())
    where += ["as they stop without EOS"] * bool(stops.any())
    place = int(last[rows[0]])
    is_stopped = columns.rollouts is not None and not is_beyond.any()
    severity: Severity | None = "note" if is_stopped else None
    values = {"where": " or ".join(where)}
    return Found(rows, (place, place + 1), severity, values)
