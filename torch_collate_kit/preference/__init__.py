"""Preference data: pairs and labelled answers as examples of two segments, and their losses."""

from torch_collate_kit.preference.losses import PreferenceLoss, bradley_terry, dpo, kto
from torch_collate_kit.preference.tokenize import tokenize_preferences

__all__ = ["PreferenceLoss", "bradley_terry", "dpo", "kto", "tokenize_preferences"]
