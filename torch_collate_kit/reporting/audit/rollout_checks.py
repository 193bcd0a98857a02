"""What rollouts have in addition: rewards by prompt, and log-probabilities."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.reporting.audit.columns import AuditColumns, Found, RolloutColumns
from torch_collate_kit.reporting.audit.repeat_checks import same_spans

__all__ = ["logprobs_positive", "logprobs_shifted", "reward_without_variance"]

_MOST = 0.8  # of the groups: more without variance is a warning; of hard prompts half is usual
_NEARLY_ALL, _HARDLY_ANY = 0.95, 0.05  # rows with a 0 at their end; other tokens with one
_LEAST_ROWS = 4
_SURE, _LEAST_CHANCE = 1e-3, 0.01  # that zeros stand there by chance; of a zero, at least
_ROUNDING = 1e-3  # over 0, of a log-probability in half precision


def reward_without_variance(columns: AuditColumns) -> Found | None:
    """Groups of rollouts of one prompt that have the same reward, all of them.

    Needs rollouts. Groups are those of ``uid``, else of equal prompts; of trajectories of several
    steps the last step counts. Silent about groups of one. A note, and a warning where it is more
    than four of five groups.
    """
    rollouts = columns.rollouts
    if rollouts is None:
        return None
    chosen = np.arange(len(columns.lengths))
    if rollouts.is_last_step is not None:
        chosen = np.flatnonzero(rollouts.is_last_step)
    groups = _groups(columns, rollouts)[chosen]
    scores = rollouts.scores[chosen]
    if not len(groups):
        return None
    order = np.argsort(groups, kind="stable")
    firsts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    counts = np.diff(np.append(firsts, len(order)))
    least = np.minimum.reduceat(scores[order], firsts)
    most = np.maximum.reduceat(scores[order], firsts)
    is_group, is_flat = counts > 1, (counts > 1) & (least == most)
    if not is_flat.any():
        return None
    rows = np.sort(chosen[order[np.repeat(is_flat, counts)]])
    share = is_flat.sum() / is_group.sum()
    kinds = ("highest", most == scores.max()), ("lowest", most == scores.min())
    same = [f"{int((is_flat & is_kind).sum()):,} have the {kind}" for kind, is_kind in kinds]
    values = {
        "groups": f"{int(is_flat.sum()):,}",
        "all_groups": f"{int(is_group.sum()):,}",
        "share": share,
        "all_same": f"{same[0]} of the dataset, {same[1]}",
    }
    return Found(rows, severity="warning" if share > _MOST else None, values=values)


def _groups(columns: AuditColumns, rollouts: RolloutColumns) -> np.ndarray:
    """int64 [N], a number for each prompt."""
    if rollouts.uids is None:
        prompts = columns.lengths - rollouts.num_actions
        return same_spans(columns.ids, columns.starts, prompts)
    known: dict[object, int] = {}
    return np.array([known.setdefault(uid, len(known)) for uid in rollouts.uids])


def logprobs_positive(columns: AuditColumns) -> Found | None:
    """Rows with a log-probability over 0, by more than the rounding of half precision.

    Needs rollouts with logprobs.
    """
    rollouts = columns.rollouts
    if rollouts is None or rollouts.logprobs is None:
        return None
    places = np.flatnonzero(rollouts.logprobs > _ROUNDING)
    if not len(places):
        return None
    return columns.found_at(
        _tokens(columns, rollouts, places), value=float(rollouts.logprobs[places[0]])
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
    rollouts = columns.rollouts
    if rollouts is None or rollouts.logprobs is None:
        return None
    is_zero = rollouts.logprobs == 0
    rows, place, evidence = _shifted_runs(rollouts, is_zero)
    if not len(rows):
        rows, place, evidence = _shifted_ends(columns, rollouts, is_zero)
    if not len(rows):
        return None
    token = int(_tokens(columns, rollouts, np.array([place]))[0])
    return Found(rows, (token, token + 1), values={"evidence": evidence})


_Shift = tuple[np.ndarray, int, str]
_NO_SHIFT: _Shift = np.empty(0, dtype=np.int64), 0, ""


def _shifted_runs(rollouts: RolloutColumns, is_zero: np.ndarray) -> _Shift:
    """By runs of tokens of weight 0 inside a response: the rows of those that show a shift."""
    offsets, is_out = rollouts.offsets, rollouts.weights == 0
    edges = np.zeros(len(is_out) + 1, dtype=np.bool_)
    edges[offsets] = True
    begins = np.flatnonzero(is_out & (edges[:-1] | ~np.append(False, is_out[:-1])))
    stops = np.flatnonzero(is_out & (edges[1:] | ~np.append(is_out[1:], False))) + 1
    inside = ~edges[begins] & ~edges[stops]
    begins, stops = begins[inside], stops[inside]
    if not len(begins):
        return _NO_SHIFT
    before = np.append(0, np.cumsum(is_zero))
    is_one_off = before[stops] - before[begins] == stops - begins - 1
    is_inner = ~is_out & ~edges[:-1] & ~edges[1:]  # a shift fills up the first or the last
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
        rows = np.unique(np.searchsorted(offsets, begins[is_shifted], side="right") - 1)
        evidence = (
            "the zeros of tokens that the policy did not sample stand one column off, so each "
            f"value is of the token {neighbour} it"
        )
        return rows, int(odd[is_shifted][0]), evidence
    return _NO_SHIFT


def _shifted_ends(columns: AuditColumns, rollouts: RolloutColumns, is_zero: np.ndarray) -> _Shift:
    """By the zero that fills up the first or the last column: all rows that have it."""
    rows = np.flatnonzero(rollouts.num_actions > 2)
    if len(rows) < _LEAST_ROWS:
        return _NO_SHIFT
    first, last = rollouts.offsets[rows], rollouts.offsets[rows + 1] - 1
    inner = is_zero & (rollouts.weights != 0)
    for ends, neighbour in ((first, "before"), (last, "after")):
        is_filled = is_zero[ends] & (rollouts.weights[ends] != 0)
        others = inner.sum() - inner[ends].sum()
        if is_filled.mean() < _NEARLY_ALL or others > _HARDLY_ANY * (len(inner) - len(ends)):
            continue
        tokens = columns.ids[_tokens(columns, rollouts, ends)]
        if np.unique(tokens, return_counts=True)[1].max() > len(ends) / 2:
            continue
        where = "first" if neighbour == "before" else "last"
        evidence = (
            f"the {where} token of a response has the log-probability 0.0 and hardly any other "
            f"has, so each value is of the token {neighbour} it"
        )
        return rows[is_filled], int(ends[is_filled][0]), evidence
    return _NO_SHIFT


def _tokens(columns: AuditColumns, rollouts: RolloutColumns, places: np.ndarray) -> np.ndarray:
    """int64, among all tokens, of places among the response tokens."""
    rows = np.searchsorted(rollouts.offsets, places, side="right") - 1
    return columns.ends[rows] - rollouts.num_actions[rows] + places - rollouts.offsets[rows]
