"""What a layout costs, and what a dataset hides."""

from __future__ import annotations

from torch_collate_kit.reporting.audit import AuditReport, Finding, audit

__all__ = ["AuditReport", "Finding", "audit"]
