"""Log-probabilities of rollouts that do not belong to their tokens."""

from __future__ import annotations

import math

import numpy as np

from torch_collate_kit.reporting.audit.check import check
from torch_collate_kit.reporting.audit.columns import AuditColumns, Found

__all__ = ["CHECKS"]

_NEARLY_ALL, _HARDLY_ANY = 0.95, 0.05  # rows with a 0 at their end; other tokens with one
_FEW, _MOST_ROWS = 1 / 3, 0.5  # of the rows: an exception; what the others do
_LEAST_ROWS = 4
_SURE, _LEAST_CHANCE = 1e-3, 0.01  # that zeros stand there by chance; of a zero, at least
_UNLIKELY, _RARE = 0.02, 0.005
_ROUNDING = 1e-3  # over 0, of a log-probability in half precision
_LOWEST, _DRAWN, _SIGMAS = -5.0, 5.0, 5.0
_LEAST_TOKENS, _LEAST_PAIRS, _LARGEST_ID = 1000, 16, 1 << 22
_SAMPLED, _EXPLAINED = 200_000, 0.02


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

    Needs rollouts with logprobs, and one of four kinds of evidence.

    The first: tokens that the policy did not sample (a tool's, weight 0) have the log-probability
    0.0, as docs/contract.md asks for. Of a run of them, only the first has another value, and a 0.0
    stands right after the run; or only the last, and right before. This must hold for at least 95%
    of the runs that begin (or end) so, and for more than chance explains (to 0.1%), given how many
    other tokens have a 0.0. Then the rows that show it are shifted.

    The second: the 0.0 with which a shift fills up stands at the same end of at least 95% of the
    rows, four at least, and next to nowhere else (5%). The tokens there must differ, since of one
    that begins or ends every answer, such as EOS, the policy may well be certain.

    The third, of a few rows: such a 0.0 where no other row has a value near it, and no more than
    chance explains (to 1%), given how many other tokens have a 0.0.

    The fourth, of a few rows: the values of a row fit the tokens one column off better than its
    own, by what the same tokens have in the other rows, and more than chance explains.

    Silent where a tool's tokens have real values, or where exact zeros are frequent.
    """
    if columns.logprobs is None:
        return None
    is_zero = columns.logprobs == 0
    is_out = ~(columns.trained | np.isnan(columns.logprobs))  # in a response, not sampled
    is_constant = columns.has_one_logprob
    is_zero &= ~np.repeat(is_constant, columns.lengths)
    return (
        _shifted_runs(columns, is_zero, is_out)
        or _shifted_ends(columns, is_zero)
        or _joined(
            columns, _filled_ends(columns, is_zero), _unlike_their_tokens(columns, is_constant)
        )
    )


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


def _filled_ends(columns: AuditColumns, is_zero: np.ndarray) -> np.ndarray:
    """int64, a zero that fills up the first or the last column of a few rows."""
    assert columns.logprobs is not None
    is_long = columns.ends - columns.responses > 2
    firsts, lasts = columns.responses[is_long], columns.ends[is_long] - 1
    is_inner = columns.trained.copy()
    is_inner[firsts] = is_inner[lasts] = False
    num_inner = int(is_inner.sum())
    rate = (1 + int((is_zero & is_inner).sum())) / max(num_inner, 1)
    found = []
    for places in (firsts, lasts):
        places = places[columns.trained[places]]
        is_filled = is_zero[places]
        tokens, which = np.unique(columns.ids[places], return_inverse=True)
        zeros, counts = (
            np.bincount(which, weights=of, minlength=len(tokens)) for of in (is_filled, None)
        )
        is_filled &= (zeros <= _MOST_ROWS * counts)[which] | (counts == 1)[which]
        num_filled, expected = int(is_filled.sum()), rate * len(places)
        is_near = (columns.logprobs[places] > -_ROUNDING) & ~is_zero[places]
        if not num_filled or num_filled > _MOST_ROWS * len(places) or rate > _RARE:
            continue
        if _tail(num_filled, expected) > _UNLIKELY or is_near.sum() > num_filled:
            continue
        found.append(places[is_filled])
    return np.unique(np.concatenate([*found, np.empty(0, dtype=np.int64)]))


def _tail(count: int, expected: float) -> float:
    """How likely at least ``count`` are where ``expected`` are, by Poisson's law.

    >>> round(_tail(1, 0.01), 4), _tail(30, 0.01) < 1e-9
    (0.01, True)
    """
    below = sum(expected**i / math.factorial(i) for i in range(min(count, 100)))
    return max(1 - math.exp(-expected) * below, 0.0)


def _unlike_their_tokens(columns: AuditColumns, is_constant: np.ndarray) -> np.ndarray:
    """int64, a token of each row whose values fit better one column off.

    What a token has elsewhere is the mean over all rows, less its own value, drawn to the mean of
    all tokens; values are cut at -5. Where that explains less than 2% of the variance of a sample,
    nothing is known of tokens.
    """
    places = columns.trained_places
    if is_constant.any():
        places = places[~is_constant[columns.rows_of(places)]]
    nothing = np.empty(0, dtype=np.int64)
    if len(places) < _LEAST_TOKENS or int(columns.ids.max()) >= _LARGEST_ID:
        return nothing
    values, usual = _usual_values(columns, places[:_SAMPLED])
    if ((values - usual) ** 2).mean() > (1 - _EXPLAINED) * values.var():
        return nothing
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
    return columns.first_trained[is_odd] if columns.share_of(is_odd) <= _FEW else nothing


def _usual_values(columns: AuditColumns, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 each: the values of these tokens, and what the same ids have elsewhere."""
    assert columns.logprobs is not None
    values = np.maximum(columns.logprobs[places].astype(np.float64), _LOWEST)
    tokens, mean = columns.ids[places], float(values.mean())
    sums, counts = np.bincount(tokens, weights=values), np.bincount(tokens)
    usual = (sums[tokens] - values + _DRAWN * mean) / (counts[tokens] - 1 + _DRAWN)
    return values, usual


def _joined(columns: AuditColumns, filled: np.ndarray, unlike: np.ndarray) -> Found | None:
    places = np.unique(np.concatenate([filled, unlike]))
    reasons = ["a 0.0 fills up one end, where no other row has one"] * bool(len(filled))
    reasons += ["their values fit the tokens beside their own better"] * bool(len(unlike))
    return columns.found_at(places, evidence=" or ".join(reasons))


@check(
    "error",
    "the logprobs of {rows} are all {value:.3g}, which no policy gives every token it samples; "
    "pass those of the tokens as they were sampled, or leave logprobs out",
)
def logprobs_constant(columns: AuditColumns) -> Found | None:
    """Rows of which every trained token has the same log-probability, such as 0.

    Needs rollouts with logprobs. As many tokens as chance does not explain (to 1e-6), given how
    many others have a 0.0: three where these are rare.
    """
    if columns.logprobs is None:
        return None
    is_found = columns.has_one_logprob
    first = columns.first_trained[is_found][:1]
    value = float(columns.logprobs[first[0]]) if len(first) else 0.0
    return columns.found_in(is_found, columns.first_trained, value=value)


@check(
    "warning",
    "the loss_mask and the logprobs of {rows} disagree about which tokens were sampled: {what}; "
    "train the tokens that the policy sampled, and no others",
)
def mask_disagrees_with_logprobs(columns: AuditColumns) -> Found | None:
    """Rollouts with a mask that is at odds with log-probabilities of 0.0, in a third at most.

    Needs rollouts with logprobs. In the other rows all untrained response tokens have 0.0, and at
    most 5% of the trained ones: then an untrained token with another value was sampled, and three
    trained ones with 0.0 in a row were not. Silent about rows of which nothing is trained, and
    those that another check of log-probs names.
    """
    if columns.logprobs is None:
        return None
    is_zero, trained = columns.logprobs == 0, columns.trained
    is_named = columns.has_one_logprob | (columns.num_trained == 0)
    is_named[columns.rows_of(np.flatnonzero(columns.logprobs > _ROUNDING))] = True
    is_kept = np.repeat(~is_named, columns.lengths)
    is_out = is_kept & ~(trained | np.isnan(columns.logprobs))
    zeros = is_kept & trained & is_zero
    missed = np.flatnonzero(is_out & ~is_zero)
    run = np.flatnonzero(zeros[2:] & zeros[1:-1] & zeros[:-2])
    others = run[columns.rows_of(run) == columns.rows_of(run + 2)]
    places = np.unique(np.concatenate([missed, others]))
    is_found = columns.in_rows(columns.rows_of(places))
    if not len(places) or columns.share_of(is_found) > _FEW:
        return None
    is_other = is_kept & ~np.repeat(is_found, columns.lengths)  # of what the others do
    num_zeros, num_trained = int((zeros & is_other).sum()), int((trained & is_other).sum())
    if not (is_out & is_other).any() or num_zeros > _HARDLY_ANY * num_trained:
        return None
    if logprobs_shifted.run(columns) is not None:
        return None
    what = ["sampled tokens are not trained"] * bool(len(missed))
    what += ["tokens that were not sampled are trained"] * bool(len(others))
    return columns.found_at(places, what=" or ".join(what))


CHECKS = (
    logprobs_shifted,
    logprobs_constant,
    mask_disagrees_with_logprobs,
    logprobs_positive,
)
