"""Preference data: pairs and labelled answers as examples of two segments."""

from torch_collate_kit.preference.tokenize import tokenize_preferences

__all__ = ["tokenize_preferences"]
