"""The commands of ``python -m torch_collate_kit``, one file each."""

from __future__ import annotations
