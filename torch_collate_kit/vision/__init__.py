"""Vision-language models: what their processors return, and how many tokens an image takes."""

from __future__ import annotations

from torch_collate_kit.vision.layout import VisionLayout

__all__ = ["VisionLayout"]
