"""What is lost where rows are cut: by ``max_tokens``, or before they came here."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.ragged import span_indices
from torch_collate_kit.reporting.audit.check import check
from torch_collate_kit.reporting.audit.columns import AuditColumns, Found

__all__ = ["CHECKS"]

_USUAL = 0.5  # of the rows with a target: if so many end it with EOS, the others should


@check(
    "warning",
    "in {rows} a part of the target is beyond max_tokens={max_tokens}, {lost} of {targets} "
    'trained tokens: overflow="truncate" loses them; raise max_tokens, split the rows, or drop '
    "them",
    needs=("max_tokens",),
)
def target_truncated(columns: AuditColumns) -> Found | None:
    """Rows that keep a part of their target and lose the rest when cut at ``max_tokens``.

    Needs ``max_tokens``. Silent about rows that lose all of it, which
    :func:`prompt_longer_than_row` names, and about rows of which only untrained tokens are cut.
    """
    limits, is_lost = _cut_targets(columns)
    lost = span_indices(limits[is_lost], (columns.ends - limits)[is_lost])
    return columns.found_in(
        is_lost,
        limits,
        columns.last_trained + 1,
        lost=f"{np.count_nonzero(columns.trained[lost]):,}",
        targets=f"{columns.num_trained[is_lost].sum():,}",
        max_tokens=columns.max_tokens,
    )


@check(
    "warning",
    "in {rows} the prompt alone fills max_tokens={max_tokens}, so a row that is cut there has "
    "no target left; raise max_tokens, or drop them",
    needs=("max_tokens",),
)
def prompt_longer_than_row(columns: AuditColumns) -> Found | None:
    """Rows whose first trained token is beyond ``max_tokens``, so that no target is left.

    Needs ``max_tokens``. Silent about rows without a target.
    """
    first, max_tokens = columns.first_trained, columns.max_tokens
    is_lost = first >= columns.starts + (max_tokens or 0)
    return columns.found_in(is_lost, first, columns.ends, max_tokens=max_tokens)


@check(
    "warning",
    "{rows} lose the end of their answer, {where}, so they teach the model not to stop; drop "
    "them, or raise the limit that cuts them",
    needs=("eos",),
)
def eos_truncated(columns: AuditColumns) -> Found | None:
    """Rows whose answer is there but for its EOS.

    Needs a tokenizer with an EOS. Either the last trained token is an EOS beyond ``max_tokens``,
    with a part of the target before it; or the row ends within its answer, while at least half of
    the rows end theirs with EOS, after which white space may follow, of a token or two. A rollout
    that ends without EOS was stopped by the limit of generation, which is a note and not a warning.
    Silent where few rows train an EOS at all: that is
    :func:`~torch_collate_kit.reporting.audit.token_checks.eos_never_trained`.
    """
    has_target = columns.num_trained > 0
    ends_well = has_target & _is_near_end(columns, columns.last_trained)
    is_beyond = ends_well & _cut_targets(columns)[1]
    stops = has_target & ~ends_well & (columns.last_trained == columns.ends - 1)
    if ends_well.sum() < _USUAL * has_target.sum():
        stops[:] = False
    where = [f"which is beyond max_tokens={columns.max_tokens}"] * bool(is_beyond.any())
    where += ["as they stop without EOS"] * bool(stops.any())
    is_stopped = columns.are_rollouts and not is_beyond.any()
    return columns.found_in(
        is_beyond | stops,
        columns.last_trained,
        severity="note" if is_stopped else None,
        where=" or ".join(where),
    )


def _cut_targets(columns: AuditColumns) -> tuple[np.ndarray, np.ndarray]:
    """The first token of each row beyond ``max_tokens``, and where a part of the target is.

    int64 and bool [N].
    """
    if columns.max_tokens is None:
        return columns.ends, np.zeros(len(columns.lengths), dtype=np.bool_)
    limits = columns.starts + columns.max_tokens
    return limits, (columns.last_trained >= limits) & (columns.first_trained < limits)


def _is_near_end(columns: AuditColumns, places: np.ndarray) -> np.ndarray:
    """bool [N], whether the token of each row, or one of the two before it, ends an answer."""
    found = columns.is_end[places]
    for i in (1, 2):
        found |= columns.is_end[np.maximum(places - i, columns.starts)]
    return found


CHECKS = (
    target_truncated,
    prompt_longer_than_row,
    eos_truncated,
)
