"""Packing: integers in, integers out. Lengths become a plan of rows; nothing here imports torch."""

from __future__ import annotations

from torch_collate_kit.packing.layout import ParallelLayout
from torch_collate_kit.packing.plan import PackingPlan
from torch_collate_kit.packing.planner import pack

__all__ = ["PackingPlan", "ParallelLayout", "pack"]
