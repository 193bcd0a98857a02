"""A batch as people see it: rows drawn as text and in HTML, and a row token by token."""

from __future__ import annotations

from torch_collate_kit.batch.showing.cells import Cells, Kind, cells_of
from torch_collate_kit.batch.showing.drawing import described
from torch_collate_kit.batch.showing.explaining import explained, row_of
from torch_collate_kit.batch.showing.explanation import Explanation
from torch_collate_kit.batch.showing.html import html_of

__all__ = [
    "Cells",
    "Explanation",
    "Kind",
    "cells_of",
    "described",
    "explained",
    "html_of",
    "row_of",
]
