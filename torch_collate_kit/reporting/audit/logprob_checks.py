"""Log-probabilities of rollouts that do not belong to their tokens."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.reporting.audit.check import FEW, check
from torch_collate_kit.reporting.audit.columns import AuditColumns
from torch_collate_kit.reporting.audit.findings import Found

_NEARLY_ALL, _HARDLY_ANY = 0.95, 0.05  # rows with a 0 at their end; other tokens with one
_LEAST_ROWS = 4
_SURE, _LEAST_CHANCE = 1e-3, 0.01  # that zeros stand there by chance; of a zero, at least
_ROUNDING = 1e-3  # over 0, of a log-probability in half precision


@check("error", "logprobs")
def logprobs_shifted(columns: AuditColumns) -> Found | None:
    """Find rollouts whose logprobs belong to the token before, or to the next one."""
    is_zero = (columns.logprobs == 0) & ~np.repeat(columns.has_one_logprob, columns.lengths)
    return columns.found_by(
        _shifted_runs(columns, is_zero) or _shifted_ends(columns, is_zero),
        "the logprobs of ROWS are shifted by one column: WHAT; give logprobs[i] of response_ids[i]",
    )


def _shifted_runs(columns: AuditColumns, is_zero: np.ndarray) -> dict[str, np.ndarray]:
    """Return runs of tokens of weight 0 inside a response whose zeros are one column off."""
    is_out = ~(columns.trained | np.isnan(columns.logprobs))  # in a response, not sampled
    edges = np.flatnonzero(np.diff(is_out, prepend=False, append=False))
    begins, stops = edges[::2], edges[1::2]  # each in one row, as rows begin with a prompt
    rows = columns.rows_of(begins)
    inside = (begins > columns.responses[rows]) & (stops < columns.ends[rows])
    begins, stops = begins[inside], stops[inside]
    if not len(begins):
        return {}
    before = np.append(0, np.cumsum(is_zero))
    is_one_off = before[stops] - before[begins] == stops - begins - 1
    is_inner = columns.trained.copy()  # a shift fills up the first or the last
    is_inner[columns.responses] = is_inner[columns.ends - 1] = False
    num_zeros, num_inner = int((is_zero & is_inner).sum()), max(int(is_inner.sum()), 1)
    for odd, beyond, neighbour in ((begins, stops, "before"), (stops - 1, begins - 1, "after")):
        is_like = is_one_off & ~is_zero[odd]
        is_shifted = is_like & is_zero[beyond]
        num_shifted = int(is_shifted.sum())
        num_others = num_zeros - int((is_shifted & is_inner[beyond]).sum())
        chance = max(num_others / num_inner, _LEAST_CHANCE)
        if num_shifted >= _NEARLY_ALL * is_like.sum() and chance**num_shifted <= _SURE:
            evidence = (
                "the zeros of tokens that the policy did not sample stand one column off, so each "
                f"value is of the token {neighbour} it"
            )
            return {evidence: odd[is_shifted]}
    return {}


def _shifted_ends(columns: AuditColumns, is_zero: np.ndarray) -> dict[str, np.ndarray]:
    """Return the zeros in the first or the last column where nearly all rows have one there."""
    is_long = columns.ends - columns.responses > 2
    first, last = columns.responses[is_long], columns.ends[is_long] - 1
    if len(first) < _LEAST_ROWS:
        return {}
    num_tokens = int((columns.ends - columns.responses).sum())
    num_zeros = np.count_nonzero(is_zero & columns.trained)
    for ends, where, neighbour in ((first, "first", "before"), (last, "last", "after")):
        is_filled = is_zero[ends] & columns.trained[ends]
        num_others = num_zeros - np.count_nonzero(is_filled)
        if is_filled.mean() < _NEARLY_ALL or num_others > _HARDLY_ANY * (num_tokens - len(ends)):
            continue
        if np.unique(columns.ids[ends], return_counts=True)[1].max() > len(ends) / 2:
            continue
        evidence = (
            f"the {where} token of a response has the log-probability 0.0 and hardly any other "
            f"has, so each value is of the token {neighbour} it"
        )
        return {evidence: ends[is_filled]}
    return {}


@check("error", "logprobs")
def logprobs_constant(columns: AuditColumns) -> Found | None:
    """Find rows of which every trained token has the same log-probability, such as 0."""
    places = columns.first_trained[columns.has_one_logprob]
    return columns.found_at(
        places,
        f"the logprobs of ROWS are all {columns.logprobs[places[:1]].sum():.3g}, which no policy "
        "gives every token it samples; pass those of the tokens as they were sampled, or leave "
        "logprobs out",
    )


@check("warning", "logprobs", at_most=FEW)
def mask_disagrees_with_logprobs(columns: AuditColumns) -> Found | None:
    """Find untrained tokens that were sampled, and trained ones that were not, by zeros."""
    is_zero, trained = columns.logprobs == 0, columns.trained
    is_named = columns.has_one_logprob | (columns.num_trained == 0)
    is_named[columns.rows_of(np.flatnonzero(columns.logprobs > _ROUNDING))] = True
    is_kept = np.repeat(~is_named, columns.lengths)
    is_out = is_kept & ~(trained | np.isnan(columns.logprobs))
    zeros = is_kept & trained & is_zero
    missed = np.flatnonzero(is_out & ~is_zero)
    run = np.flatnonzero(zeros[2:] & zeros[1:-1] & zeros[:-2])
    others = run[columns.rows_of(run) == columns.rows_of(run + 2)]
    is_found = columns.in_rows(columns.rows_of(np.concatenate([missed, others])))
    if not is_found.any():
        return None
    is_other = is_kept & ~np.repeat(is_found, columns.lengths)  # of what the others do
    num_zeros, num_trained = int((zeros & is_other).sum()), int((trained & is_other).sum())
    if not (is_out & is_other).any() or num_zeros > _HARDLY_ANY * num_trained:
        return None
    if logprobs_shifted.run(columns) is not None:
        return None
    return columns.found_by(
        {
            "sampled tokens are not trained": missed,
            "tokens that were not sampled are trained": others,
        },
        "the loss_mask and the logprobs of ROWS disagree about which tokens were sampled: WHAT; "
        "train the tokens that the policy sampled, and no others",
    )


@check("error", "logprobs")
def logprobs_positive(columns: AuditColumns) -> Found | None:
    """Find log-probabilities over 0, by more than the rounding of half precision."""
    places = np.flatnonzero(columns.logprobs > _ROUNDING)
    return columns.found_at(
        places,
        f"ROWS have logprobs over 0, such as {columns.logprobs[places[:1]].sum():.3g}, which no "
        "log-probability is; the sign is turned, or they are probabilities",
    )
