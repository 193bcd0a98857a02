"""Targets that stand one token off, and labels that are other ids."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.reporting.audit.check import check
from torch_collate_kit.reporting.audit.columns import AuditColumns, Found

__all__ = ["CHECKS"]

_AGREE, _DISAGREE = 0.9, 0.5  # of the labels of a row
_LEAST_LABELS = 2


@check(
    "error",
    "the labels of {rows} are input_ids shifted by one ({direction}), so every token is "
    "trained towards a wrong one: models and collators shift labels themselves; give labels "
    "that equal input_ids at the same place",
)
def labels_shifted(columns: AuditColumns) -> Found | None:
    """Rows whose labels are the ids of the next tokens, or of those before.

    Needs labels. Of the labels of a row, two at least, 90% must be the neighbour's ids, and less
    than half the ids at their own place; so a row of equal tokens is no evidence.
    """
    to_next, to_last = _shifted(columns)
    directions = ["labels[i] is input_ids[i + 1]"] * bool(to_next.any())
    directions += ["labels[i] is input_ids[i - 1]"] * bool(to_last.any())
    direction = " or ".join(directions)
    return columns.found_in(to_next | to_last, columns.first_trained, direction=direction)


@check(
    "warning",
    "the labels of {rows} are other ids than input_ids at the same place; a model that "
    "predicts the next token is trained towards its own text: set them to input_ids, or -100",
)
def labels_not_input_ids(columns: AuditColumns) -> Found | None:
    """Rows where less than half of the labels are the ids at the same place.

    Needs labels. Silent about rows that :func:`labels_shifted` names.
    """
    to_next, to_last = _shifted(columns)
    is_other = (_share_of_labels(columns, 0) < _DISAGREE) & ~to_next & ~to_last
    return columns.found_in(is_other, columns.first_trained)


@check(
    "error",
    "the trained tokens of {rows} stand one token too {direction}: the answer is not trained "
    "from its first token to its EOS; move the mask back by one",
    needs=("header", "eos"),
)
def mask_shifted(columns: AuditColumns) -> Found | None:
    """Rows whose trained runs begin and end one token late, or one token early.

    Late is a run that leaves out the first token after the generation prompt and goes on one token
    after the EOS; early is one that begins with the last token of the generation prompt and stops
    right before the EOS. One of the two alone is no evidence: a prompt may open a thinking block.
    Silent about rows that :func:`labels_shifted` names.
    """
    width, num_tokens = len(columns.vocabulary.prompt_ids), len(columns.ids)
    prompts = columns.places_of(columns.vocabulary.prompt_ids) + width
    prompts = prompts[prompts < columns.ends[columns.rows_of(prompts - 1)]]
    edges = np.flatnonzero(np.diff(columns.trained, prepend=False, append=False))
    begins, stops = edges[::2], edges[1::2]
    is_late = np.isin(begins, prompts + 1) & columns.is_end[np.maximum(stops - 2, 0)]
    is_late &= ~columns.is_end[stops - 1]
    ends_early = columns.is_end[np.minimum(stops, num_tokens - 1)] & (stops < num_tokens)
    is_early = np.isin(begins, prompts - 1) & ends_early
    is_found = np.zeros(len(columns.lengths), dtype=np.bool_)
    is_found[columns.rows_of(begins[is_late | is_early])] = True
    to_next, to_last = _shifted(columns)
    directions = ["late"] * bool(is_late.any()) + ["early"] * bool(is_early.any())
    return columns.found_in(
        is_found & ~to_next & ~to_last,
        columns.first_trained,
        direction=" or ".join(directions),
    )


def _shifted(columns: AuditColumns) -> tuple[np.ndarray, np.ndarray]:
    """bool [N] each: labels of the next tokens, labels of those before."""
    is_other = _share_of_labels(columns, 0) < _DISAGREE
    if not is_other.any():  # the usual case, in one pass
        return is_other, is_other
    is_other &= columns.num_trained >= _LEAST_LABELS
    return (
        is_other & (_share_of_labels(columns, 1) >= _AGREE),
        is_other & (_share_of_labels(columns, -1) >= _AGREE),
    )


def _share_of_labels(columns: AuditColumns, shift: int) -> np.ndarray:
    """float64 [N], how many of the labels of a row are the ids ``shift`` tokens further on.

    A label whose neighbour is outside the row does not count. 1 where there is no label at all.
    """
    if columns.labels is None or not len(columns.ids):
        return np.ones(len(columns.lengths))
    is_counted = columns.trained.copy()
    if shift == 1:  # the first token of a row is not trained, so it has a neighbour before
        is_counted[columns.ends - 1] = False
    is_same = is_counted & (columns.labels == np.roll(columns.ids, -shift))
    counts, same = (
        np.add.reduceat(of, columns.starts, dtype=np.int64) for of in (is_counted, is_same)
    )
    shares: np.ndarray = np.where(counts > 0, same / np.maximum(counts, 1), 0.0 if shift else 1.0)
    return shares


CHECKS = (
    labels_shifted,
    labels_not_input_ids,
    mask_shifted,
)
