"""Collators for ``DataLoader(collate_fn=...)``, one class per layout."""

from __future__ import annotations

from torch_collate_kit.collators.packed import PackedCollator
from torch_collate_kit.collators.padded import PaddedCollator
from torch_collate_kit.collators.rollout import RolloutCollator
from torch_collate_kit.collators.vision import VisionLanguageCollator

__all__ = ["PackedCollator", "PaddedCollator", "RolloutCollator", "VisionLanguageCollator"]
