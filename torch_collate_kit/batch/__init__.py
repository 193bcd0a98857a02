"""Batch: what every collator returns, and the kinds of fields that one can declare."""

from __future__ import annotations

from torch_collate_kit.batch.batch import Batch
from torch_collate_kit.batch.fields import (
    IGNORE_INDEX,
    PerExample,
    PerResponseToken,
    PerToken,
)

__all__ = ["IGNORE_INDEX", "Batch", "PerExample", "PerResponseToken", "PerToken"]
