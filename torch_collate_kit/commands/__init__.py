"""The commands of ``python -m torch_collate_kit``, by what they show."""

from __future__ import annotations
