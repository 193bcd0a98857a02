"""Rows against each other: copies, pairs, rollouts of one prompt; and their log-probs."""

from __future__ import annotations

import numpy as np

from torch_collate_kit._checks import plural
from torch_collate_kit.reporting.audit.checks import EVERY, FEW, MOST, check
from torch_collate_kit.reporting.audit.columns import AuditColumns
from torch_collate_kit.reporting.audit.findings import Found

_MANY = 20  # rows of which half share their prompt: several answers are meant
_HARD = 0.8  # of the groups: more without variance is a warning; of hard prompts half is usual
_LEAST_PAIRS, _MOST_PAIRS = 20, 0.9
_SHARED = 3  # tokens with which both sides begin
_NEARLY_ALL, _HARDLY_ANY = 0.95, 0.05  # rows with a 0 at their end; other tokens with one
_LEAST_ROWS = 4
_SURE, _LEAST_CHANCE = 1e-3, 0.01  # that zeros stand there by chance; of a zero, at least
_ROUNDING = 1e-3  # over 0, of a log-probability in half precision


@check("warning", of_rollouts="note", targets=EVERY)
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
    is_asked &= np.append(0, columns.is_continued[:-1]) == 0  # else it goes on here
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
        f"ROWS give {several.sum():,} different answers to {plural(len(several), 'prompt')}; "
        "keep one answer for each, unless several are meant",
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
    num_flat, num_groups = int(is_flat.sum()), int((counts > 1).sum())
    highest, lowest = scores.max(), scores.min()
    which = "as all of the dataset"
    if highest > lowest:
        num_high, num_low = (np.count_nonzero(is_flat & (most == of)) for of in (highest, lowest))
        which = f"{num_high:,} have the highest of the dataset, {num_low:,} have the lowest"
    return columns.found_in(
        columns.in_rows(chosen[is_flat[groups]]),
        f"in {num_flat:,} of {plural(num_groups, 'group')} ({num_flat / num_groups:.0%}), which "
        "are ROWS, all rollouts of a prompt have the same reward, so their advantages are 0 "
        f"({which}); choose prompts that are solved sometimes, or filter such groups",
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
    is_odd = counts[which.reshape(-1)] < most[uids]  # NumPy 2.0 returns [1, N]
    if len(most) == 1 and pairs.shape[1] > 1:
        is_odd[:] = True
    elif is_odd.mean() > FEW:
        return None
    return columns.found_in(
        is_odd,
        "ROWS have the uid of rollouts with another prompt, with which their advantages are "
        "compared; give each prompt a uid of its own",
    )


@check("error")
def two_prompts(columns: AuditColumns) -> Found | None:
    """Find pairs whose sides differ before the first trained token of both."""
    pairs = _pairs(columns)
    pairs = pairs[(columns.num_trained[pairs] > 0).all(axis=1)]
    starts = columns.starts[pairs]
    shared = (columns.first_trained[pairs] - starts).min(axis=1)
    differ = ~_begin_alike(columns, pairs, np.stack([shared, shared], axis=1))
    return columns.found_at(
        starts[differ, 1],
        "ROWS have two prompts: the sides differ before their first trained token, so they answer "
        "different questions; tokenize them with preference.tokenize_preferences",
        shared[differ],
    )


@check("warning")
def equal_sides(columns: AuditColumns) -> Found | None:
    """Find pairs whose sides have the same tokens."""
    pairs = _pairs(columns)
    return _found(
        columns,
        pairs[_begin_alike(columns, pairs, columns.lengths[pairs])],
        "ROWS have the same chosen and rejected side, which teaches nothing; drop them",
    )


@check("warning")
def shared_prompt_trained(columns: AuditColumns) -> Found | None:
    """Find pairs that train every token though both sides begin with the same ones."""
    pairs = _pairs(columns) if columns.has_target else np.empty((0, 2), dtype=np.int64)
    is_full = columns.is_fully_trained & (columns.lengths > _SHARED)
    pairs = pairs[is_full[pairs].all(axis=1)]
    return _found(
        columns,
        pairs[_begin_alike(columns, pairs, np.full_like(pairs, _SHARED))],
        "ROWS train every token of both sides, which begin with the same prompt: it cancels out in "
        "a difference of sums, and is counted in means (SimPO, ORPO) and in what is logged; mark "
        "the answers alone, as preference.tokenize_preferences does",
    )


@check("warning")
def sides_told_by_length(columns: AuditColumns) -> Found | None:
    """Find datasets in which nearly all pairs chose the longer, or the shorter, answer."""
    pairs = _pairs(columns)
    chosen, rejected = columns.num_trained[pairs].T
    longer, shorter = chosen > rejected, chosen < rejected
    is_usual, word = (longer, "longer") if longer.sum() > shorter.sum() else (shorter, "shorter")
    if len(pairs) < _LEAST_PAIRS or is_usual.mean() < _MOST_PAIRS:
        return None
    return _found(
        columns,
        pairs[is_usual],
        f"ROWS choose the {word} answer, so length alone separates the sides and may be what is "
        "learnt; check that the sides are not swapped, and add pairs of the other kind",
    )


@check("warning")
def wrong_margin(columns: AuditColumns) -> Found | None:
    """Find pairs whose margin is negative, or whose rejected side has the higher score."""
    pairs = _pairs(columns)
    return _found(
        columns,
        pairs[columns.margins[pairs[:, 0]] < 0],
        "ROWS choose the side with the lower score, or have a negative margin; swap the sides, or "
        "drop the pairs",
    )


def _pairs(columns: AuditColumns) -> np.ndarray:
    """Return the rows of the chosen and the rejected side of each pair: int64 [P, 2]."""
    heads = columns.heads
    are_two = (np.diff(heads, append=len(columns.lengths)) == 2).all()
    is_other = columns.are_labelled or columns.are_rollouts
    are_pairs = len(columns.segments) and not is_other and are_two
    heads = heads if are_pairs else heads[:0]
    return np.stack([heads, heads + 1], axis=1)


def _begin_alike(columns: AuditColumns, pairs: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Return whether the first ``widths`` int64 [P, 2] tokens of both sides are the same."""
    groups = columns.equal_spans(columns.starts[pairs].ravel(), widths.ravel()).reshape(-1, 2)
    return np.equal(*groups.T)


def _found(columns: AuditColumns, pairs: np.ndarray, message: str) -> Found | None:
    """Return these pairs; the chosen answer of the first one is shown."""
    places = np.maximum(columns.first_trained[pairs[:, 0]], columns.starts[pairs[:, 0]])
    return columns.found_at(places, message, columns.ends[pairs[:, 0]] - places)


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
                "the zeros of tokens that the policy did not sample are one column off, so each "
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
    """Find rows whose trained tokens all have the same log-probability, such as 0."""
    places = columns.first_trained[columns.has_one_logprob]
    return columns.found_at(
        places,
        f"the logprobs of ROWS are all {columns.logprobs[places[:1]].sum():.3g}, which no "
        "policy assigns to every token it samples; pass those of the tokens as they were sampled, "
        "or leave logprobs out",
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
    """Find log-probabilities above 0 by more than the rounding error of half precision."""
    places = np.flatnonzero(columns.logprobs > _ROUNDING)
    return columns.found_at(
        places,
        f"ROWS have logprobs over 0, such as {columns.logprobs[places[:1]].sum():.3g}, which no "
        "log-probability is; the sign is turned, or they are probabilities",
    )
