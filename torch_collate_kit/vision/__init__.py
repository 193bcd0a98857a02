"""Vision-language models: fields of their processors, and the number of tokens per image."""

from torch_collate_kit.vision.layout import VisionLayout
from torch_collate_kit.vision.processors import is_vision_language, load_processor
from torch_collate_kit.vision.sizes import image_grid

__all__ = ["VisionLayout", "image_grid", "is_vision_language", "load_processor"]
