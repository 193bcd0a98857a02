"""Log-probabilities of rollouts that do not belong to their tokens."""

from __future__ import annotations

import math

import numpy as np

from torch_collate_kit.reporting.audit.check import FEW, MOST, check
from torch_collate_kit.reporting.audit.columns import AuditColumns
from torch_collate_kit.reporting.audit.findings import Found

_NEARLY_ALL, _HARDLY_ANY = 0.95, 0.05  # rows with a 0 at their end; other tokens with one
_LEAST_ROWS = 4
_SURE, _LEAST_CHANCE = 1e-3, 0.01  # that zeros stand there by chance; of a zero, at least
_UNLIKELY, _RARE = 0.02, 0.005
_ROUNDING = 1e-3  # over 0, of a log-probability in half precision
_LOWEST, _DRAWN, _SIGMAS = -5.0, 5.0, 5.0
_LEAST_TOKENS, _LEAST_PAIRS, _LARGEST_ID = 1000, 16, 1 << 22
_SAMPLED, _EXPLAINED = 200_000, 0.02
_NONE = np.empty(0, dtype=np.int64)


@check("error", "logprobs")
def logprobs_shifted(columns: AuditColumns) -> Found | None:
    """Find rollouts whose logprobs belong to the token before, or to the next one."""
    is_zero = (columns.logprobs == 0) & ~np.repeat(columns.has_one_logprob, columns.lengths)
    evidence = _shifted_runs(columns, is_zero) or _shifted_ends(columns, is_zero)
    evidence = evidence or {
        "a 0.0 fills up one end, where no other row has one": _filled_ends(columns, is_zero),
        "their values fit the tokens beside their own better": _unlike_their_tokens(columns),
    }
    return columns.found_by(
        evidence,
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


def _long_ends(columns: AuditColumns) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the last tokens of responses of more than two."""
    is_long = columns.ends - columns.responses > 2
    return columns.responses[is_long], columns.ends[is_long] - 1


def _shifted_ends(columns: AuditColumns, is_zero: np.ndarray) -> dict[str, np.ndarray]:
    """Return the zeros in the first or the last column where nearly all rows have one there."""
    first, last = _long_ends(columns)
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


def _filled_ends(columns: AuditColumns, is_zero: np.ndarray) -> np.ndarray:
    """Return the zeros that fill up the first or the last column of a few rows."""
    is_inner = columns.trained.copy()
    for places in _long_ends(columns):
        is_inner[places] = False
    rate = (1 + int((is_zero & is_inner).sum())) / max(int(is_inner.sum()), 1)
    found = [_NONE]
    for places in _long_ends(columns):
        places = places[columns.trained[places]]
        is_filled = is_zero[places]
        tokens, which = np.unique(columns.ids[places], return_inverse=True)
        zeros, counts = (
            np.bincount(which, weights=of, minlength=len(tokens)) for of in (is_filled, None)
        )
        is_filled &= (zeros <= MOST * counts)[which] | (counts == 1)[which]
        num_filled, expected = int(is_filled.sum()), rate * len(places)
        num_near = ((columns.logprobs[places] > -_ROUNDING) & ~is_zero[places]).sum()
        if not max(num_near, 1) <= num_filled <= MOST * len(places) or rate > _RARE:
            continue
        # By Poisson's law, how likely fewer are
        terms = (expected**i / math.factorial(i) for i in range(min(num_filled, 100)))
        if 1 - math.exp(-expected) * sum(terms) <= _UNLIKELY:
            found.append(places[is_filled])
    return np.unique(np.concatenate(found))


def _unlike_their_tokens(columns: AuditColumns) -> np.ndarray:
    """Return the first token of rows whose values fit better one column off."""
    places = columns.trained_places
    if columns.has_one_logprob.any():
        places = places[~columns.has_one_logprob[columns.rows_of(places)]]
    if len(places) < _LEAST_TOKENS or int(columns.ids.max()) >= _LARGEST_ID:
        return _NONE
    values, usual = _usual_values(columns, places[:_SAMPLED])
    if ((values - usual) ** 2).mean() > (1 - _EXPLAINED) * values.var():
        return _NONE  # ids say too little about their values
    values, usual = _usual_values(columns, places)
    rows, errors = columns.rows_of(places), (values - usual) ** 2
    is_odd = np.zeros(len(columns.lengths), dtype=np.bool_)
    for by in (-1, 1):
        is_pair = places + by == np.roll(places, -by)
        gain = np.where(is_pair, errors - (values - np.roll(usual, -by)) ** 2, 0.0)
        num, total = (np.bincount(rows, of, minlength=len(is_odd)) for of in (is_pair, gain))
        center, spread = gain[is_pair].mean(), gain[is_pair].std()
        surplus = (total - num * center) / (spread * np.sqrt(np.maximum(num, 1)) + 1e-12)
        if center < 0:
            is_odd |= (total > 0) & (surplus > _SIGMAS) & (num >= _LEAST_PAIRS)
    is_few = columns.share_of(np.flatnonzero(is_odd)) <= FEW
    return columns.first_trained[is_odd & is_few]


def _usual_values(columns: AuditColumns, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return values of tokens, cut at -5, and the mean of their id elsewhere, or of all if rare."""
    values = np.maximum(columns.logprobs[places].astype(np.float64), _LOWEST)
    tokens, mean = columns.ids[places], float(values.mean())
    sums, counts = np.bincount(tokens, weights=values), np.bincount(tokens)
    usual = (sums[tokens] - values + _DRAWN * mean) / (counts[tokens] - 1 + _DRAWN)
    return values, usual


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
