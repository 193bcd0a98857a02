"""Supervision that looks healthy and is not: one small check for each kind."""

from torch_collate_kit.reporting.audit.auditing import audit
from torch_collate_kit.reporting.audit.findings import AuditReport, Finding

__all__ = ["AuditReport", "Finding", "audit"]
