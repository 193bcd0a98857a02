"""Preference pairs: two sides that do not teach what their names say."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.reporting.audit.check import MOST, check
from torch_collate_kit.reporting.audit.columns import AuditColumns
from torch_collate_kit.reporting.audit.findings import Found

_MANY = 20  # pairs whose answers differ in length, before their lengths are evidence
_NEARLY_ALL = 0.9  # of them
_LEAST_SHARED = 3  # tokens that a prompt has at least
_MERGED = 2  # tokens by which prompts differ where their end is one token with the answer's start


@check("warning")
def pair_sides_equal(columns: AuditColumns) -> Found | None:
    """Find pairs whose two sides are the same tokens."""
    chosen = _pairs(columns)
    lengths = columns.lengths[chosen]
    is_same = (lengths == columns.lengths[chosen + 1]) & _begin_equally(columns, chosen, lengths)
    return columns.found_in(
        columns.in_rows(chosen[is_same]),
        "ROWS have two equal sides, so their loss has no gradient; drop them",
    )


@check("warning")
def pair_prompts_differ(columns: AuditColumns) -> Found | None:
    """Find pairs whose tokens before the first trained one differ."""
    pairs, num_trained = _pairs(columns), columns.num_trained
    chosen = pairs[(num_trained[pairs] > 0) & (num_trained[pairs + 1] > 0)]
    if not columns.has_target or not len(chosen):
        return None
    num_prompt = columns.first_trained - columns.starts
    first, second = num_prompt[chosen], num_prompt[chosen + 1]
    shared = np.maximum(np.minimum(first, second) - 1, 0)  # the last token may be merged
    is_far = np.abs(first - second) > _MERGED
    is_other = is_far | ~_begin_equally(columns, chosen, shared)
    return columns.found_in(
        columns.in_rows(chosen[is_other]),
        "ROWS have different tokens before the first trained one of each side, so their answers "
        "are compared after two prompts; give both sides the same prompt",
    )


@check("warning")
def pair_prompt_trained(columns: AuditColumns) -> Found | None:
    """Find pairs of which every token is trained though the sides begin with the same ones."""
    if not columns.has_target:
        return None
    pairs, is_full = _pairs(columns), columns.is_fully_trained
    chosen = pairs[is_full[pairs] & is_full[pairs + 1]]
    shortest = np.minimum(columns.lengths[chosen], columns.lengths[chosen + 1])
    chosen = chosen[shortest > _LEAST_SHARED]
    is_same = _begin_equally(columns, chosen, np.full(len(chosen), _LEAST_SHARED))
    return columns.found_in(
        columns.in_rows(chosen[is_same]),
        "ROWS train every token of both sides, which begin with the same prompt: it cancels out "
        "in a difference of sums, and distorts means (SimPO, ORPO) and what is logged; mark the "
        "answers alone, as tokenize_preferences does",
    )


@check("warning")
def pair_lengths_tell(columns: AuditColumns) -> Found | None:
    """Find that the chosen answer is nearly always the longer one, or the shorter one."""
    chosen = _pairs(columns)
    sizes = columns.num_trained if columns.has_target else columns.lengths
    longer = np.sign(sizes[chosen] - sizes[chosen + 1])
    num_longer, num_shorter = (longer > 0).sum(), (longer < 0).sum()
    more = max(num_longer, num_shorter)
    if more < _MANY or more < _NEARLY_ALL * (num_longer + num_shorter):
        return None
    word, sign = ("longer", 1) if num_longer > num_shorter else ("shorter", -1)
    return columns.found_in(
        columns.in_rows(chosen[longer == sign]),
        f"the chosen answer is the {word} one in ROWS, so its length alone tells it: a model may "
        "learn that in place of the preference; check that the sides are not made by a rule, add "
        "pairs of equal length, or use a loss that divides by the length",
    )


@check("warning")
def pair_margin_negative(columns: AuditColumns) -> Found | None:
    """Find pairs whose margin is below 0, or whose chosen answer has the lower score."""
    pairs = _pairs(columns)
    chosen = pairs[columns.margins[pairs] < 0]
    is_most = len(chosen) > MOST * len(pairs)
    return columns.found_in(
        columns.in_rows(chosen),
        "ROWS have a margin below 0, or a score_chosen below score_rejected: by its own numbers "
        "the rejected answer is the better one; swap the sides, or drop these pairs",
        severity="error" if is_most else None,
    )


def _pairs(columns: AuditColumns) -> np.ndarray:
    """Return the first row of each preference pair, int64; the other side is the next row."""
    firsts, counts = columns.examples
    firsts = firsts[counts == 2]
    found: np.ndarray = firsts[~columns.is_rated[firsts]]
    return found


def _begin_equally(columns: AuditColumns, chosen: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return whether both sides of these pairs have the same first ``counts`` tokens: bool."""
    counts = np.minimum(counts, np.minimum(columns.lengths[chosen], columns.lengths[chosen + 1]))
    starts = columns.starts[np.concatenate([chosen, chosen + 1])]
    groups = columns.equal_spans(starts, np.tile(counts, 2))
    found: np.ndarray = groups[: len(chosen)] == groups[len(chosen) :]
    return found
