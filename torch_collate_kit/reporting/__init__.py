"""What a layout costs, what a batch looks like, and what a dataset hides.

matplotlib, pandas and transformers are loaded on use.
"""

from __future__ import annotations

from torch_collate_kit.reporting.audit import AuditReport, Finding, audit
from torch_collate_kit.reporting.plots import (
    plot_balance,
    plot_efficiency,
    plot_lengths,
    plot_rows,
)
from torch_collate_kit.reporting.report import PackingReport, packing_report

__all__ = [
    "AuditReport",
    "Finding",
    "PackingReport",
    "audit",
    "packing_report",
    "plot_balance",
    "plot_efficiency",
    "plot_lengths",
    "plot_rows",
]
