"""Ids: beyond the vocabulary, BOS at the start of rows, and labels that are other ids."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.reporting.audit.columns import AuditColumns, Found

__all__ = [
    "bos_in_some_rows",
    "double_bos",
    "id_out_of_vocabulary",
    "labels_not_input_ids",
    "labels_shifted",
]

_AGREE, _DISAGREE = 0.9, 0.5  # of the labels of a row
_LEAST_LABELS = 2


def id_out_of_vocabulary(columns: AuditColumns) -> Found | None:
    """Rows with an id, or a label, that is not below the size of the vocabulary.

    Needs a tokenizer with ``len()``. Negative ids are refused by the readers.
    """
    size = columns.vocabulary.size or 0
    is_beyond = columns.ids >= size
    if columns.labels is not None:
        is_beyond |= columns.labels >= size
    places = np.flatnonzero(is_beyond)
    if not len(places):
        return None
    first = int(places[0])
    beyond = int(columns.ids[first])
    if beyond < size and columns.labels is not None:
        beyond = int(columns.labels[first])
    return columns.found_at(places, id=beyond, size=f"{size:,}")


def double_bos(columns: AuditColumns) -> Found | None:
    """Rows whose first two tokens are BOS. Needs a tokenizer with a BOS."""
    bos = columns.vocabulary.bos_id
    starts = columns.starts[columns.lengths > 1]
    is_twice = (columns.ids[starts] == bos) & (columns.ids[starts + 1] == bos)
    return columns.found_at(starts[is_twice], 2, bos=bos)


def bos_in_some_rows(columns: AuditColumns) -> Found | None:
    """Rows without a BOS at the start, where at least half of the rows have one.

    Needs a tokenizer with a BOS that is not its EOS.
    """
    vocabulary = columns.vocabulary
    has_bos = columns.ids[columns.starts] == vocabulary.bos_id
    if vocabulary.bos_id == vocabulary.eos_id or has_bos.sum() * 2 < len(has_bos):
        return None
    return columns.found_at(columns.starts[~has_bos], bos=vocabulary.bos_id)


def labels_shifted(columns: AuditColumns) -> Found | None:
    """Rows whose labels are the ids of the next tokens, or of those before.

    Needs labels. Of the labels of a row, two at least, 90% must be the neighbour's ids, and less
    than half the ids at their own place; so a row of equal tokens is no evidence.
    """
    shifts = _shifted(columns)
    if shifts is None:
        return None
    to_next, to_last = shifts
    rows = np.flatnonzero(to_next | to_last)
    if not len(rows):
        return None
    directions = ["labels[i] is input_ids[i + 1]"] * bool(to_next.any())
    directions += ["labels[i] is input_ids[i - 1]"] * bool(to_last.any())
    place = int(columns.first_trained[rows[0]])
    return Found(rows, (place, place + 1), values={"direction": " or ".join(directions)})


def labels_not_input_ids(columns: AuditColumns) -> Found | None:
    """Rows where less than half of the labels are the ids at the same place.

    Needs labels. Silent about rows that :func:`labels_shifted` names.
    """
    shifts = _shifted(columns)
    if shifts is None:
        return None
    same = _share_of_labels(columns, 0)
    is_other = (same < _DISAGREE) & (columns.num_trained > 0) & ~shifts[0] & ~shifts[1]
    rows = np.flatnonzero(is_other)
    if not len(rows):
        return None
    place = int(columns.first_trained[rows[0]])
    return Found(rows, (place, place + 1))


def _shifted(columns: AuditColumns) -> tuple[np.ndarray, np.ndarray] | None:
    """bool [N] each: labels of the next tokens, labels of those before."""
    if columns.labels is None:
        return None
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

    A label whose neighbour is outside the row does not count. 1 where a row has no label.
    """
    assert columns.labels is not None
    places = columns.trained_places
    if not len(places):
        return np.ones(len(columns.lengths))
    others = np.clip(places + shift, 0, len(columns.ids) - 1)
    is_same = columns.labels[places] == columns.ids[others]
    counts = columns.num_trained.copy()
    if shift:
        rows = columns.rows_of(places)
        is_outside = (places + shift < columns.starts[rows]) | (
            places + shift >= columns.ends[rows]
        )
        is_same &= ~is_outside
        counts -= np.bincount(rows[is_outside], minlength=len(counts))
    before = np.append(0, np.cumsum(is_same))
    stops = np.cumsum(columns.num_trained)
    same = before[stops] - before[stops - columns.num_trained]
    shares: np.ndarray = np.where(counts > 0, same / np.maximum(counts, 1), 0.0 if shift else 1.0)
    return shares
