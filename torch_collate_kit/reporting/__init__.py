"""Reports on data: the cost of a layout, and the faults that a dataset hides.

matplotlib, pandas and transformers are loaded on use.
"""

from torch_collate_kit.reporting.audit import AuditReport, Finding, audit
from torch_collate_kit.reporting.report import PackingReport, packing_report

__all__ = ["AuditReport", "Finding", "PackingReport", "audit", "packing_report"]
