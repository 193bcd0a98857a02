"""Labels that are not the ids at their place."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.reporting.audit.check import check
from torch_collate_kit.reporting.audit.columns import AuditColumns, Found

__all__ = ["CHECKS"]

_UNSIGNED = [(1 << bits) - 100 for bits in (8, 16, 32)]


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
    to_next, to_last = columns.shifted_labels
    directions = ["labels[i] is input_ids[i + 1]"] * bool(to_next.any())
    directions += ["labels[i] is input_ids[i - 1]"] * bool(to_last.any())
    direction = " or ".join(directions)
    return columns.found_in(to_next | to_last, columns.first_trained, direction=direction)


@check(
    "warning",
    "{labels} labels of {rows} are other ids than input_ids at the same place; a model that "
    "predicts the next token is trained towards its own text: set them to input_ids, or -100{why}",
)
def labels_not_input_ids(columns: AuditColumns) -> Found | None:
    """Rows with a label that is not the id at the same place.

    Needs labels. Silent about rows that :func:`labels_shifted` names.
    """
    is_shifted = np.logical_or(*columns.shifted_labels)
    places = columns.other_labels[~is_shifted[columns.rows_of(columns.other_labels)]]
    if columns.labels is None or not len(places):
        return None
    wrapped = np.isin(columns.labels[places], _UNSIGNED).any()
    why = "; -100 was stored unsigned, which a signed column holds as it is" if wrapped else ""
    return columns.found_at(places, labels=f"{len(places):,}", why=why)


CHECKS = (
    labels_shifted,
    labels_not_input_ids,
)
