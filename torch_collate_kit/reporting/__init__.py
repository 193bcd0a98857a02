"""What a layout costs, and what a batch looks like. matplotlib and pandas are loaded on use."""

from __future__ import annotations

from torch_collate_kit.reporting.plots import (
    plot_balance,
    plot_efficiency,
    plot_lengths,
    plot_rows,
    plot_timeline,
)
from torch_collate_kit.reporting.report import PackingReport, packing_report

__all__ = [
    "PackingReport",
    "packing_report",
    "plot_balance",
    "plot_efficiency",
    "plot_lengths",
    "plot_rows",
    "plot_timeline",
]
