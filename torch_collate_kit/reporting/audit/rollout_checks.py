"""What rollouts have in addition: rewards and uids by prompt."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.reporting.audit.check import check
from torch_collate_kit.reporting.audit.columns import AuditColumns, Found
from torch_collate_kit.reporting.audit.row_checks import same_spans

__all__ = ["CHECKS"]

_MOST = 0.8  # of the groups: more without variance is a warning; of hard prompts half is usual
_SHARED, _FEW = 0.5, 1 / 3  # of the rows: most share their prompt; an exception


@check(
    "note",
    "in {groups} of {all_groups} groups ({share:.0%}), which are {rows}, all rollouts of a "
    "prompt have the same reward, so their advantages are 0 ({all_same}); choose prompts that "
    "are solved sometimes, or filter such groups",
)
def reward_without_variance(columns: AuditColumns) -> Found | None:
    """Groups of rollouts of one prompt that have the same reward, all of them.

    Needs rollouts. Groups are those of ``uid``, else of equal prompts; of trajectories of several
    steps the last step counts. Silent about groups of one. A note, and a warning where it is more
    than four of five groups.
    """
    if columns.scores is None or columns.is_last_step is None or not columns.is_last_step.any():
        return None
    chosen = np.flatnonzero(columns.is_last_step)
    groups, scores = _groups(columns)[chosen], columns.scores[chosen]
    _, groups, counts = np.unique(groups, return_inverse=True, return_counts=True)
    least, most = np.full(len(counts), np.inf), np.full(len(counts), -np.inf)
    np.minimum.at(least, groups, scores)
    np.maximum.at(most, groups, scores)
    is_flat = (counts > 1) & (least == most)
    if not is_flat.any():
        return None
    num_flat, num_groups = np.count_nonzero(is_flat), np.count_nonzero(counts > 1)
    share = num_flat / num_groups
    kinds = ("highest", most == scores.max()), ("lowest", most == scores.min())
    same = [f"{np.count_nonzero(is_flat & is_kind):,} have the {kind}" for kind, is_kind in kinds]
    is_found = np.zeros(len(columns.lengths), dtype=np.bool_)
    is_found[chosen] = is_flat[groups]
    return columns.found_in(
        is_found,
        severity="warning" if share > _MOST else None,
        groups=f"{num_flat:,}",
        all_groups=f"{num_groups:,}",
        share=share,
        all_same=f"{same[0]} of the dataset, {same[1]}",
    )


def _groups(columns: AuditColumns) -> np.ndarray:
    """int64 [N], a number for each prompt."""
    if columns.uids is None:
        return _prompts(columns)
    known: dict[object, int] = {}
    return np.array([known.setdefault(uid, len(known)) for uid in columns.uids])


def _prompts(columns: AuditColumns) -> np.ndarray:
    """int64 [N], equal numbers for equal prompts."""
    return same_spans(columns.ids, columns.starts, columns.responses - columns.starts)


@check(
    "warning",
    "{rows} have a uid of their own, though others have the same prompt: advantages compare the "
    "rollouts of one uid, and of these there is one; give all rollouts of a prompt one uid",
)
def uid_without_group(columns: AuditColumns) -> Found | None:
    """Rollouts whose uid no other row has, and whose prompt others have.

    Needs rollouts with uids. Silent where uids are all different and fewer than half of the rows
    share their prompt, as with one rollout per prompt.
    """
    if columns.uids is None:
        return None
    prompts, uids = _prompts(columns), _groups(columns)
    is_alone = np.bincount(uids)[uids] == 1
    is_shared = np.bincount(prompts)[prompts] > 1
    if is_alone.all() and is_shared.mean() < _SHARED:
        return None
    return columns.found_in(is_alone & is_shared)


@check(
    "warning",
    "{rows} have the uid of rollouts with another prompt, with which their advantages are "
    "compared; give each prompt a uid of its own",
)
def uid_of_several_prompts(columns: AuditColumns) -> Found | None:
    """Rollouts whose uid most often stands for another prompt, or one uid for all prompts.

    Needs rollouts with uids. Silent about trajectories of several steps, and where more than a
    third of the rows are so, as with prompts that differ by a date.
    """
    if columns.uids is None or columns.is_last_step is None or not columns.is_last_step.all():
        return None
    prompts, uids = _prompts(columns), _groups(columns)
    pairs, which, counts = np.unique(
        np.stack([uids, prompts]), axis=1, return_inverse=True, return_counts=True
    )
    most = np.zeros(uids.max() + 1, dtype=np.int64)
    np.maximum.at(most, pairs[0], counts)
    is_odd = counts[which] < most[uids]
    if len(most) == 1 and pairs.shape[1] > 1:
        is_odd[:] = True
    elif is_odd.mean() > _FEW:
        return None
    return columns.found_in(is_odd)


CHECKS = (
    reward_without_variance,
    uid_without_group,
    uid_of_several_prompts,
)
