"""Vision-language models: what their processors return, and how many tokens an image takes."""

from __future__ import annotations

from torch_collate_kit.vision.layout import VisionLayout
from torch_collate_kit.vision.processors import is_vision_language, load_processor
from torch_collate_kit.vision.sizes import image_grid

__all__ = ["VisionLayout", "image_grid", "is_vision_language", "load_processor"]
