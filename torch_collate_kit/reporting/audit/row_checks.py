"""Rows that no collator accepts, and images that could not be read."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.reporting.audit.check import check
from torch_collate_kit.reporting.audit.columns import AuditColumns, Found


@check(
    "error",
    "in {rows} the images and the text do not belong together: {reason}",
    of_rows=False,
)
def placeholders_disagree_with_grids(columns: AuditColumns) -> Found | None:
    """Find rows that a reader refuses with their images, and accepts without them."""
    return _refused(columns, of_images=True)


@check(
    "error",
    "{rows} are refused by every collator, and were not looked at further: {reason}",
    of_rows=False,
)
def refused(columns: AuditColumns) -> Found | None:
    """Find rows that the readers refuse."""
    return _refused(columns, of_images=False)


@check(
    "note",
    "there are images, and only a processor says how many tokens they take; pass the processor "
    "in place of the tokenizer",
    of_rows=False,
)
def images_not_checked(columns: AuditColumns) -> Found | None:
    """Find images without a processor."""
    return Found(np.empty(0, dtype=np.int64)) if columns.has_unread_images else None


def _refused(columns: AuditColumns, *, of_images: bool) -> Found | None:
    rows = [row for row in columns.refused if row.of_images == of_images]
    if not rows:
        return None
    numbers, reason = np.array([row.number for row in rows], dtype=np.int64), rows[0].message
    num_rows = len(columns.refused) + columns.num_read
    return Found(numbers, reason, {"reason": reason}, num_rows=num_rows)
