"""Ids beyond the vocabulary, and BOS at the start of rows."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.reporting.audit.columns import AuditColumns, Found

__all__ = [
    "bos_in_some_rows",
    "double_bos",
    "id_out_of_vocabulary",
]


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
