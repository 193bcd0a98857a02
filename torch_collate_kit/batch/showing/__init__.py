"""A batch as people see it: rows drawn as text and in HTML, and a row token by token."""

from __future__ import annotations

from torch_collate_kit.batch.showing.cells import (
    Cells,
    Kind,
    Runs,
    cells_of,
    example_numbers,
    runs_of,
)
from torch_collate_kit.batch.showing.drawing import described
from torch_collate_kit.batch.showing.explaining import explained, row_of
from torch_collate_kit.batch.showing.explanation import Explanation
from torch_collate_kit.batch.showing.html import html_of
from torch_collate_kit.batch.showing.tables import html_row, text_table

__all__ = [
    "Cells",
    "Explanation",
    "Kind",
    "Runs",
    "cells_of",
    "described",
    "example_numbers",
    "explained",
    "html_of",
    "html_row",
    "row_of",
    "runs_of",
    "text_table",
]
