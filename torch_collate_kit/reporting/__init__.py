"""What a layout costs, and what a batch looks like. matplotlib and pandas are loaded on use."""

from __future__ import annotations

from torch_collate_kit.reporting.report import PackingReport, packing_report

__all__ = ["PackingReport", "packing_report"]
