"""Rows against each other: copies, contradictions, and rollouts of one prompt."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.reporting.audit.check import FEW, MOST, check
from torch_collate_kit.reporting.audit.columns import AuditColumns
from torch_collate_kit.reporting.audit.findings import Found

_MANY = 20  # rows of which half share their prompt: several answers are meant
_HARD = 0.8  # of the groups: more without variance is a warning; of hard prompts half is usual


@check("warning", of_rollouts="note")
def duplicates(columns: AuditColumns) -> Found | None:
    """Find rows with exactly the same tokens."""
    heads = columns.heads
    counts = np.diff(heads, append=len(columns.lengths))
    lengths = np.add.reduceat(columns.lengths, heads)
    groups = columns.equal_spans(columns.starts[heads], lengths)
    is_copied = (np.bincount(groups)[groups] > 1) & ~columns.has_image[heads]
    num_copies = np.count_nonzero(is_copied) - len(np.unique(groups[is_copied]))
    return columns.found_in(
        np.repeat(is_copied, counts),
        f"ROWS have the same tokens as another one; drop the copies ({num_copies:,}), unless the "
        "weight that they get is meant",
    )


@check("warning")
def contradictory_answers(columns: AuditColumns) -> Found | None:
    """Find rows with the same prompt and other answers, in rows with one trained run."""
    if columns.are_rollouts or not columns.has_target or len(columns.segments):
        return None
    first, stop = columns.first_trained, columns.last_trained + 1
    is_asked = (stop - first == columns.num_trained) & (columns.num_trained > 0)
    is_asked &= (first > columns.starts + 1) & (columns.ends - stop <= 2) & ~columns.has_image
    if not is_asked.any():
        return None
    starts, answers, stops = columns.starts[is_asked], first[is_asked], stop[is_asked]
    prompts = columns.equal_spans(starts, answers - starts)
    texts = columns.equal_spans(answers, stops - answers)
    different = np.bincount(np.unique(np.stack([prompts, texts]), axis=1)[0])  # per prompt
    is_found = np.zeros_like(is_asked)
    is_found[is_asked] = different[prompts] > 1
    several, num_found = different[different > 1], np.count_nonzero(is_found)
    is_meant = num_found >= _MANY and num_found >= MOST * len(is_found)
    return columns.found_at(
        first[is_found],
        f"ROWS give {several.sum():,} different answers to {len(several):,} prompts; keep one "
        "answer for each, unless several are meant",
        (stop - first)[is_found],
        severity="note" if is_meant else None,
    )


def _prompts(columns: AuditColumns) -> np.ndarray:
    """Return equal numbers for rollouts with equal prompts: int64 [N]."""
    return columns.equal_spans(columns.starts, columns.responses - columns.starts)


@check("note", "scores")
def reward_without_variance(columns: AuditColumns) -> Found | None:
    """Find groups of rollouts that have one reward, by the last step of each trajectory."""
    chosen = np.flatnonzero(columns.is_last_step)
    groups = columns.uids if len(columns.uids) else _prompts(columns)
    groups, scores = groups[chosen], columns.scores[chosen]
    _, groups, counts = np.unique(groups, return_inverse=True, return_counts=True)
    least, most = np.full(len(counts), np.inf), np.full(len(counts), -np.inf)
    np.minimum.at(least, groups, scores)
    np.maximum.at(most, groups, scores)
    is_flat = (counts > 1) & (least == most)
    if not is_flat.any():
        return None
    num_flat, num_groups = np.count_nonzero(is_flat), np.count_nonzero(counts > 1)
    highest = np.count_nonzero(is_flat & (most == scores.max()))
    lowest = np.count_nonzero(is_flat & (most == scores.min()))
    return columns.found_in(
        columns.in_rows(chosen[is_flat[groups]]),
        f"in {num_flat:,} of {num_groups:,} groups ({num_flat / num_groups:.0%}), which are ROWS, "
        "all rollouts of a prompt have the same reward, so their advantages are 0 "
        f"({highest:,} have the highest of the dataset, {lowest:,} have the lowest); choose "
        "prompts that are solved sometimes, or filter such groups",
        severity="warning" if num_flat > _HARD * num_groups else None,
    )


@check("warning", "uids")
def uid_without_group(columns: AuditColumns) -> Found | None:
    """Find rollouts whose uid no other row has, and whose prompt others have."""
    prompts, uids = _prompts(columns), columns.uids
    is_alone, is_shared = np.bincount(uids)[uids] == 1, np.bincount(prompts)[prompts] > 1
    if is_alone.all() and is_shared.mean() < MOST:
        return None  # one rollout per prompt, of which some are the same
    return columns.found_in(
        is_alone & is_shared,
        "ROWS have a uid of their own, though others have the same prompt: advantages compare the "
        "rollouts of one uid, and of these there is one; give all rollouts of a prompt one uid",
    )


@check("warning", "uids")
def uid_of_several_prompts(columns: AuditColumns) -> Found | None:
    """Find rollouts whose uid most often stands for another prompt, or one uid for all."""
    if not columns.is_last_step.all():
        return None
    prompts, uids = _prompts(columns), columns.uids
    pairs, which, counts = np.unique(
        np.stack([uids, prompts]), axis=1, return_inverse=True, return_counts=True
    )
    most = np.zeros(uids.max() + 1, dtype=np.int64)
    np.maximum.at(most, pairs[0], counts)
    is_odd = counts[which] < most[uids]
    if len(most) == 1 and pairs.shape[1] > 1:
        is_odd[:] = True
    elif is_odd.mean() > FEW:
        return None
    return columns.found_in(
        is_odd,
        "ROWS have the uid of rollouts with another prompt, with which their advantages are "
        "compared; give each prompt a uid of its own",
    )
