"""Columns have one entry per row, all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_collate_kit.errors import DataError

__all__ = ["check_even"]


def check_even(columns: Mapping[str, Any], first: str) -> None:
    """Compare every column with ``first``; text, and what has no length, is no column.

    Raises:
        DataError: a column has more rows or fewer.

    >>> check_even({"input_ids": [[5], [6]], "labels": [[5]]}, "input_ids")
    Traceback (most recent call last):
    torch_collate_kit.errors.DataError: column labels has 1 rows, input_ids has 2; give every column
    one entry per row
    """
    num_rows = _num_rows(columns[first])
    for key, column in columns.items():
        found = _num_rows(column)
        if None not in (found, num_rows) and found != num_rows:
            raise DataError(
                f"column {key} has {found} rows, {first} has {num_rows}; give every column one "
                "entry per row"
            )


def _num_rows(column: Any) -> int | None:
    if not hasattr(column, "__len__") or isinstance(column, str | bytes):
        return None
    return None if getattr(column, "ndim", 1) == 0 else len(column)
