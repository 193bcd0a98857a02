"""Losses of preference pairs: pure functions of sums over segments."""

from __future__ import annotations

from torch_collate_kit.preference.losses import PreferenceLoss, bradley_terry, dpo, kto

__all__ = ["PreferenceLoss", "bradley_terry", "dpo", "kto"]
