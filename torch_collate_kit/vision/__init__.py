"""Vision-language models: what their processors return, and how many tokens an image takes."""

from __future__ import annotations

from torch_collate_kit.vision.expansion import image_grid
from torch_collate_kit.vision.layout import VisionLayout
from torch_collate_kit.vision.processors import is_vision_language, load_processor

__all__ = ["VisionLayout", "image_grid", "is_vision_language", "load_processor"]
