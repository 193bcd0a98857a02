"""From examples to batches in time: datasets, samplers, prefetching, streaming."""

from __future__ import annotations

from torch_collate_kit.loading.async_collator import AsyncBatchCollator
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.loading.mixing import MixedSampler
from torch_collate_kit.loading.packed_sampler import PackedBatchSampler
from torch_collate_kit.loading.prefetch import PrefetchLoader
from torch_collate_kit.loading.sampler import PrefetchingSampler, ResumableSampler
from torch_collate_kit.loading.streaming import PackedIterableDataset

__all__ = [
    "AsyncBatchCollator",
    "MixedSampler",
    "PackedBatchSampler",
    "PackedIterableDataset",
    "PrefetchLoader",
    "PrefetchingSampler",
    "ResumableSampler",
    "TokenizedDataset",
]
