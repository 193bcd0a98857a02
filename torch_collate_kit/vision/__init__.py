"""Vision-language models: fields of their processors, and the number of tokens per image."""

from torch_collate_kit.vision.expansion import image_grid
from torch_collate_kit.vision.families import is_vision_language, load_processor
from torch_collate_kit.vision.layout import VisionLayout

__all__ = ["VisionLayout", "image_grid", "is_vision_language", "load_processor"]
