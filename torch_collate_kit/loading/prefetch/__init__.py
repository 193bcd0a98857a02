"""One batch ahead of the consumer, with the exact position of what was consumed."""

from torch_collate_kit.loading.prefetch.async_collator import AsyncBatchCollator
from torch_collate_kit.loading.prefetch.loader import PrefetchLoader
from torch_collate_kit.loading.prefetch.skipped_examples import SkippedExample
from torch_collate_kit.loading.prefetch.timeline import StepTimes

__all__ = ["AsyncBatchCollator", "PrefetchLoader", "SkippedExample", "StepTimes"]
