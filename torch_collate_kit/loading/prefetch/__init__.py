"""One batch ahead of the consumer, with the exact position of what was consumed."""

from torch_collate_kit.loading.prefetch.loader import PrefetchLoader
from torch_collate_kit.loading.prefetch.reader import AsyncBatchCollator
from torch_collate_kit.loading.prefetch.timeline import StepTimes
from torch_collate_kit.loading.skipping import SkippedExample

__all__ = ["AsyncBatchCollator", "PrefetchLoader", "SkippedExample", "StepTimes"]
