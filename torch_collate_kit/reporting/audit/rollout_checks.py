"""What rollouts have in addition: rewards by prompt, and log-probabilities."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.reporting.audit.check import check
from torch_collate_kit.reporting.audit.columns import AuditColumns, Found
from torch_collate_kit.reporting.audit.row_checks import same_spans

__all__ = ["CHECKS"]

_MOST = 0.8  # of the groups: more without variance is a warning; of hard prompts half is usual
_NEARLY_ALL, _HARDLY_ANY = 0.95, 0.05  # rows with a 0 at their end; other tokens with one
_LEAST_ROWS = 4
_SURE, _LEAST_CHANCE = 1e-3, 0.01  # that zeros stand there by chance; of a zero, at least
_ROUNDING = 1e-3  # over 0, of a log-probability in half precision


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
        return same_spans(columns.ids, columns.starts, columns.responses - columns.starts)
    known: dict[object, int] = {}
    return np.array([known.setdefault(uid, len(known)) for uid in columns.uids])


@check(
    "error",
    "{rows} have logprobs over 0, such as {value:.3g}, which no log-probability is; the sign "
    "is turned, or they are probabilities",
)
def logprobs_positive(columns: AuditColumns) -> Found | None:
    """Rows with a log-probability over 0, by more than the rounding of half precision.

    Needs rollouts with logprobs.
    """
    if columns.logprobs is None:
        return None
    places = np.flatnonzero(columns.logprobs > _ROUNDING)
    if not len(places):
        return None
    return columns.found_at(places, value=float(columns.logprobs[places[0]]))


@check(
    "error",
    "the logprobs of {rows} are shifted by one column: {evidence}; give logprobs[i] of "
    "response_ids[i]",
)
def logprobs_shifted(columns: AuditColumns) -> Found | None:
    """Rollouts whose logprobs belong to the token before, or to the next one.

    Needs rollouts with logprobs, and one of two kinds of evidence.

    The first: tokens that the policy did not sample (a tool's, weight 0) have the log-probability
    0.0, as docs/contract.md asks for. Of a run of them, only the first has another value, and a 0.0
    stands right after the run; or only the last, and right before. This must hold for at least 95%
    of the runs that begin (or end) so, and for more than chance explains (to 0.1%), given how many
    other tokens have a 0.0. Then the rows that show it are shifted.

    The second: the 0.0 with which a shift fills up stands at the same end of at least 95% of the
    rows, four at least, and next to nowhere else (5%). The tokens there must differ, since of one
    that begins or ends every answer, such as EOS, the policy may well be certain.

    Silent where a tool's tokens have real values, or where exact zeros are frequent.
    """
    if columns.logprobs is None:
        return None
    is_zero = columns.logprobs == 0
    is_out = ~(columns.trained | np.isnan(columns.logprobs))  # in a response, not sampled
    return _shifted_runs(columns, is_zero, is_out) or _shifted_ends(columns, is_zero)


def _shifted_runs(columns: AuditColumns, is_zero: np.ndarray, is_out: np.ndarray) -> Found | None:
    """By runs of tokens of weight 0 inside a response: the rows of those that show a shift."""
    edges = np.flatnonzero(np.diff(is_out, prepend=False, append=False))
    begins, stops = edges[::2], edges[1::2]  # each in one row, as rows begin with a prompt
    rows = columns.rows_of(begins)
    inside = (begins > columns.responses[rows]) & (stops < columns.ends[rows])
    begins, stops = begins[inside], stops[inside]
    if not len(begins):
        return None
    before = np.append(0, np.cumsum(is_zero))
    is_one_off = before[stops] - before[begins] == stops - begins - 1
    is_inner = columns.trained.copy()  # a shift fills up the first or the last
    is_inner[columns.responses] = is_inner[columns.ends - 1] = False
    num_zeros, num_inner = int((is_zero & is_inner).sum()), max(int(is_inner.sum()), 1)
    for odd, beyond, neighbour in (
        (begins, stops, "before"),
        (stops - 1, begins - 1, "after"),
    ):
        is_like = is_one_off & ~is_zero[odd]
        is_shifted = is_like & is_zero[beyond]
        num_shifted = int(is_shifted.sum())
        num_others = num_zeros - int((is_shifted & is_inner[beyond]).sum())
        chance = max(num_others / num_inner, _LEAST_CHANCE)
        if num_shifted < _NEARLY_ALL * is_like.sum() or chance**num_shifted > _SURE:
            continue
        evidence = (
            "the zeros of tokens that the policy did not sample stand one column off, so each "
            f"value is of the token {neighbour} it"
        )
        return columns.found_at(odd[is_shifted], evidence=evidence)
    return None


def _shifted_ends(columns: AuditColumns, is_zero: np.ndarray) -> Found | None:
    """By the zero that fills up the first or the last column: all rows that have it."""
    is_long = columns.ends - columns.responses > 2
    if np.count_nonzero(is_long) < _LEAST_ROWS:
        return None
    first, last = columns.responses[is_long], columns.ends[is_long] - 1
    num_tokens = int((columns.ends - columns.responses).sum())
    is_zero = is_zero & columns.trained
    for ends, where, neighbour in ((first, "first", "before"), (last, "last", "after")):
        is_filled = is_zero[ends]
        num_others = np.count_nonzero(is_zero) - np.count_nonzero(is_filled)
        if is_filled.mean() < _NEARLY_ALL or num_others > _HARDLY_ANY * (num_tokens - len(ends)):
            continue
        if np.unique(columns.ids[ends], return_counts=True)[1].max() > len(ends) / 2:
            continue
        evidence = (
            f"the {where} token of a response has the log-probability 0.0 and hardly any other "
            f"has, so each value is of the token {neighbour} it"
        )
        return columns.found_at(ends[is_filled], evidence=evidence)
    return None


CHECKS = (
    reward_without_variance,
    logprobs_shifted,
    logprobs_positive,
)
